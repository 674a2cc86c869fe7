"""Adapters that are not supported or do not fit get a typed error that names the field; hostile files do no harm."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from support.data import cases_of
from support.peft_checkpoints import (
    CONFIG,
    WEIGHTS,
    base_modules,
    edit_config,
    edit_weights,
    join_file,
    make_peft,
    save_adapter,
    split_file,
    tiny_llama,
)

from asyncengine.errors import AdapterError, InvalidParameter
from asyncengine.lora.checkpoint.files import discover
from asyncengine.lora.checkpoint.peft_config import Patterns
from asyncengine.lora.checkpoint.peft_loader import PeftLoader
from asyncengine.seams import ModuleDims

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def base() -> dict[str, ModuleDims]:
    return base_modules(tiny_llama())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "root" / "one")


def refused(base: dict[str, ModuleDims], folder: Path, **settings: Any) -> AdapterError:
    settings = {"dtype": torch.float32, "max_rank": 64, **settings}
    with pytest.raises(AdapterError) as caught:
        PeftLoader(base, **settings).load("one", folder)
    assert isinstance(caught.value, InvalidParameter)
    return caught.value


SETTINGS = [
    *cases_of(__file__).items(), ("auto_mapping", "x" * (1 << 20)), ("target_modules", "x" * 5000),
    *(("init_lora_weights", name) for name in ("pissa", "pissa_niter_4", "loftq", "corda", "lora_ga", "mica", 1, None)),
    *(("target_modules", value) for value in (0, "", "(q_proj", None, {"q_proj": 1}, [1])),
]  # fmt: skip
"""`init_lora_weights` may change the base model; a configuration of more than a megabyte is not read."""


@pytest.mark.parametrize(("field", "value"), SETTINGS, ids=lambda each: str(each)[:40])
def test_a_setting_that_cannot_be_honoured_is_named(field: str, value: Any, base: dict[str, ModuleDims], folder: Path):
    edit_config(folder, **{field: value})
    error = refused(base, folder)
    assert error.field == (CONFIG if field == "auto_mapping" else field)
    assert str(error).startswith(f"{error.field}: ")


@pytest.mark.parametrize("field", ["lora_alpha", "r"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e400", "1e300"])
def test_numbers_that_are_not_finite(field: str, text: str, base: dict[str, ModuleDims], folder: Path):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, field: "@"}).replace('"@"', text))
    assert refused(base, folder).field in (field, CONFIG)


BESIDE: dict[str, tuple[dict[str, Any], Any]] = {
    "use_dora": ({"use_dora": True}, False),
    "trainable_token_indices": ({"trainable_token_indices": [3]}, None),
    "lora_bias": ({"lora_bias": True}, False),
    "bias": ({"bias": "lora_only"}, "none"),
}


@pytest.mark.parametrize("field", BESIDE)
def test_tensors_beside_the_factors_need_their_setting(field: str, tmp_path: Path) -> None:
    settings, off = BESIDE[field]
    model = tiny_llama(attention_bias=True)
    make_peft(model, **settings).save_pretrained(tmp_path)
    biased = base_modules(tiny_llama(attention_bias=True))
    PeftLoader(biased, dtype=torch.float32, max_rank=8).load("one", tmp_path)
    edit_config(tmp_path, **{field: off})
    assert refused(biased, tmp_path).field == field


WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a norm": ({"modules_to_save": ["norm"]}, {}, "modules_to_save"),
    "a linear": ({"modules_to_save": ["o_proj"]}, {}, "modules_to_save"),
    "more tokens": ({"modules_to_save": ["embed_tokens", "lm_head"]}, {"vocab_size": 44}, "modules_to_save"),
    "a token beyond": ({"trainable_token_indices": [42]}, {"vocab_size": 44}, "trainable_token_indices"),
    "DoRA of the embedding": ({"target_modules": ["embed_tokens"], "use_dora": True}, {}, "use_dora"),
    "biases of norms": ({"bias": "all"}, {}, "bias"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_trained_whole_is_named(case: str, base: dict[str, ModuleDims], tmp_path: Path) -> None:
    settings, changes, field = WHOLE[case]
    make_peft(tiny_llama(**changes), **settings).save_pretrained(tmp_path)
    if case == "biases of norms":
        edit_weights(tmp_path, put("base_model.model.model.layers.0.input_layernorm.bias", torch.ones(16)))
    error = refused(base, tmp_path)
    assert error.field == field
    if "token" in case:
        assert "resize_token_embeddings" in str(error)


def test_dora_of_a_model_that_is_spread_over_processes(base: dict[str, ModuleDims], tmp_path: Path) -> None:
    save_adapter(tmp_path, use_dora=True)
    spread = {path: dims._replace(whole=False) for path, dims in base.items()}
    assert "spread over several processes" in str(refused(spread, tmp_path))


def test_tables_that_modules_to_save_does_not_name(tmp_path: Path) -> None:
    """Two of one size are what a resized model has; one of two that are tied is half of something."""
    save_adapter(tmp_path)
    tables = {f"base_model.model.{path}.weight": torch.ones(30, 16) for path in ("model.embed_tokens", "lm_head")}
    edit_weights(tmp_path, lambda tensors: tensors.update(tables))
    tied = base_modules(tiny_llama(tie_word_embeddings=True))
    adapter = PeftLoader(tied, dtype=torch.float32, max_rank=8).load("one", tmp_path)
    assert {path for path, own in adapter.modules.items() if own.table is not None} == {"lm_head", "model.embed_tokens"}
    edit_weights(tmp_path, lambda tensors: tensors.pop("base_model.model.lm_head.weight"))
    assert refused(tied, tmp_path).field == "modules_to_save"


def test_activated_lora_is_for_linears(base: dict[str, ModuleDims], tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, target_modules=["embed_tokens", "q_proj"])
    edit_config(folder, alora_invocation_tokens=[5, 7])
    assert refused(base, folder).field == "alora_invocation_tokens"


# ---------------------------------------------------------------- fit


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


MISFITS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no B": (lambda t: t.pop(Q_B), Q_A),
    "no A": (lambda t: t.pop(Q_A), Q_B),
    "neither": (lambda t: (t.pop(Q_A), t.pop(Q_B)), "target_modules"),
    "untargeted": (
        lambda t: [put(n.replace("q_proj", "o_proj"), torch.ones(s))(t) for n, s in ((Q_A, (4, 16)), (Q_B, (16, 4)))],
        "target_modules",
    ),
    "no such module": (rename(Q_A, Q_A.replace("layers.0", "layers.9")), Q_A.replace("layers.0", "layers.9")),
    "wrong rank": (put(Q_A, torch.ones(5, 16)), Q_A),
    "wrong inputs": (put(Q_A, torch.ones(4, 17)), Q_A),
    "wrong outputs": (put(Q_B, torch.ones(15, 4)), Q_B),
    "transposed": (put(Q_B, torch.ones(4, 16)), Q_B),
    "flat": (put(Q_A, torch.ones(64)), Q_A),
    "empty": (put(Q_A, torch.ones(0, 16)), Q_A),
    "nan": (put(Q_A, torch.full((4, 16), float("nan"))), Q_A),
    "infinite": (put(Q_B, torch.full((16, 4), float("-inf"))), Q_B),
    "integers": (put(Q_A, torch.ones(4, 16, dtype=torch.int32)), Q_A),
    "doubles": (put(Q_A, torch.ones(4, 16, dtype=torch.float64)), Q_A),
    "two dtypes": (put(Q_B, torch.ones(16, 4, dtype=torch.bfloat16)), Q_B),
    "embedding names": (rename(Q_A, Q_A.replace("lora_A.weight", "lora_embedding_A")), ""),
    "adapter name": (rename(Q_A, Q_A.replace("lora_A.", "lora_A.default.")), Q_A.replace("lora_A.", "lora_A.default.")),
    "no prefix": (rename(Q_A, Q_A.removeprefix("base_model.model.")), Q_A.removeprefix("base_model.model.")),
    "stray tensor": (put("surprise", torch.ones(1)), "surprise"),
    "magnitudes": (put(Q_A.replace("lora_A.weight", "lora_magnitude_vector"), torch.ones(16)), "use_dora"),
    "bias": (put("base_model.model.model.layers.0.self_attn.q_proj.bias", torch.ones(16)), "bias"),
    "whole layer": (put("base_model.model.model.layers.0.mlp.up_proj.weight", torch.ones(24, 16)), "modules_to_save"),
    "wider table": (put("base_model.model.lm_head.weight", torch.ones(40, 17)), "base_model.model.lm_head.weight"),
    "table": (put("base_model.model.model.embed_tokens.base_layer.weight", torch.ones(41, 16)), "modules_to_save"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit(misfit: str, base: dict[str, ModuleDims], folder: Path):
    edit, field = MISFITS[misfit]
    edit_weights(folder, edit)  # type: ignore[arg-type]
    error = refused(base, folder)
    assert not field or error.field == field


def test_ranks_above_the_limit(base: dict[str, ModuleDims], tmp_path: Path):
    assert refused(base, save_adapter(tmp_path / "r", r=9), max_rank=8).field == "r"
    one = save_adapter(tmp_path / "pattern", r=8, rank_pattern={"v_proj": 9})
    assert refused(base, one, max_rank=8).field == "rank_pattern"
    assert PeftLoader(base, dtype=torch.float32, max_rank=9).load("one", one).rank == 9


def test_values_beyond_the_models_dtype(base: dict[str, ModuleDims], folder: Path):
    edit_weights(folder, put(Q_A, torch.full((4, 16), 1e5)))
    assert refused(base, folder, dtype=torch.float16).field == Q_A
    edit_weights(folder, put(Q_A, torch.ones(4, 16)))
    edit_weights(folder, put(Q_B, torch.full((16, 4), 3e4)))  # beyond float16 only with the scaling
    PeftLoader(base, dtype=torch.float16, max_rank=8).load("one", folder)
    edit_config(folder, lora_alpha=16)
    error = refused(base, folder, dtype=torch.float16)
    assert error.field == Q_B
    assert "torch.float16" in str(error)


def test_an_adapter_larger_than_the_memory_for_all(base: dict[str, ModuleDims], folder: Path):
    """The bytes that count are those in the model's dtype, without copies of base weights in the file."""
    edit_weights(folder, put("base_model.model.lm_head.base_layer.weight", torch.ones(40, 16)))
    for dtype in (torch.float32, torch.bfloat16):
        loader = PeftLoader(base, dtype=dtype, max_rank=8)
        need = loader.load("one", folder).nbytes
        loader.fingerprint(folder, need)
        with pytest.raises(AdapterError, match=f"adapter_memory: .* needs {need}"):
            loader.fingerprint(folder, need - 1)


def test_another_base_model(base: dict[str, ModuleDims], folder: Path):
    wider = base_modules(tiny_llama(hidden_size=32, num_attention_heads=4))
    assert "must have shape" in str(refused(wider, folder))
    assert "the base model has no" in str(refused({"lm_head": ModuleDims(16, 40)}, folder))


def test_no_weights_at_all(base: dict[str, ModuleDims], folder: Path):
    edit_weights(folder, lambda tensors: tensors.clear())
    assert refused(base, folder).field == WEIGHTS


# ---------------------------------------------------------------- hostile files


def test_files_cut_off_anywhere_and_headers_longer_than_the_file(base: dict[str, ModuleDims], folder: Path):
    content = (folder / WEIGHTS).read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1]:
        (folder / WEIGHTS).write_bytes(content[:length])
        assert refused(base, folder).field == WEIGHTS
    for lie in (content + b"\0", *(struct.pack("<Q", length) + content[8:] for length in (2**63, 2**64 - 1, 10**6))):
        (folder / WEIGHTS).write_bytes(lie)
        assert refused(base, folder).field == WEIGHTS


def test_headers_that_lie(base: dict[str, ModuleDims], folder: Path):
    header, data = split_file(folder / WEIGHTS)

    def changed(**entry: Any) -> dict[str, Any]:
        return {**header, Q_A: {**header[Q_A], **entry}}

    start, end = header[Q_A]["data_offsets"]
    lies: list[Any] = [
        changed(data_offsets=[start - 4, end]), changed(data_offsets=[start, end - 4]),
        changed(data_offsets=[end, start]), changed(data_offsets=[0, 2**70]),
        changed(data_offsets=[float(start), float(end)]), changed(data_offsets=[start]), changed(data_offsets=None),
        changed(shape=[True, 16]), changed(shape=[-4, -16]), changed(shape="ab"), changed(dtype=None),
        {**header, Q_A: 7}, {**header, "second": header[Q_A]}, [],
    ]  # fmt: skip
    for lie in lies:
        join_file(folder / WEIGHTS, json.dumps(lie).encode(), data)
        assert refused(base, folder).field == WEIGHTS, lie
    for lie in (changed(shape=[4, 15]), changed(shape=[2**40, 2**40]), changed(dtype="F16"), changed(dtype="F8_E4M3")):
        join_file(folder / WEIGHTS, lie, data)
        assert refused(base, folder).field == Q_A


def test_a_key_twice(base: dict[str, ModuleDims], folder: Path):
    header, data = split_file(folder / WEIGHTS)
    entry = f"{json.dumps(Q_A)}:{json.dumps(header[Q_A])}"
    join_file(folder / WEIGHTS, json.dumps(header).encode()[:-1] + b"," + entry.encode() + b"}", data)
    assert "twice" in str(refused(base, folder))
    config = (folder / CONFIG).read_text().rstrip()
    (folder / CONFIG).write_text(config[:-1] + ', "r": 4}')
    assert refused(base, folder).field == CONFIG


def test_an_oversized_header_is_not_read(base: dict[str, ModuleDims], folder: Path):
    with (folder / WEIGHTS).open("wb") as stream:
        stream.write(struct.pack("<Q", 1 << 34))
        stream.truncate(1 << 35)  # sparse
    assert "over the limit" in str(refused(base, folder))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b'{"r":' * 100_000, b'{"r": ' + b"9" * 10_000 + b"}"])
def test_configurations_that_are_no_json(text: bytes, base: dict[str, ModuleDims], folder: Path):
    (folder / CONFIG).write_bytes(text)
    assert refused(base, folder).field == CONFIG


EVIL = {
    "nested counts": "(((a{1000}){1000}){1000}){1000}", "many counts": "(?:" * 20 + "a" + "){0,99}" * 20,
    "recursion": "(?R)*", "fuzzy count": "(?:q_proj){e<=2}", "nesting": "(" * 1500 + ")" * 1500,
    "unbalanced": "(q_proj", "lookbehind": "(?<=.*)q_proj",
}  # fmt: skip


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern", "alpha_pattern", "exclude_modules"])
@pytest.mark.parametrize("pattern", EVIL)
def test_patterns_that_blow_up_are_refused(field: str, pattern: str, base: dict[str, ModuleDims], folder: Path):
    edit_config(folder, **{field: {EVIL[pattern]: 4} if field.endswith("pattern") else EVIL[pattern]})
    assert refused(base, folder).field == field


@pytest.mark.parametrize(
    "pattern", ["(a|a)*b", "([a-z._0-9]*)*([a-z._0-9]*)*!", "(.*)*(.*)*(.*)*(.*)*!", "(.|.)" * 40 + "!"]
)
def test_patterns_that_backtrack_do_not_hang(pattern: str, base: dict[str, ModuleDims], folder: Path):
    """Each of these takes `re` for ever on one of the module paths."""
    edit_config(folder, target_modules=pattern)
    assert refused(base, folder).field == "target_modules"


def test_matching_has_a_time_limit():
    with pytest.raises(AdapterError, match="rank_pattern: takes too long"):
        Patterns(seconds=0).first_key(["q_proj"], "model.q_proj", "rank_pattern")


# ---------------------------------------------------------------- paths


def test_paths_that_leave_the_root(base: dict[str, ModuleDims], folder: Path, tmp_path: Path):
    root = folder.parent
    outside = save_adapter(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "chain").symlink_to(root / "link")
    (root / "ring").symlink_to(root / "ring")
    for name in (CONFIG, WEIGHTS):
        mixed = root / f"mixed {name}"
        mixed.mkdir()
        for file in (CONFIG, WEIGHTS):
            (mixed / file).symlink_to((outside if file == name else folder) / file)
    loader = PeftLoader(base, dtype=torch.float32, max_rank=8, root=root)
    bad = ["../outside", "one/../../outside", str(outside), "link", "chain", "ring", f"mixed {CONFIG}",
           f"mixed {WEIGHTS}", "/", "", "one\0", "missing", "x" * 5000, f"one/{CONFIG}"]  # fmt: skip
    for path in bad:
        with pytest.raises(AdapterError) as caught:
            loader.load("one", path)
        assert caught.value.field == "path", path
        with pytest.raises(AdapterError):
            loader.fingerprint(path, 1 << 30)


def test_nothing_is_told_about_what_lies_outside(base: dict[str, ModuleDims], folder: Path):
    loader = PeftLoader(base, dtype=torch.float32, max_rank=8, root=folder.parent)
    for path in ("..", "../missing", "/", "/missing"):
        with pytest.raises(AdapterError, match="leaves the folder"):
            loader.load("one", path)


def test_paths_inside_the_root(base: dict[str, ModuleDims], folder: Path):
    root = folder.parent
    (root / "alias").symlink_to("one")
    (root / "blobs").mkdir()
    (folder / WEIGHTS).rename(root / "blobs" / "1")
    (folder / WEIGHTS).symlink_to("../blobs/1")  # as the hub's cache lays files out
    loader = PeftLoader(base, dtype=torch.float32, max_rank=8, root=root)
    found = [loader.load("one", path).digest for path in ("one", "./one", "alias", folder, "blobs/../one")]
    assert len(dict.fromkeys(found)) == 1


def test_discovery_passes_over_what_leaves_the_root(folder: Path, tmp_path: Path):
    root = folder.parent
    save_adapter(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "empty").mkdir()
    (root / "file").write_text("")
    assert discover(root) == {"one": folder}


def test_pickles_are_never_read(base: dict[str, ModuleDims], folder: Path):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    error = refused(base, folder)
    assert "adapter_model.bin" in str(error)
    assert "safe_serialization" in str(error)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_does_not_block(base: dict[str, ModuleDims], folder: Path):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    assert "regular file" in str(refused(base, folder))


def test_a_file_that_changes_while_it_is_read(base: dict[str, ModuleDims], folder: Path, monkeypatch: Any):
    from asyncengine.lora.checkpoint.peft_loader import TensorFile

    read = TensorFile.read

    def and_touch(self: TensorFile, name: str) -> torch.Tensor:
        os.utime(folder / WEIGHTS, ns=(1, 1))
        return read(self, name)

    monkeypatch.setattr(TensorFile, "read", and_touch)
    assert "changed while" in str(refused(base, folder))

"""Model folders broken in every way: each loads and answers, or fails with a short typed error, within seconds.

`ASYNCENGINE_LONG=2000` runs every case instead of a sample of the slower ones.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.long import TIMES
from support.worded_model import make_worded_model

from asyncengine import EngineConfig, SamplingParams
from asyncengine.assembly.wiring import load_frontend
from asyncengine.errors import EngineError
from asyncengine.options import RequestOptions

CONFIG = EngineConfig(
    fuse=False, attention_backend="torch", kv_cache_memory="1MiB", max_num_seqs=2, max_num_batched_tokens=16
)
SECONDS = 20.0
"""A machine at its busiest included; on a free one every case takes less than one."""
SAMPLE = 25 * TIMES

Change = Callable[[Path], None]
BYTES: dict[str, bytes] = {
    "empty": b"", "garbage": bytes(random.Random(1).randrange(256) for _ in range(4096)), "nul": b"\0" * 64,
    "not json": b"{", "deep": b"[" * 200_000, "deep objects": b'{"a":' * 100_000,
    "closed deep": b"[" * 50_000 + b"]" * 50_000, "list": b"[]", "string": b'"x"', "null": b"null",
    "empty object": b"{}", "number": b"1e999", "long number": b"9" * 5000,
    "long key": b'{"' + b"k" * 1_000_000 + b'": 1}', "utf-16": '{"a": 1}'.encode("utf-16"),
    "surrogate": b'{"model_type": "\\ud800", "a": "\\ud800"}',
}  # fmt: skip
VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**30, "x", "", [], [1], ["x"], {}, {"a": 1}, "x" * 100_000]


def written(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def a_folder(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def dangling(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "nowhere")

    return change


def cut(name: str, share: float) -> Change:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return change


def with_fields(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps({**content, **values}))

    return change


def with_header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """The safetensors header edited, its length put right, the data left."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        header = edit(header) or header
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return change


def sharded(index: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(index)

    return change


def first_tensor(**values: Any) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        next(entry for name, entry in header.items() if name != "__metadata__").update(values)

    return edit


FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
WHOLE: dict[str, Change] = {
    **{f"{name}: {kind}": written(name, content) for name in FILES for kind, content in BYTES.items()},
    **{f"{name} removed": removed(name) for name in FILES},
    **{f"{name} is a folder": a_folder(name) for name in FILES},
    **{f"{name} points nowhere": dangling(name) for name in FILES},
    **{f"{name} cut to {share}": cut(name, share) for name in FILES for share in (0.1, 0.5, 0.999)},
    **{f"chat_template.jinja: {kind}": written("chat_template.jinja", content) for kind, content in BYTES.items()},
    "template that loops": written("chat_template.jinja", b"{% for i in range(10**9) %}x{% endfor %}"),
    "template of garbage": written("chat_template.jinja", b"{% for %}{{ }} {% endif"),
    "index of garbage": written("model.safetensors.index.json", b"{"),
    **{
        f"index: {kind}": sharded(content)
        for kind, content in {
            "garbage": b"{",
            "no map": b"{}",
            "a list": b'{"weight_map": [1]}',
            "a number": b'{"weight_map": {"a": 5}}',
            "above": b'{"weight_map": {"a": "../x/model.safetensors"}}',
            "absolute": b'{"weight_map": {"a": "/etc/passwd"}}',
            "itself": b'{"weight_map": {"a": "model.safetensors.index.json"}}',
            "one": b'{"weight_map": {"a": "other.safetensors"}}',
        }.items()
    },
    "header: no tensors": with_header(lambda header: {}),
    "header: a list": with_header(lambda header: [1]),
    "header: unknown type": with_header(first_tensor(dtype="F7")),
    "header: other type": with_header(first_tensor(dtype="I64")),
    "header: negative shape": with_header(first_tensor(shape=[-1, -98304])),
    "header: huge shape": with_header(first_tensor(shape=[2**62, 2**62])),
    "header: no shape": with_header(first_tensor(shape=None)),
    "header: text shape": with_header(first_tensor(shape="x")),
    "header: no offsets": with_header(first_tensor(data_offsets=[])),
    "header: turned offsets": with_header(first_tensor(data_offsets=[8, 0])),
    "header: shared offsets": with_header(first_tensor(data_offsets=[0, 8])),
    "header: entries are text": with_header(lambda header: dict.fromkeys(header, "x")),
    "header: metadata": with_header(lambda header: {**header, "__metadata__": {"format": "tf"}}),
    "header: other names": with_header(lambda header: {f"x.{name}": entry for name, entry in header.items()}),
    **{f"tokenizer.{name} = {str(value)[:9]!r}": with_fields("tokenizer.json", **{name: value})
       for name in ("model", "added_tokens", "pre_tokenizer", "decoder", "post_processor", "normalizer", "truncation")
       for value in (None, 5, "x", [1], {"type": "x"})},
    **{f"tokenizer_config.{name} = {str(value)[:9]!r}": with_fields("tokenizer_config.json", **{name: value})
       for name in ("tokenizer_class", "eos_token", "bos_token", "added_tokens_decoder", "chat_template",
                    "model_max_length", "auto_map", "extra_special_tokens")
       for value in (None, 5, "x", [1], {"a": 1})},
    **{f"generation_config.{name} = {str(value)[:9]!r}": with_fields("generation_config.json", **{name: value})
       for name in ("temperature", "top_p", "top_k", "repetition_penalty", "do_sample", "eos_token_id", "stop_strings")
       for value in VALUES},
}  # fmt: skip
IMPOSSIBLE = [
    ("num_hidden_layers", 10**6), ("max_position_embeddings", 10**9), ("vocab_size", 10**9), ("hidden_size", 10**9),
    ("intermediate_size", 10**9), ("num_attention_heads", 10**9), ("num_hidden_layers", 10**400),
]  # fmt: skip
UNLIKELY = [("hidden_size", 10**6), ("intermediate_size", 10**7), ("num_hidden_layers", 4000), ("vocab_size", 10**7)]
"""Random weights of these sizes may well be wanted; files of a few hundred thousand do not hold them."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_worded_model(tmp_path_factory.mktemp("broken") / "whole")


def check(whole: Path, folder: Path, change: Change, what: str, config: EngineConfig = CONFIG) -> str:
    """Break a copy and load it. Returns what it said; "" if it serves."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    change(folder)
    began = time.monotonic()
    try:
        core = load_frontend(str(folder), config)
    except EngineError as error:
        said = str(error)
        assert said, what
        assert len(said) < 1500, f"{what}: {said[:200]}"
    except BaseException as error:
        pytest.fail(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    else:
        said = ""
        core.prepare([5, 6, 7], SamplingParams(max_tokens=3), RequestOptions())  # the defaults can be used
        core.discard()
    assert time.monotonic() - began < SECONDS, what
    return said


def test_impossible_sizes_are_refused_at_once(whole: Path, tmp_path: Path) -> None:
    check(whole, tmp_path / "m", with_fields("config.json", num_hidden_layers=0), "imports")
    cases = [(name, size, kind) for name, size in IMPOSSIBLE for kind in ("auto", "dummy")]
    cases += [(name, size, "auto") for name, size in UNLIKELY]
    for name, size, kind in cases:
        what = f"{kind}: {name} = {str(size)[:20]}"
        change = with_fields("config.json", **{name: size})
        began = time.process_time()
        assert check(whole, tmp_path / "m", change, what, CONFIG.replace(load_format=kind)), what
        assert time.process_time() - began < 2, what


def test_broken_files(whole: Path, tmp_path: Path) -> None:
    assert not check(whole, tmp_path / "m", lambda folder: None, "nothing broken")
    for what in _some(list(WHOLE)):
        check(whole, tmp_path / "m", WHOLE[what], what)


def test_broken_fields(whole: Path, tmp_path: Path) -> None:
    names = [*json.loads((whole / "config.json").read_text()), "quantization_config", "auto_map", "layer_types"]
    names += ["text_config", "rope_scaling", "sliding_window", "is_encoder_decoder", "torch_dtype", "model_type"]
    for name, value in _some([(name, value) for name in names for value in VALUES]):
        what = f"config.{name} = {str(value)[:20]!r}"
        check(whole, tmp_path / "m", with_fields("config.json", **{name: value}), what)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"),
        ({"top_k": 1.5}, "top_k: must be an integer"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: must be >= 0.001"),
        ({"do_sample": "no"}, "do_sample must be true or false"),
        ({"stop_strings": ["a", ""]}, "each stop string must be a non-empty str"),
    ],
)
def test_defaults_nobody_could_be_served_with(values: dict[str, Any], said: str, whole: Path, tmp_path: Path) -> None:
    assert said in check(whole, tmp_path / "m", with_fields("generation_config.json", **values), str(values))


@pytest.mark.parametrize(
    "model", ["", "\0", "a" * 10_000, "\ud800", "~nobody-of-that-name/x", "demo/", "a:b", "-", 5, None]
)
def test_names_of_models(model: Any) -> None:
    from asyncengine import AsyncEngine

    with pytest.raises(EngineError) as refused:
        AsyncEngine(lambda: load_frontend(model, CONFIG), hosted=True).start_blocking()
    assert len(str(refused.value)) < 1500


def _some(cases: list[Any]) -> list[Any]:
    """All cases, or a sample that is the same every time."""
    return cases if len(cases) <= SAMPLE else random.Random(7).sample(cases, SAMPLE)

"""Adapters saved by peft load with the weights and scalings peft itself uses, under one identity per content."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from support.data import cases_of
from support.peft_checkpoints import base_modules, edit_config, edit_weights, make_peft, tiny_gpt2, tiny_llama

from asyncengine.errors import AdapterError
from asyncengine.lora.adapter import Adapter
from asyncengine.lora.checkpoint.peft_loader import PeftLoader


def load(folder: Path, model: Any = None, **settings: Any) -> Adapter:
    settings = {"dtype": torch.float32, "max_rank": 64, **settings}
    return PeftLoader(base_modules(model or tiny_llama()), **settings).load("one", folder)


def reloaded(model: Any, folder: Path) -> Any:
    """The model peft makes of the files. (It sorts patterns when it saves, so it may differ from what was trained.)"""
    import peft

    return peft.PeftModel.from_pretrained(model, folder)


def deltas_of(wrapped: Any) -> dict[str, torch.Tensor]:
    """Module -> what peft adds to its weight, [out, in]."""
    found = {}
    for path, module in wrapped.named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default").float()
            stored_transposed = type(module.get_base_layer()).__name__ in ("Conv1D", "Embedding")
            found[path.removeprefix("base_model.model.")] = delta.T if stored_transposed else delta
    return found


def assert_same_deltas(adapter: Adapter, wrapped: Any) -> None:
    expected = deltas_of(wrapped)
    assert list(adapter.modules) == sorted(expected)
    for path, delta in expected.items():
        weights = adapter.modules[path]
        ours = weights.b.float() @ weights.a.float()
        torch.testing.assert_close(ours, delta, rtol=1e-5, atol=1e-6)


CASES = cases_of(__file__)
FORMS: dict[str, dict[str, Any]] = CASES["forms"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_what_peft_computes(form: str, tmp_path: Path):
    make_peft(tiny_llama(), **FORMS[form]).save_pretrained(tmp_path)
    adapter = load(tmp_path)
    assert_same_deltas(adapter, reloaded(tiny_llama(), tmp_path))
    assert adapter.rank == max(weights.rank for weights in adapter.modules.values())
    assert adapter.nbytes == sum(w.a.nbytes + w.b.nbytes for w in adapter.modules.values())


def test_all_linear_written_by_hand(tmp_path: Path):
    """peft writes out what it matched; a configuration may still say all-linear."""
    wrapped = make_peft(tiny_llama(), target_modules="all-linear")
    wrapped.save_pretrained(tmp_path)
    edit_config(tmp_path, target_modules="all-linear")
    assert_same_deltas(load(tmp_path), wrapped)


def test_transposed_modules_of_gpt2(tmp_path: Path):
    make_peft(tiny_gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True).save_pretrained(tmp_path)
    assert_same_deltas(load(tmp_path, tiny_gpt2()), reloaded(tiny_gpt2(), tmp_path))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_held_as_a_slot_takes_them(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path):
    make_peft(tiny_llama(), lora_alpha=3).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: t.update({name: tensor.to(stored) for name, tensor in t.items()}))
    adapter, plain = load(tmp_path, dtype=dtype), load(tmp_path)
    for path, weights in adapter.modules.items():
        assert (weights.a.dtype, weights.b.dtype) == (dtype, dtype)
        assert weights.a.is_contiguous()
        assert weights.b.is_contiguous()
        assert torch.equal(weights.a, plain.modules[path].a.to(dtype))
        assert torch.equal(weights.b, plain.modules[path].b.to(dtype)), "rounded once, after scaling"
    assert adapter.nbytes == plain.nbytes * dtype.itemsize // 4
    assert adapter.digest == plain.digest, "the same content, whatever it is held as"


def test_the_scale_of_an_embedding_is_folded_in(tmp_path: Path):
    make_peft(tiny_llama(), target_modules=["embed_tokens", "q_proj"], lora_alpha=3).save_pretrained(tmp_path)
    base = base_modules(tiny_llama())
    path = "model.embed_tokens"
    plain = load(tmp_path)
    scaled = PeftLoader({**base, path: base[path]._replace(scale=5.0)}, dtype=torch.float32, max_rank=8).load(
        "one", tmp_path
    )
    torch.testing.assert_close(scaled.modules[path].b, plain.modules[path].b * 5)
    assert torch.equal(scaled.modules[path].a, plain.modules[path].a)
    assert scaled.digest == plain.digest


def test_a_converted_pissa_adapter_is_a_plain_one(tmp_path: Path):
    wrapped = make_peft(tiny_llama(), init_lora_weights="pissa")
    wrapped.peft_config["default"].init_lora_weights = True  # "was converted": what peft asks for and writes
    wrapped.save_pretrained(tmp_path / "start")
    wrapped.peft_config["default"].init_lora_weights = "pissa"
    wrapped.save_pretrained(tmp_path / "raw")
    wrapped.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    with pytest.raises(AdapterError, match="init_lora_weights"):
        load(tmp_path / "raw")
    assert load(tmp_path / "plain").rank == 8  # twice the trained rank: the new one minus the old one


# ---------------------------------------------------------------- identity


def test_the_digest_is_of_the_content(tmp_path: Path):
    make_peft(tiny_llama()).save_pretrained(tmp_path / "a")
    first = load(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    edit_config(tmp_path / "b", base_model_name_or_path="elsewhere", lora_dropout=0.5, task_type=None)
    other = PeftLoader(base_modules(tiny_llama()), dtype=torch.float32, max_rank=8).load("two", tmp_path / "b")
    assert first.digest == other.digest
    assert len(first.digest) == 64
    assert first.name != other.name


@pytest.mark.parametrize("change", ["one weight", "alpha", "rslora", "one module less", "dtype"])
def test_changed_content_is_another_adapter(change: str, tmp_path: Path):
    make_peft(tiny_llama(), r=4, lora_alpha=8).save_pretrained(tmp_path)
    before = load(tmp_path).digest
    name = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        if change == "one weight":
            tensors[name][3, 1] += 1e-3
        elif change == "one module less":
            for key in [key for key in tensors if "v_proj" in key]:
                del tensors[key]
        elif change == "dtype":
            tensors.update({key: tensor.double().half() for key, tensor in tensors.items()})

    edit_weights(tmp_path, nudge)
    edits: dict[str, Any] = {
        "alpha": {"lora_alpha": 9},
        "rslora": {"use_rslora": True},
        "one module less": {"target_modules": ["q_proj"]},
    }
    edit_config(tmp_path, **edits.get(change, {}))
    assert load(tmp_path).digest != before


BEYOND: dict[str, dict[str, Any]] = CASES["beyond"]


@pytest.mark.parametrize("part", BEYOND)
def test_whatever_an_adapter_changes_is_of_its_content(part: str, tmp_path: Path):
    model = tiny_llama(attention_bias=True)
    make_peft(model, **BEYOND[part]).save_pretrained(tmp_path)
    before = load(tmp_path, tiny_llama(attention_bias=True))
    assert before.nbytes == sum(weights.nbytes for weights in before.modules.values())

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in sorted(tensors) if name.endswith(part))
        tensors[name].view(-1)[-1] += 1e-3

    edit_weights(tmp_path, nudge)
    after = load(tmp_path, tiny_llama(attention_bias=True))
    assert after.digest != before.digest
    if part == "trainable_tokens_delta":
        edit_config(tmp_path, trainable_token_indices=[5, 3])
        assert load(tmp_path, tiny_llama(attention_bias=True)).digest != after.digest


def test_the_tokens_that_activate_an_adapter_are_of_its_content(tmp_path: Path):
    make_peft(tiny_llama()).save_pretrained(tmp_path)
    found = {load(tmp_path).digest}
    for tokens in ([5, 7], [7, 5]):
        edit_config(tmp_path, alora_invocation_tokens=tokens)
        adapter = load(tmp_path)
        assert adapter.invocation == tuple(tokens)
        found.add(adapter.digest)
    assert len(found) == 3


def test_two_ways_to_say_the_same_are_one_adapter(tmp_path: Path):
    make_peft(tiny_llama(), r=4, lora_alpha=8).save_pretrained(tmp_path)
    before = load(tmp_path).digest
    edit_config(tmp_path, lora_alpha=4, use_rslora=True, target_modules=r".*\.[qv]_proj")
    assert load(tmp_path).digest == before

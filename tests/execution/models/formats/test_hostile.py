"""Quantized checkpoints that do not fit together: each a named error, before any weight is written, within a second."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forwards import logits_of
from support.long import TIMES
from support.quantized_checkpoints import KINDS, Tensors, rewritten

from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel
from asyncengine.execution.models.checkpoint import open_checkpoint
from asyncengine.execution.models.loading import load_model

Pair = Callable[..., tuple[Path, Path]]
QUIET = EngineConfig(show_progress=False)
UP = "model.layers.1.mlp.up_proj"
Case = tuple[str, Callable[[Tensors], Any], dict[str, Any], type[EngineError], str]


def put(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    """A part of one matrix is changed."""
    return lambda tensors: tensors.update({f"{UP}.{part}": change(tensors[f"{UP}.{part}"]).contiguous()})


def gone(part: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(part)]


def same(tensors: Tensors) -> None:
    """No tensor is changed."""


def groups(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}


M, U = ModelNotFound, UnsupportedModel
CASES: dict[str, Case] = {
    "activation order without its index": (
        "gptq act-order", gone("g_idx"), {}, M, "quantized in activation order .desc_act. and has no g_idx",
    ),
    "an index out of range": ("gptq", put("g_idx", lambda t: t + 1), {}, M, rf"{UP}.g_idx does not give each of 2 gr"),
    "an index below 0": ("gptq", put("g_idx", lambda t: t - 1), {}, M, "g_idx does not give"),
    "an index of uneven groups": ("gptq", put("g_idx", lambda t: t * 0), {}, M, "g_idx does not give each of 2 groups"),
    "no zeros": ("gptq", gone("1.mlp.up_proj.qzeros"), {}, M, rf"lacks the tensor {UP}.qzeros"),
    "numbers of 64 bits": ("awq", put("qweight", lambda t: t.long()), {}, M, rf"{UP}.qweight as I64, not as I32"),
    "numbers in a row": ("gptq", put("qweight", lambda t: t.flatten()), {}, M, "qweight has the shape .* no matrix"),
    "whole scales": ("gptq", put("scales", lambda t: t.int()), {}, M, rf"{UP}.scales as I32, not as F16"),
    "scales of fewer outputs": ("gptq", put("scales", lambda t: t[:, :8]), {}, M, r"scales: \[2, 8\], not \[2, 128\]"),
    "groups that the configuration does not have": (
        "gptq", same, {"group_size": 128}, M, r"has \d groups for \d+ inputs, not groups of 128",
    ),
    "groups that do not divide": (
        "awq",
        lambda t: t.update({f"{UP}.{p}": t[f"{UP}.{p}"][[0, 1, 1]].contiguous() for p in ("scales", "qzeros")}),
        {}, M, "has 3 groups for 64 inputs",
    ),
    "three bits": ("gptq", same, {"bits": 3}, U, "GPTQ with 3 bits is not read; 4 and 8 bits are"),
    "other bits": ("gptq", same, {"bits": 8}, M, "wrong shape .*qzeros"),
    "bits in words": ("gptq", same, {"bits": "four"}, M, "bits must be a whole number, got 'four'"),
    "another layout": ("gptq", same, {"checkpoint_format": "marlin"}, U, "GPTQ in the layout 'marlin'"),
    "a layout that is none": ("gptq", same, {"checkpoint_format": ["gptq"]}, U, r"GPTQ in the layout \['gptq'\]"),
    "other words": ("gptq", same, {"pack_dtype": "int64"}, U, "packed into 'int64'"),
    "gemv": ("awq", same, {"version": "GEMV"}, U, "AWQ in the layout 'gemv' is not read; gemm is"),
    "eight bits of AWQ": ("awq", same, {"bits": 8}, U, "AWQ with 8 bits"),
    "a shape of terabytes": ("w4a16", put("weight_shape", lambda t: t * 2**40), {}, M, "wrong shape .*weight_packed"),
    "act-order elsewhere": ("w4a16 act-order", gone("weight_g_idx"), {}, M, "no weight_g_idx to say which"),
    "zeros of fewer groups": (
        "w4a16 asymmetric", put("weight_zero_point", lambda t: t[:, :1]), {}, M, "wrong shape .*weight_zero_point",
    ),
    "narrow groups": ("w4a16", put("weight_scale", lambda t: t.repeat(1, 4)), {}, M, "8 groups for 64 inputs"),
    "sparse": ("w8a8", same, {"sparsity_config": {"format": "sparse-24-bitmask"}}, U, "sparse weights .*are not read"),
    "marlin": ("w4a16", same, {"format": "marlin-24"}, U, "in the format 'marlin-24' is not read"),
    "rotated": ("w4a16", same, {"transform_config": {"config_groups": {"a": {}}}}, U, "rotated weights"),
    "six bits": ("w4a16", same, groups(num_bits=6), U, "with 6 bits is not read"),
    "no groups": ("w4a16", same, {"config_groups": [1]}, M, "config_groups must be an object of objects"),
    "no scale of eight bits": ("fp8 blocks", gone("1.mlp.up_proj.weight_scale_inv"), {}, M, "lacks .*weight_scale_inv"),
    "another block": ("fp8 blocks", same, {"weight_block_size": [128, 128]}, M, "wrong shape .*weight_scale_inv"),
    "no block": ("fp8 blocks", same, {"weight_block_size": "x"}, M, "a block must be two sizes, got 'x'"),
    "e5m2": (
        "fp8 blocks", put("weight", lambda t: t.float().to(torch.float8_e5m2)), {}, U, "FP8 as e5m2 is not read",
    ),
    "two numbers for the whole": (
        "nvfp4", put("weight_global_scale", lambda t: t.repeat(2)), {}, M, "wrong shape .*weight_global_scale",
    ),
    "unknown beside a matrix": (
        "gptq", lambda t: t.update({f"{UP}.wonder": torch.ones(1)}), {}, M, rf"does not have: {UP}.wonder",
    ),
    "a missing matrix": ("awq", gone("1.mlp.up_proj.qweight"), {}, M, rf"does not have: {UP}.(qzeros|scales)"),
    "an unknown method": ("awq", same, {"quant_method": "aqlm"}, U, "quantized with aqlm are not read"),
    "modelopt's other ones": ("modelopt nvfp4", same, {"quant_algo": "W4A8_AWQ"}, U, "ModelOpt's 'W4A8_AWQ'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(case: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is read before the refusal."""
    kind, change, settings, error, message = CASES[case]
    folder = rewritten(pair("llama", kind)[0], tmp_path / "a", change, **settings)
    monkeypatch.setattr(
        "asyncengine.execution.models.loading.load_weights", lambda *_: pytest.fail("weights were read")
    )
    begun = time.monotonic()
    with pytest.raises(error, match=message) as raised:
        load_model(str(folder), QUIET)
    assert time.monotonic() - begun < 60.0  # a busy machine; alone it takes a tenth of a second
    assert len(str(raised.value)) < 700


IGNORED: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "scales of a quantized KV cache": (
        "w8a8", lambda t: t.update({f"model.layers.0.self_attn.{k}_scale": torch.ones(1) for k in "kv"}),
    ),
    "scales of activations": ("w8a8", lambda t: t.update({f"{UP}.input_scale": torch.ones(1)})),
    "a bias of zeros": ("gptq", lambda t: t.update({f"{UP}.bias": torch.zeros(128)})),
}  # fmt: skip


@pytest.mark.parametrize("case", IGNORED)
def test_what_changes_nothing(case: str, pair: Pair, tmp_path: Path) -> None:
    kind, change = IGNORED[case]
    folder = rewritten(pair("llama", kind)[0], tmp_path / "a", change)
    found, expected = (load_model(str(each), QUIET).model for each in (folder, pair("llama", kind)[0]))
    assert torch.equal(logits_of(found, [3, 4, 5]), logits_of(expected, [3, 4, 5]))


def test_configurations_in_files_of_their_own(pair: Pair, tmp_path: Path) -> None:
    """AutoGPTQ and AutoAWQ wrote such files, the former with the weights under a name of its own."""
    for kind, name in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        folder = tmp_path / kind
        shutil.copytree(pair("llama", kind)[0], folder)
        config = json.loads((folder / "config.json").read_text())
        own = config.pop("quantization_config")
        own.pop("quant_method")
        if kind == "awq":
            own = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / name).write_text(json.dumps(own))
        if kind == "gptq":
            (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
        assert set(load_model(str(folder), QUIET).stored.values()) == {kind}


def test_rules_may_give_single_modules_other_settings(pair: Pair, tmp_path: Path) -> None:
    """GPTQModel's: what a module then has follows from its tensors."""
    folder = rewritten(
        pair("llama", "gptq")[0], tmp_path / "a", same, bits=8, group_size=128,
        dynamic={"+:model.*": {"bits": 4, "group_size": 32}, "-:lm_head": {}},
    )  # fmt: skip
    assert len(load_model(str(folder), QUIET).stored) == 21


def test_every_format_cut_off_anywhere(pair: Pair, tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS):
        folder = tmp_path / str(number)
        shutil.copytree(pair("llama", kind)[0], folder)
        file = folder / "model.safetensors"
        content = file.read_bytes()
        for keep in (0, 7, 9, 5000, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:keep])
            with pytest.raises(ModelNotFound, match=r"truncated|not a whole safetensors"):
                open_checkpoint(str(folder))


VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**30, "x", "", [], [1], {}, {"a": 1}, "x" * 10_000, [{"format": []}]]
ROUNDS = 400 * TIMES


def mutate(rng: random.Random, config: dict[str, Any], header: dict[str, Any]) -> None:
    """One thing is another: somewhere in quantization_config, or in what the header says of a tensor."""
    if rng.random() < 0.6:
        place: Any = config
        while True:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.3:
                break
            place = place[key]
        place[key] = copy.deepcopy(rng.choice(VALUES))
        return
    name = rng.choice([name for name in header if name != "__metadata__"])
    choice = rng.randrange(4)
    if choice == 0:
        del header[name]
    elif choice == 1:
        header[name + rng.choice(["_zero_point", "_x", ".g_idx"])] = header.pop(name)
    elif choice == 2:
        header[name][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(VALUES)
    elif isinstance(shape := header[name]["shape"], list):
        header[name]["shape"] = rng.choice([shape[::-1], [1, *shape], shape[:1], [], [len(shape)]])


def test_whatever_is_wrong_is_a_named_error(pair: Pair, tmp_path: Path) -> None:
    """`ASYNCENGINE_LONG=50` tries more."""
    rng = random.Random(0)
    for _ in range(ROUNDS):
        source = pair("llama", rng.choice(list(KINDS)))[0]
        config = json.loads((source / "config.json").read_text())
        content = (source / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        for _ in range(rng.choice((1, 1, 2, 5))):
            mutate(rng, config["quantization_config"], header)
        text = json.dumps(header).encode()
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        begun = time.monotonic()
        with suppress(EngineError):
            checkpoint = open_checkpoint(str(tmp_path))
            for name in checkpoint.tensors:
                checkpoint.read(name)
        assert time.monotonic() - begun < 60.0

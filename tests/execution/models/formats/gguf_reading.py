"""Contents of a GGUF model, in float32: its tensors, and a decoder made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.forwards import logits_of, transformers_logits
from transformers import AutoConfig

from asyncengine.config import EngineConfig
from asyncengine.execution.layers.kernels import layer_kernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.stored import dense
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import decoder_config_of
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.loading import load_model

LENGTH = 256
"""Tokens of the longest sequence."""
CPU = torch.device("cpu")


def decoder_of(model: GgufModel) -> Decoder:
    """The decoder that is written down, in float32, with dequantized weights."""
    config = dict(model.config)
    described = decoder_config_of(AutoConfig.for_model(config.pop("model_type"), **config), LENGTH)
    assert described is not None
    options = LayerOptions(torch.float32, CPU, layer_kernels("auto", torch.float32, CPU))
    decoder = Decoder(replace(described, mtp=None), options, LENGTH)
    slots = decoder.slots()
    assert slots.keys() <= model.tensors.keys()
    with torch.inference_mode():
        for name, slot in slots.items():
            assert slot.shape == model.tensors[name].shape
            slot.load(values(model, name))
    return decoder


def check_decoder(model: GgufModel, reference: Any, ids: Sequence[int]) -> None:
    """Compare logits of `ids` with those of transformers' model, whose weights are the numbers the file stands for."""
    expected = transformers_logits(reference, ids)
    bound = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits_of(decoder_of(model), ids), expected, rtol=0.0, atol=bound)


def median_error(path: Path, reference: Any, ids: Sequence[int]) -> float:
    """Error of a token's logits as the engine loads the file, relative to those of transformers' model."""
    loaded = load_model(str(path), EngineConfig(show_progress=False, dtype="float32")).model
    expected = transformers_logits(reference, ids)
    error = (logits_of(loaded, ids) - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.median())


def described(config: Any) -> str:
    """The decoder of a configuration in words, rotary frequencies to six digits: files hold divisors as float32."""
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda number: f"{float(number[0]):.6g}", str(decoder_config_of(config, LENGTH)))


def comes_back(model: GgufModel, config: Any) -> Any:
    """The configuration of a file, which describes the decoder that `config` does."""
    fields = dict(model.config)
    back = AutoConfig.for_model(fields.pop("model_type"), **fields)
    assert described(back) == described(config)
    return back


def values(model: GgufModel, name: str) -> torch.Tensor:
    """Experts' matrices, quantized, lie one below the other."""
    found = model.read(name)
    return found.float() if isinstance(found, torch.Tensor) else dense(found).view(model.tensors[name].shape)


def check_tensors(model: GgufModel, written: dict[str, torch.Tensor]) -> None:
    assert model.tensors.keys() == written.keys()
    for name, expected in written.items():
        assert model.tensors[name].shape == expected.shape, name
        assert torch.equal(values(model, name), expected.float()), name


def check_stacked(model: GgufModel, written: dict[str, torch.Tensor], kind: str) -> None:
    """`check_tensors` of gpt-oss, whose experts are one parameter [experts, inputs, outputs], quantized as `kind`."""
    assert model.tensors.keys() == written.keys()
    for name, tensor in written.items():
        assert model.tensors[name].shape == tuple(tensor.shape), name
        stored = model.read(name)
        if isinstance(stored, torch.Tensor):
            assert torch.equal(stored.float(), tensor), name
        else:
            assert (stored.name, stored.shape) == (kind, (tensor.shape[0] * tensor.shape[2], tensor.shape[1]))
            assert torch.equal(dense(stored), tensor.transpose(1, 2).flatten(0, 1)), name
            assert torch.equal(dense(stored, 3, 20), dense(stored)[3:20])
        model.release(stored)

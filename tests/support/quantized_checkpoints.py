"""Small checkpoints in the formats that people have on disk, written as those formats are documented.

A writer rounds a matrix in the simplest way, gives the tensors of a file, and says what they stand for in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support.data import cases_of

Tensors = dict[str, torch.Tensor]


class Written(NamedTuple):
    """One matrix [outputs, inputs]."""

    tensors: Tensors
    """Tensors by the last part of their names."""
    dense: torch.Tensor
    """float32: what they stand for."""


Writer = Callable[[torch.Tensor], Written]


def grouped(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """(numbers [n, inputs] from 0 on, scales [n, groups] float16, zeros [n, groups])."""
    rows, inputs = weight.shape
    values = weight.float().reshape(rows, inputs // group, group)
    if symmetric:
        scales = (values.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        scales = ((high - low) / (2**bits - 1)).half()
        zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1).int()
    scales = torch.where(scales == 0, 1, scales)
    numbers = (values / scales.float()[..., None]).round() + zeros[..., None]
    return numbers.clamp(0, 2**bits - 1).int().reshape(rows, inputs), scales, zeros.int()


def dense_of(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Scales [n, groups] of numbers [n, inputs]."""
    rows, inputs = numbers.shape
    values = numbers.reshape(rows, scales.shape[1], -1).float() - zeros[..., None].float()
    return (values * scales.float()[..., None]).reshape(rows, inputs)


def words(numbers: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [m, n bits / 32] of numbers [m, n]; place p of a word holds the number `places`[p] of its own."""
    each = 32 // bits
    rows = numbers.reshape(numbers.shape[0], -1, each).long()
    found = torch.zeros(rows.shape[:2], dtype=torch.int64)
    for place in range(each):
        found |= rows[:, :, place if places is None else places[place]] << (bits * place)
    return torch.where(found >= 2**31, found - 2**32, found).int()


def gptq(
    weight: torch.Tensor, *, bits: int = 4, group: int = 32, symmetric: bool = True, version: int = 1,
    mixed: bool = False,
) -> Written:  # fmt: skip
    """`mixed`: activation order, with groups of inputs that lie anywhere."""
    inputs = weight.shape[1]
    index = torch.arange(inputs) // group
    if mixed:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    order = index.argsort(stable=True)
    numbers, scales, zeros = grouped(weight[:, order], bits, group, symmetric)
    dense, placed = torch.empty(weight.shape), torch.empty_like(numbers)
    dense[:, order], placed[:, order] = dense_of(numbers, scales, zeros), numbers
    kept = (zeros - 1) % 2**bits if version == 1 else zeros
    return Written(
        {
            "qweight": words(placed, bits).T.contiguous(),
            "qzeros": words(kept.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": index.int(),
        },
        dense,
    )


def awq(weight: torch.Tensor, *, group: int = 32) -> Written:
    numbers, scales, zeros = grouped(weight, 4, group, False)
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    return Written(
        {"qweight": words(numbers.T, 4, places), "qzeros": words(zeros.T, 4, places), "scales": scales.T.contiguous()},
        dense_of(numbers, scales, zeros),
    )


def pack_quantized(
    weight: torch.Tensor, *, bits: int = 4, group: int = 32, symmetric: bool = True, mixed: bool = False
) -> Written:
    """compressed-tensors' w4a16 and w8a16."""
    inputs = weight.shape[1]
    size = inputs if group == -1 else group
    index = torch.arange(inputs) // size
    if mixed:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    order = index.argsort(stable=True)
    numbers, scales, zeros = grouped(weight[:, order], bits, size, symmetric)
    scales = scales.bfloat16()
    dense, placed = torch.empty(weight.shape), torch.empty_like(numbers)
    dense[:, order], placed[:, order] = dense_of(numbers, scales, zeros), numbers
    tensors = {"weight_packed": words(placed, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if mixed:
        tensors["weight_g_idx"] = index.int()
    return Written(tensors, dense)


def int_quantized(weight: torch.Tensor) -> Written:
    """compressed-tensors' w8a8: a scale for each output."""
    numbers, scales, zeros = grouped(weight, 8, weight.shape[1], True)
    scales = scales.bfloat16()
    tensors = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
    return Written(tensors, dense_of(numbers, scales, zeros))


def fp8(weight: torch.Tensor, *, scale: str = "weight_scale_inv", block: tuple[int, int] | None = (32, 32)) -> Written:
    """One FP8 matrix with a scale for each block of rows and inputs; (1, 0): for each row; None: for the matrix."""
    rows, inputs = weight.shape
    high, wide = block or (rows, inputs)
    wide = wide or inputs
    by_block = torch.nn.functional.pad(weight.float(), (0, -inputs % wide, 0, -rows % high))
    tiles = by_block.reshape(-(-rows // high), high, -(-inputs // wide), wide)
    scales = tiles.abs().amax((1, 3)) / 448
    if scale == "weight_scale":
        scales = scales.bfloat16().float()
    every = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :inputs]
    numbers = (weight / every).to(torch.float8_e4m3fn)
    kept = scales.bfloat16() if scale == "weight_scale" else scales
    tensors = {"weight": numbers, scale: kept.reshape(1) if block is None else kept}
    return Written(tensors, numbers.float() * every)


FOUR = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def four_bit_floats(values: torch.Tensor) -> torch.Tensor:
    """Codes of the values, uint8."""
    nearest = (values.abs()[..., None] - FOUR).abs().argmin(-1)
    return (nearest + 8 * (values < 0)).to(torch.uint8)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the first one low."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def four_bit_values(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes >= 8, -1.0, 1.0) * FOUR[(codes % 8).long()]


def mxfp4(weight: torch.Tensor) -> Written:
    """`weight` [..., outputs, inputs] -> blocks [..., outputs, groups, 16] and scales [..., outputs, groups]."""
    values = weight.float().unflatten(-1, (-1, 32))
    exponents = (values.abs().amax(-1) / 6).clamp(min=2.0**-100).log2().ceil()
    codes = four_bit_floats(values / exponents.exp2()[..., None])
    dense = (four_bit_values(codes) * exponents.exp2()[..., None]).flatten(-2)
    return Written({"blocks": pairs(codes), "scales": (exponents + 127).to(torch.uint8)}, dense)


def mxfp4_packed(weight: torch.Tensor) -> Written:
    """compressed-tensors' form of it."""
    found = mxfp4(weight)
    tensors = {"weight_packed": found.tensors["blocks"].flatten(-2), "weight_scale": found.tensors["scales"]}
    return Written(tensors, found.dense)


def nvfp4(weight: torch.Tensor, *, modelopt: bool = False) -> Written:
    whole = 6 * 448 / weight.abs().max()
    values = weight.float().unflatten(-1, (-1, 16))
    scales = (values.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    each = (scales.float() / whole)[..., None]
    codes = four_bit_floats(values / each.clamp(min=1e-12))
    dense = (four_bit_values(codes) * each).flatten(-2)
    tensors = {"weight_packed": pairs(codes).flatten(-2), "weight_scale": scales}
    if modelopt:
        return Written({**rename(tensors, "weight_packed", "weight"), "weight_scale_2": 1 / whole.reshape(())}, dense)
    return Written({**tensors, "weight_global_scale": whole.reshape(1)}, dense)


def rename(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


class Kind(NamedTuple):
    """A format: how matrices are written, and what quantization_config says."""

    write: Writer
    config: Mapping[str, Any]
    heads: bool = False
    """The output layer, too."""


KINDS: dict[str, Kind] = {
    name: Kind(partial(globals()[row["writer"]], **row["options"]), row["config"], row.get("heads", False))
    for name, row in cases_of(__file__).items()
}


def quantized(source: Path, target: Path, name: str, dense: Path | None = None, dtype: str = "float32") -> Path:
    """A copy of a checkpoint with its linears written in the format `name`; `dense`: where a copy with what these stand
    for goes."""
    kind = KINDS[name]
    shutil.copytree(source, target)
    tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    stored: Tensors = {}
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight") or (kind.heads and key == "lm_head.weight"):
            written = kind.write(tensor)
            stored.update({f"{key.removesuffix('weight')}{part}": each for part, each in written.tensors.items()})
            tensors[key] = written.dense
        else:
            stored[key] = tensor
    save_file(stored, str(target / "model.safetensors"), {"format": "pt"})
    if dense is not None:
        shutil.copytree(source, dense)
        save_file(tensors, str(dense / "model.safetensors"), {"format": "pt"})
    file = target / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": dict(kind.config), "dtype": dtype}
    file.write_text(json.dumps(config))
    return target


def rewritten(source: Path, target: Path, change: Callable[[Tensors], Any], **settings: Any) -> Path:
    """A copy of a checkpoint with other tensors, and other settings in its quantization_config."""
    shutil.copytree(source, target)
    tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, str(target / "model.safetensors"), {"format": "pt"})
    file = target / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(settings)
    file.write_text(json.dumps(config))
    return target

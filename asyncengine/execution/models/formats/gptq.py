"""GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel write it.

    qweight int32 [inputs bits / 32, outputs]     numbers along the inputs, the lowest bits first
    qzeros  int32 [groups, outputs bits / 32]     format "gptq": each less 1; "gptq_v2": as they are
    scales        [groups, outputs]
    g_idx   int32 [inputs]                        the group of each input; with activation order they are mixed

The sizes follow from the tensors; the configuration has to agree, but for modules that `dynamic` rules may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import UnsupportedModel, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats import unpacking
from asyncengine.execution.models.formats.stored_tensors import (
    SCALES,
    FoundMatrix,
    Parts,
    StoredTensors,
    integer,
    switch,
)

_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""A number that is added to a stored zero, by format."""
_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class GPTQSettings:
    """GPTQSettings of quantization_config, as far as it matters here."""

    bits: tuple[int, ...]
    groups: tuple[int, ...]
    """Inputs of a group, -1: all. More than one: rules may give some modules others."""
    added: int
    """To each stored zero."""
    needs_index: bool

    @staticmethod
    def read(config: Mapping[str, Any]) -> GPTQSettings:
        """Raises `UnsupportedModel` for a variant that is not read, `ModelNotFound` for what is no configuration."""
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if not isinstance(layout, str) or layout not in _FORMATS:
            raise UnsupportedModel(f"GPTQ in the layout {shorten(repr(layout), 80)} is not read; gptq and gptq_v2 are")
        if config.get("pack_dtype", "int32") != "int32":
            raise UnsupportedModel(f"GPTQ packed into {shorten(repr(config['pack_dtype']), 80)} is not read; int32 is")
        dynamic = config.get("dynamic")
        rules = [rule for rule in dynamic.values() if isinstance(rule, Mapping)] if isinstance(dynamic, Mapping) else []
        every = [config, *rules]
        bits, group = integer(config, "bits", 4), integer(config, "group_size", 128)
        found = GPTQSettings(
            tuple(integer(each, "bits", bits) for each in every),
            tuple(integer(each, "group_size", group) for each in every),
            _FORMATS[layout],
            any(switch(each, "desc_act", False) for each in every) and not switch(config, "static_groups", False),
        )
        wrong = next((number for number in found.bits if number not in _BITS), None)
        if wrong is not None:
            raise UnsupportedModel(f"GPTQ with {wrong} bits is not read; 4 and 8 bits are")
        return found


def find(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, FoundMatrix]:
    """All matrices, by the names that they have without quantization."""
    settings = GPTQSettings.read(config)
    return {f"{path}.weight": _matrix(path, settings, tensors) for path in tensors.paths(".qweight")}


def _matrix(path: str, settings: GPTQSettings, tensors: StoredTensors) -> FoundMatrix:
    numbers = tensors.matrix(f"{path}.qweight", ("I32",))
    scales = tensors.matrix(f"{path}.scales", SCALES)
    zeros = tensors.matrix(f"{path}.qzeros", ("I32",))
    (words, outputs), (groups, _) = numbers.shape, scales.shape
    bits, rest = divmod(32 * zeros.shape[1], outputs)
    if rest or bits not in settings.bits:
        raise tensors.misshapen(f"{path}.qzeros", zeros.shape, f"{settings.bits[0]} bits for each of {outputs} outputs")
    tensors.need(f"{path}.scales", SCALES, (groups, outputs))
    tensors.need(f"{path}.qzeros", ("I32",), (groups, zeros.shape[1]))
    inputs = words * 32 // bits
    allowed = [inputs if size == -1 else size for size in settings.groups]
    if inputs % groups or inputs // groups not in allowed:
        raise tensors.wrong(f"{path}.scales", f"has {groups} groups for {inputs} inputs, not groups of {allowed[0]}")
    form = form_of_zeros(tensors, path, inputs, groups, bits, scales.kind, settings.added)
    order = _order(tensors, path, inputs, groups, settings)
    parts = {"numbers": f"{path}.qweight", "scales": f"{path}.scales", "zeros": f"{path}.qzeros"}
    if f"{path}.g_idx" in tensors.headers:
        parts["index"] = f"{path}.g_idx"
    unpack = partial(_unpack, form=form, order=order, added=settings.added)
    return FoundMatrix(
        "gptq" if bits == 4 else f"gptq {bits} bits", (outputs, inputs), form, parts, unpack, order,
        sliced=(), turned=("numbers", "scales", "zeros"),
    )  # fmt: skip


def form_of_zeros(
    tensors: StoredTensors, path: str, inputs: int, groups: int, bits: int, kind: str, added: int
) -> NumberForm:
    """The form of a matrix with `path`.qzeros, all of which may be the middle: then they need not be kept."""
    middle = (1 << (bits - 1)) - added
    byte = middle * 0x11 if bits == 4 else middle
    stored = tensors.read(f"{path}.qzeros").contiguous().view(torch.uint8)
    form = unpacking.form_of_groups(inputs, groups, bits, kind, zeros=not bool((stored == byte).all()))
    if form is None:
        raise tensors.wrong(f"{path}.scales", f"has {groups} groups for {inputs} inputs, too narrow to be read here")
    return form


def order_of(tensors: StoredTensors, name: str, inputs: int, groups: int) -> NDArray[np.int64] | None:
    """Inputs in the order of their groups, of an index that gives the group of each; None: they are in order."""
    index = tensors.read(name).numpy().astype(np.int64)
    size = inputs // groups
    if np.array_equal(index, np.arange(inputs) // size):
        return None
    if index.min() < 0 or index.max() >= groups or (np.bincount(index, minlength=groups) != size).any():
        raise tensors.wrong(name, f"does not give each of {groups} groups {size} inputs")
    return np.argsort(index, kind="stable")


def _order(
    tensors: StoredTensors, path: str, inputs: int, groups: int, settings: GPTQSettings
) -> NDArray[np.int64] | None:
    name = f"{path}.g_idx"
    if name in tensors.headers:
        tensors.need(name, ("I32",), (inputs,))
        return order_of(tensors, name, inputs, groups)
    if settings.needs_index and groups > 1:
        raise tensors.wrong(path, "was quantized in activation order (desc_act) and has no g_idx to say which")
    return None


def _unpack(
    parts: Parts, first: int, last: int, *, form: NumberForm, order: NDArray[np.int64] | None, added: int
) -> GroupedRows:
    numbers = unpacking.along_inputs(parts["numbers"], first, last, form.bits)
    if order is not None:
        numbers = np.take(numbers, order, axis=1)
    zeros = None
    if form.below == "zeros":
        zeros = unpacking.along_outputs(parts["zeros"], first, last, form.bits)
        zeros = (zeros + np.uint8(added)) & np.uint8((1 << form.bits) - 1)
    return unpacking.grouped_rows(form, numbers, unpacking.floats(parts["scales"][first:last]), zeros)

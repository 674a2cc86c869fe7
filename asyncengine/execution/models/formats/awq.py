"""AWQ (Lin et al. 2024), as AutoAWQ writes it for its "gemm" kernels.

qweight int32 [inputs, outputs / 8]    numbers along the outputs; in a word, the outputs 0, 2, 4, 6, 1, 3, 5, 7
qzeros  int32 [groups, outputs / 8]    the same
scales        [groups, outputs]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from asyncengine.errors import UnsupportedModel, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats.gptq import form_of_zeros
from asyncengine.execution.models.formats.stored_tensors import SCALES, FoundMatrix, Parts, StoredTensors, integer
from asyncengine.execution.models.formats.unpacking import along_outputs, floats, grouped_rows

_LAYOUTS = ("gemm", "exllama", "ipex", "marlin")
"""Values of `version`: kernels that read one layout."""
_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of a word's eight, that the n-th four bits are."""


def find(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, FoundMatrix]:
    """All matrices, by the names that they have without quantization."""
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    if layout not in _LAYOUTS:
        raise UnsupportedModel(f"AWQ in the layout {shorten(repr(layout), 80)} is not read; gemm is")
    bits = integer(config, "bits", integer(config, "w_bit", 4))
    if bits != 4:
        raise UnsupportedModel(f"AWQ with {bits} bits is not read; 4 bits are")
    group = integer(config, "group_size", integer(config, "q_group_size", 128))
    return {f"{path}.weight": _matrix(path, group, tensors) for path in tensors.paths(".qweight")}


def _matrix(path: str, group: int, tensors: StoredTensors) -> FoundMatrix:
    inputs, words = tensors.matrix(f"{path}.qweight", ("I32",)).shape
    scales = tensors.matrix(f"{path}.scales", SCALES)
    groups, outputs = scales.shape
    if outputs != 8 * words:
        raise tensors.misshapen(f"{path}.scales", scales.shape, f"{8 * words} outputs")
    tensors.need(f"{path}.qzeros", ("I32",), (groups, words))
    size = inputs if group == -1 else group
    if inputs % groups or inputs // groups != size:
        raise tensors.wrong(f"{path}.scales", f"has {groups} groups for {inputs} inputs, not groups of {size}")
    form = form_of_zeros(tensors, path, inputs, groups, 4, scales.kind, 0)
    parts = {"numbers": f"{path}.qweight", "scales": f"{path}.scales", "zeros": f"{path}.qzeros"}
    return FoundMatrix(
        "awq", (outputs, inputs), form, parts, partial(_unpack, form=form), sliced=(),
        turned=("numbers", "scales", "zeros"),
    )  # fmt: skip


def _unpack(parts: Parts, first: int, last: int, *, form: NumberForm) -> GroupedRows:
    numbers = along_outputs(parts["numbers"], first, last, 4, _OUTPUTS)
    zeros = along_outputs(parts["zeros"], first, last, 4, _OUTPUTS) if form.below == "zeros" else None
    return grouped_rows(form, numbers, floats(parts["scales"][first:last]), zeros)

"""NVFP4: four-bit floats, every 16 of which share an eight-bit float, and the whole matrix one number.

Written by compressed-tensors (`weight_packed`, `weight_scale`, `weight_global_scale`, which divides) and by NVIDIA's
ModelOpt (`weight`, `weight_scale`, `weight_scale_2`, which multiplies). See `mxfp4` for the table.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats.mapped_matrix import FoundMatrix, Parts
from asyncengine.execution.models.formats.mxfp4 import TABLE
from asyncengine.execution.models.formats.stored_tensors import StoredTensors
from asyncengine.execution.models.formats.unpacking import floats, spread

_GROUP = 16
_FORM = NumberForm(4, _GROUP, "table", scale_dtype="float16", table=TABLE)


def matrix(path: str, tensors: StoredTensors, numbers: str, whole: str, *, divides: bool) -> FoundMatrix:
    """One module's. `numbers`, `whole`: its tensors of numbers and of the number for the whole matrix."""
    outputs, width = tensors.matrix(f"{path}.{numbers}", ("U8",)).shape
    if 2 * width % _GROUP:
        raise tensors.wrong(f"{path}.{numbers}", f"has {2 * width} inputs, no whole groups of {_GROUP}")
    tensors.need(f"{path}.weight_scale", ("F8_E4M3",), (outputs, 2 * width // _GROUP))
    found = tensors.need(f"{path}.{whole}", ("F32",))
    if found.shape not in ((), (1,)):
        raise tensors.misshapen(f"{path}.{whole}", found.shape, (1,))
    parts = {"numbers": f"{path}.{numbers}", "scales": f"{path}.weight_scale", "whole": f"{path}.{whole}"}
    unpack = partial(_unpack, divides=divides)
    return FoundMatrix("nvfp4", (outputs, 2 * width), _FORM, parts, unpack, sliced=("numbers", "scales"))


def _unpack(parts: Parts, first: int, last: int, *, divides: bool) -> GroupedRows:
    whole = np.float32(parts["whole"].reshape(-1)[0].item())
    scale = np.float32(0.5) / whole if divides else np.float32(0.5) * whole  # 0.5: the table has twice the values
    scales = floats(parts["scales"].view(torch.float8_e4m3fn)[first:last])
    return GroupedRows(
        spread(parts["numbers"][first:last].numpy()), scales, row_scales=np.full(last - first, scale, dtype=np.float32)
    )

"""NVIDIA's ModelOpt: FP8 with a scale for each matrix, and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncengine.errors import UnsupportedModel, shorten
from asyncengine.execution.models.formats import fp8, mxfp4
from asyncengine.execution.models.formats.stored_tensors import FoundMatrix, StoredTensors

_ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")
_OF_ACTIVATIONS = ("input_scale", "k_scale", "v_scale")


def find(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, FoundMatrix]:
    """All matrices, by the names that they have without quantization."""
    algorithm = config.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise UnsupportedModel(f"ModelOpt's {shorten(repr(algorithm), 80)} is not read; FP8 and NVFP4 are")
    found = {}
    for path in fp8.eight_bit_paths(tensors):
        found[path] = fp8.matrix(path, tensors, f"{path}.weight_scale", None)
    for path in tensors.paths(".weight"):
        if tensors.headers[f"{path}.weight"].kind == "U8":
            found[path] = mxfp4.nv_matrix(path, tensors, "weight", "weight_scale_2", divides=False)
    return {
        f"{path}.weight": replace(each, ignored=fp8.present(tensors, path, _OF_ACTIVATIONS))
        for path, each in found.items()
    }

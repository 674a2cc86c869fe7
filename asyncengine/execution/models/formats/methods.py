"""The format that a safetensors checkpoint is quantized in, and the matrices that it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.formats import StoredTensor, read_json

if TYPE_CHECKING:  # both import torch, and a wrong path is to be refused before that
    from collections.abc import Callable

    from asyncengine.execution.models.formats.mapped_matrix import FoundMatrix
    from asyncengine.execution.models.formats.stored_tensors import StoredTensors

    Find = Callable[[Mapping[str, Any], StoredTensors], dict[str, FoundMatrix]]
    """(quantization_config, tensors) -> matrices by the names that they have without quantization. Raises
    `ModelNotFound` for tensors that do not fit together, `UnsupportedModel` for a variant that is not read."""

METHODS: Mapping[str, str] = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
    "modelopt": "modelopt",
}
"""quant_method -> the file in this folder with its `find`."""
_OWN_FILES = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt"))
"""Files that may have the configuration when config.json has none, and the method of each."""
_OF_THE_CACHE = re.compile(r".*(attn|k_proj|v_proj|q_proj)\.([kqv]|kv|output|prob)_(scale|zero_point)")
"""Scales of a quantized KV cache."""


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization that a checkpoint declares, with its `quant_method`; None: it is not."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if place.get(name):
                found = place[name]
                if not isinstance(found, Mapping):
                    raise ModelNotFound(f"{folder / 'config.json'}: {name} must be an object")
                return found if name == "quantization_config" else {"quant_method": "compressed-tensors", **found}
    for name, method in _OWN_FILES:
        if (folder / name).is_file():
            found = read_json(folder / name, str(folder))
            inner = found.get("quantization")
            return {"quant_method": method, **(inner if isinstance(inner, Mapping) else {}), **found}
    return None


def method_of(settings: Mapping[str, Any]) -> str:
    """The name of a format."""
    return shorten(str(settings.get("quant_method", "unknown")), 80)


def find_matrices(settings: Mapping[str, Any], tensors: StoredTensors) -> dict[str, FoundMatrix]:
    """The quantized matrices of a checkpoint, by the names that they have without quantization.

    Raises `UnsupportedModel` for a format that is not read, `ModelNotFound` for tensors that do not fit together.
    """
    settings = _known_as(settings)
    method = method_of(settings)
    if method not in METHODS:
        raise UnsupportedModel(
            f"checkpoints quantized with {method} are not read; {', '.join(sorted(METHODS))} and GGUF are. Use the "
            "unquantized weights, and quantization='int8' or 'int4'"
        )
    find: Find = import_module(f"asyncengine.execution.models.formats.{METHODS[method]}").find
    return find(settings, tensors)


def _known_as(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """AutoRound writes other tools' layouts, and names modules with settings of their own."""
    packing = str(settings.get("packing_format", ""))
    if settings.get("quant_method") != "auto-round" or not packing.startswith("auto_round:auto_"):
        return settings
    named = {key: settings[key] for key in ("bits", "group_size") if key in settings}
    return {**named, "quant_method": packing.removeprefix("auto_round:auto_"), "dynamic": settings.get("extra_config")}


def by_logical_name(
    folder: Path, tensors: Mapping[str, StoredTensor], matrices: Mapping[str, FoundMatrix]
) -> dict[str, StoredTensor]:
    """The checkpoint's tensors as if it were not quantized: a matrix for its numbers, scales and the like.

    Raises `ModelNotFound` where there is a matrix that is stored twice.
    """
    of_numbers = {next(iter(found.parts.values())): name for name, found in matrices.items()}
    consumed = {part for found in matrices.values() for part in (*found.parts.values(), *found.ignored)}
    named: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        if name in of_numbers:
            logical = of_numbers[name]
            if logical != name and logical in tensors:
                raise ModelNotFound(f"{folder} has both {logical} and its quantized form {name}")
            found = matrices[logical]
            named[logical] = StoredTensor(found.kind, _dense_shape(found), stored.file)
        elif name not in consumed and not (matrices and _OF_THE_CACHE.fullmatch(name)):
            named[name] = stored
    return named


def _dense_shape(found: FoundMatrix) -> tuple[int, ...]:
    """That of the tensor that it stands for: transformers has stacked experts as [experts, inputs, outputs]."""
    outputs, inputs = found.shape
    return (found.experts, inputs, outputs // found.experts) if found.experts else found.shape

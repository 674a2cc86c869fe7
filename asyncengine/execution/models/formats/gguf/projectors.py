"""Projector types of GGUF vision towers (`clip.projector_type`): the fields that each adds to the language model's
configuration, and its tensor names in transformers.

Sources: llama.cpp's conversion/{qwenvl,qwen3vl,gemma,smolvlm,internvl,lfm2,llava}.py for the changes of its converters,
which are undone here, and tools/mtmd/clip.cpp for defaults of missing values.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.formats.gguf.header import Header, shortest
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.formats.gguf.names import read_tables

_TOKENS = (8, 4096)
"""Fewest and most tokens of a picture for Qwen if the header has no limits in pixels: clip.cpp's defaults."""
_MAX_PIXELS = 2**26
"""Most pixels to which a header may let a picture be enlarged; Qwen's own limit is a quarter of it."""


LAYER = re.compile(r"v\.(blk|deepstack)\.([0-9]{1,5})\.")
"""Prefix of the tensor names of a layer: stem and layer number."""


class Tower:
    """Header of a vision tower, with sizes read from its tensors; `model` is the language model."""

    def __init__(self, header: Header, model: GgufModel) -> None:
        """Raises `ModelNotFound` for missing layers."""
        self.header, self.model = header, model
        self.width, *_, self.patch = self.shape("v.patch_embd.weight", 4)
        listed = [(match[1], int(match[2])) for name in header.tensors if (match := LAYER.match(name))]
        layers, self.deep = (sorted({number for stem, number in listed if stem == key}) for key in ("blk", "deepstack"))
        self.layers = len(layers)  # `deep`: those whose features go into the language model's first layers (DeepStack)
        if layers != list(range(self.layers)):
            raise self.wrong("lacks some of its layers")
        if self.deep and self.deep[-1] >= self.layers:
            raise self.wrong(f"has features of layer {self.deep[-1]}, of {self.layers}")
        outputs, inputs = self.shape("v.blk.0.ffn_up.weight")
        names = ("v.blk.{}.ffn_up", "v.blk.{}.ffn_down")
        self.swapped = dict(zip(names, names[::-1], strict=True)) if inputs != self.width == outputs else {}
        """Tensor names that early converters swapped."""
        self.inner = inputs if self.swapped else outputs

    def shape(self, name: str, axes: int = 2) -> tuple[int, ...]:
        """The shape of a required tensor with `axes` dimensions. Raises `ModelNotFound`."""
        info = self.header.tensors.get(name)
        if info is None or len(info.shape) != axes:
            raise self.wrong(f"lacks the tensor {name}, or has it in another shape than one of {axes} dimensions")
        return info.shape

    def rows(self, name: str) -> int:
        """The number of rows of a tensor's matrices. Raises `ModelNotFound`."""
        info = self.header.tensors.get(name)
        if info is None or len(info.shape) < 2:
            raise self.wrong(f"lacks the tensor {name}, or has it as a vector")
        return int(info.shape[-2])

    def wrong(self, problem: str) -> ModelNotFound:
        return ModelNotFound(f"{self.header.path} {problem}")

    def sections(self) -> list[int]:
        """`mrope_section`: pairs of a head's dimensions that rotate by time, row and column. Raises `ModelNotFound`."""
        key = f"{self.model.metadata.short.get('general.architecture')}.rope.dimension_sections"
        sections = self.model.metadata.short.get(key)
        sections = sections[:3] if isinstance(sections, list) and 3 <= len(sections) <= 4 else []
        rope = self.model.config["rope_parameters"]
        if 2 * sum(sections) != int(self.model.config["head_dim"] * rope.get("partial_rotary_factor", 1.0)):
            raise ModelNotFound(f"{self.model.path}: {key} must say which pairs of a head rotate by which axis")
        return sections

    def merged(self, name: str) -> int:
        """The side, in patches, of the square that matrix `name` projects into one token. Raises `ModelNotFound`."""
        inputs = self.shape(name)[1]
        side = math.isqrt(inputs // self.width)
        if not side or side * side * self.width != inputs:
            raise self.wrong(f"has {inputs} inputs of {name}, which are no square of patches of {self.width} numbers")
        return side

    def side(self) -> int:
        """Patches along a side of the (square) pictures, by the size of the position table. Raises `ModelNotFound`."""
        rows = self.shape("v.position_embd.weight")[0]
        if math.isqrt(rows) ** 2 != rows:
            raise self.wrong(f"has {rows} positions, which are no square")
        return math.isqrt(rows)

    @property
    def heads(self) -> int:
        """Heads of each layer. Raises `ModelNotFound`."""
        count = self.header.positive("attention.head_count")
        if self.width % count:
            raise self.wrong(f"has {self.width} numbers of hidden states for {count} heads")
        return count

    @property
    def epsilon(self) -> float:
        """Epsilon of the norms."""
        return float(self.header["attention.layer_norm_epsilon"])

    @property
    def activation(self) -> str:
        """The name of the activation, as `clip.use_silu` says."""
        return "silu" if self.header.metadata.get("clip.use_silu") is True else "gelu"

    def colors(self) -> dict[str, list[float]]:
        """`image_mean` and `image_std` of the pixels' normalization, by color channel. Raises `ModelNotFound`."""
        statistics = {}
        for name in ("image_mean", "image_std"):
            values = self.header.other(name)
            fit = isinstance(values, list) and len(values) == 3 and all(isinstance(each, float) for each in values)
            if not fit or not all(map(math.isfinite, values)):
                raise self.wrong(f"must have three finite numbers as clip.vision.{name}")
            statistics[name] = [shortest(value) for value in values]
        return statistics


Facts = Callable[[Tower], Mapping[str, Any]]
"""Function that computes values of a projector type from header and tensors, by the names that projectors.toml has for
them, and "text": fields of the language model. Raises `ModelNotFound`, `UnsupportedModel`."""
Restore = Callable[[Tower, str, torch.Tensor], torch.Tensor]
"""(tower, name in transformers, tensor of the file) -> the tensor as transformers has it."""


@dataclass(frozen=True, slots=True)
class Projector:
    """One of llama.cpp's projector types, a table of projectors.toml."""

    names: Mapping[str, str]
    """Tensor names without suffix -> names in transformers. "NAME#N": component N of a joined tensor; "": a copy of a
    tensor that the language model has."""
    families: Mapping[str, Sequence[str]]
    """model_type of the language model's file -> (model_type of the multimodal model, of the language model in it)."""
    tokens: Mapping[str, str]
    """Fields of config.json that hold a token id -> text of the token, which the vocabulary must have."""
    content: Mapping[str, Mapping[str, Any]]
    """Templates of the configurations "vision", "processor" and "whole" that the tower adds to the language model's."""
    facts: Facts
    restore: Restore = lambda tower, name, tensor: tensor

    def describe(self, tower: Tower) -> dict[str, dict[str, Any]]:
        """`content` filled in for one tower, and "text": fields to override in the language model's configuration.
        Raises as `facts`."""
        known = self.facts(tower)
        return {"text": known.get("text", {}), **_filled(self.content, tower, known)}


def _filled(template: Any, tower: Tower, known: Mapping[str, Any]) -> Any:
    """A template with "=NAME" replaced by the value `known` by that name, or else the tower's attribute, and "?NAME" by
    whether the file has that tensor."""
    if isinstance(template, Mapping):
        return {name: _filled(inner, tower, known) for name, inner in template.items()}
    if isinstance(template, list):
        return [_filled(inner, tower, known) for inner in template]
    if isinstance(template, str) and template.startswith("?"):
        return template[1:] in tower.header.tensors
    if isinstance(template, str) and template.startswith("="):
        name = template[1:]
        return known[name] if name in known else getattr(tower, name)
    return template


def _gemma3(tower: Tower) -> Mapping[str, Any]:
    scale, side = tower.header.get("projector.scale_factor", 4), tower.side()
    if not scale or side % scale:
        raise tower.wrong(f"has a clip.vision.projector.scale_factor of {scale} for {side} patches a side")
    return {"pixels": side * tower.patch, "tokens": (side // scale) ** 2}


def _idefics3(tower: Tower) -> Mapping[str, Any]:
    longest, scale = tower.header.positive("preproc_image_size"), tower.merged("mm.model.fc.weight")
    return {"longest": longest, "pixels": tower.side() * tower.patch, "scale": scale}


def _qwen(tower: Tower) -> dict[str, Any]:
    merge = tower.merged("mm.0.weight")
    least, most = (
        tower.header.get(f"image_{end}_pixels", tokens * (merge * tower.patch) ** 2)
        for end, tokens in zip(("min", "max"), _TOKENS, strict=True)
    )
    if not 0 < least <= most <= _MAX_PIXELS:
        raise tower.wrong(f"has pictures of {least} to {most} pixels, at most {_MAX_PIXELS}")
    rope = tower.model.config["rope_parameters"] | {"mrope_section": tower.sections()}
    return {
        "merge": merge, "least": least, "most": most, "outer_width": tower.model.config["hidden_size"],
        "ratio": tower.inner // tower.width, "text": {"rope_parameters": rope},
    }  # fmt: skip


def _qwen25(tower: Tower) -> Mapping[str, Any]:
    period = tower.header.positive("n_wa_pattern")
    whole, window = list(range(period - 1, tower.layers, period)), tower.header.get("window_size", 8 * tower.patch)
    return _qwen(tower) | {"whole_layers": whole, "window": window}


def _qwen3(tower: Tower) -> Mapping[str, Any]:
    facts = _qwen(tower) | {"positions": tower.side() ** 2}
    facts["text"]["rope_parameters"]["mrope_interleaved"] = True
    return facts


def _internvl(tower: Tower) -> Mapping[str, Any]:
    scale, positions = tower.header.positive("projector.scale_factor"), tower.rows("v.position_embd.weight")
    side = math.isqrt(positions - 1)
    if side**2 + 1 != positions or side % scale:
        raise tower.wrong(f"has {positions} positions for squares of {scale} x {scale} patches")
    norm = "layer_norm" if "v.blk.0.ln1.bias" in tower.header.tensors else "rms_norm"
    return {
        "pixels": side * tower.patch, "norm": norm,
        "fewest": tower.header.get("preproc_min_tiles", 1), "most": tower.header.get("preproc_max_tiles", 12),
        "ratio": 1 / scale, "tokens": (side // scale) ** 2,
    }  # fmt: skip


def _restore_internvl(tower: Tower, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1, -1, tower.width) if name.rpartition(".")[2] in _BATCHED else tensor


def _lfm2(tower: Tower) -> Mapping[str, Any]:
    scale, positions = tower.header.positive("projector.scale_factor"), tower.rows("v.position_embd.weight")
    return {"scale": scale, "positions": positions, "outer_width": tower.rows("mm.1.weight")}


def _restore_lfm2(tower: Tower, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Color channels come last in a patch of transformers' matrix, and first in the file's convolution."""
    return tensor.permute(0, 2, 3, 1).reshape(len(tensor), -1) if tensor.ndim == 4 else tensor


def _pixtral(tower: Tower) -> Mapping[str, Any]:
    if "mm.patch_merger.weight" not in tower.header.tensors:
        raise UnsupportedModel(f"{tower.header.path}: Pixtral without a patch merger is not read; Mistral 3 is")
    return {
        "longest": tower.header.positive("image_size"), "head_dim": tower.width // tower.heads,
        "theta": tower.header.get("rope.freq_base", 10000.0), "merge": tower.merged("mm.patch_merger.weight"),
        "text": {"sliding_window": None},
    }  # fmt: skip


def _restore_pixtral(tower: Tower, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Halves of a rotated head follow each other in transformers, and are interleaved in the file."""
    if not name.endswith(("attention.q_proj.weight", "attention.k_proj.weight")):
        return tensor
    heads = tower.header.positive("attention.head_count")
    return tensor.reshape(heads, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


PARAMETERS = ("_weight", "cls_token", "position_embeddings", "lambda_1", "lambda_2")
"""Endings of names in transformers that take no ".weight" or ".bias"."""
_BATCHED = ("cls_token", "position_embeddings")
"""InternVL's parameters that transformers has as a batch of one."""
_NAMES = read_tables("projector_names.toml")
_TABLES = tomllib.loads((resources.files(__package__) / "projectors.toml").read_text(encoding="utf-8"))
_CODE: Mapping[str, Sequence[Any]] = {
    "gemma3": (_gemma3,),
    "idefics3": (_idefics3,),
    "qwen2vl_merger": (_qwen,),
    "qwen2.5vl_merger": (_qwen25,),
    "qwen3vl_merger": (_qwen3,),
    "internvl": (_internvl, _restore_internvl),
    "lfm2": (_lfm2, _restore_lfm2),
    "pixtral": (_pixtral, _restore_pixtral),
}
"""`facts` of each projector type and, if its converter changes tensors, `restore`."""
PROJECTORS: Mapping[str, Projector] = {
    name: Projector(_NAMES[name], table.pop("families"), table.pop("tokens"), {"whole": {}} | table, *_CODE[name])
    for name, table in _TABLES.items()
}
"""Projectors by `clip.projector_type`."""

"""Kinds of image parts of GGUF models (`clip.projector_type`): what each adds to the language model's configuration,
and the names of its tensors in transformers.

Sources: llama.cpp's conversion/{qwenvl,qwen3vl,gemma,smolvlm,internvl,lfm2,llava}.py for what a converter does, which
is undone here, and tools/mtmd/clip.cpp for what a header leaves to the reader.
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
"""Fewest and most tokens of a picture of Qwen's where the header has no limits in pixels: clip.cpp's own."""
_MAX_PIXELS = 2**26
"""Pixels to which a picture may be enlarged; Qwen's own limit is a quarter of it."""


LAYER = re.compile(r"v\.(blk|deepstack)\.([0-9]{1,5})\.")
"""A tensor's name up to what it is of its layer."""


class Tower:
    """The image part's header, with sizes of its tensors; `model` is the language model."""

    def __init__(self, header: Header, model: GgufModel) -> None:
        """Raises `ModelNotFound` for layers that are not there."""
        self.header, self.model = header, model
        self.width, *_, self.patch = self.shape("v.patch_embd.weight", 4)
        every = [(found[1], int(found[2])) for name in header.tensors if (found := LAYER.match(name))]
        layers, self.deep = (sorted({number for kind, number in every if kind == of}) for of in ("blk", "deepstack"))
        self.layers = len(layers)  # `deep`: those whose hidden states go into the language model's first layers as well
        if layers != list(range(self.layers)):
            raise self.wrong("lacks some of its layers")
        if self.deep and self.deep[-1] >= self.layers:
            raise self.wrong(f"has features of layer {self.deep[-1]}, of {self.layers}")
        outputs, inputs = self.shape("v.blk.0.ffn_up.weight")
        names = ("v.blk.{}.ffn_up", "v.blk.{}.ffn_down")
        self.swapped = dict(zip(names, names[::-1], strict=True)) if inputs != self.width == outputs else {}
        """Names of layers' tensors that early converters took for each other."""
        self.inner = inputs if self.swapped else outputs

    def shape(self, name: str, axes: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that has to be there. Raises `ModelNotFound`."""
        place = self.header.tensors.get(name)
        if place is None or len(place.shape) != axes:
            raise self.wrong(f"lacks the tensor {name}, or has it in another shape than one of {axes} dimensions")
        return place.shape

    def rows(self, name: str) -> int:
        """The number of rows of a tensor's matrices. Raises `ModelNotFound`."""
        place = self.header.tensors.get(name)
        if place is None or len(place.shape) < 2:
            raise self.wrong(f"lacks the tensor {name}, or has it as a vector")
        return int(place.shape[-2])

    def wrong(self, what: str) -> ModelNotFound:
        return ModelNotFound(f"{self.header.path} {what}")

    def sections(self) -> list[int]:
        """Pairs of a head's numbers that rotate by time, row and column. Raises `ModelNotFound`."""
        key = f"{self.model.metadata.short.get('general.architecture')}.rope.dimension_sections"
        found = self.model.metadata.short.get(key)
        found = found[:3] if isinstance(found, list) and 3 <= len(found) <= 4 else []
        rope = self.model.config["rope_parameters"]
        if 2 * sum(found) != int(self.model.config["head_dim"] * rope.get("partial_rotary_factor", 1.0)):
            raise ModelNotFound(f"{self.model.path}: {key} must say which pairs of a head rotate by which axis")
        return found

    def merged(self, name: str) -> int:
        """The side of the square of patches that `name` projects into one token."""
        inputs = self.shape(name)[1]
        side = math.isqrt(inputs // self.width)
        if not side or side * side * self.width != inputs:
            raise self.wrong(f"has {inputs} inputs of {name}, which are no square of patches of {self.width} numbers")
        return side

    def side(self) -> int:
        """Patches along a side of the pictures, which are square, by its table of positions."""
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
        """The name of the activation, where a header has a switch for it."""
        return "silu" if self.header.metadata.get("clip.use_silu") is True else "gelu"

    def colors(self) -> dict[str, list[float]]:
        """Mean and deviation of each color, which are taken from pixels."""
        found = {}
        for name in ("image_mean", "image_std"):
            values = self.header.other(name)
            fit = isinstance(values, list) and len(values) == 3 and all(isinstance(each, float) for each in values)
            if not fit or not all(map(math.isfinite, values)):
                raise self.wrong(f"must have three finite numbers as clip.vision.{name}")
            found[name] = [shortest(value) for value in values]
        return found


Facts = Callable[[Tower], Mapping[str, Any]]
"""Values that a kind works out of header and tensors, by the names that its tables have for them; and "text" itself.
Raises `ModelNotFound`, `UnsupportedModel`."""
Restore = Callable[[Tower, str, torch.Tensor], torch.Tensor]
"""(tower, name in transformers, tensor as it is stored) -> the tensor as transformers has it."""


@dataclass(frozen=True, slots=True)
class Projector:
    """One of llama.cpp's kinds of image parts, a table of projectors.toml."""

    names: Mapping[str, str]
    """Tensors without their endings -> their names in transformers: "#N": part N of those that are joined, "": a copy
    of what the language model has."""
    families: Mapping[str, Sequence[str]]
    """model_type of the language model's file alone -> (model_type of the whole, of the language model in it)."""
    tokens: Mapping[str, str]
    """Fields of config.json with the id of a token -> the token, which the vocabulary must have."""
    content: Mapping[str, Mapping[str, Any]]
    """Configurations that the tower adds to its language model's: "vision", "processor" and "whole"."""
    facts: Facts
    restore: Restore = lambda tower, name, tensor: tensor

    def describe(self, tower: Tower) -> dict[str, dict[str, Any]]:
        """The same of one tower, and "text": fields that the language model's own has as well. Raises as `facts`."""
        known = self.facts(tower)
        return {"text": known.get("text", {}), **_filled(self.content, tower, known)}


def _filled(given: Any, tower: Tower, known: Mapping[str, Any]) -> Any:
    """Content of a table, with "=NAME" as what is known by that name, or else the tower's, and "?NAME" as whether there
    is such a tensor."""
    if isinstance(given, Mapping):
        return {name: _filled(own, tower, known) for name, own in given.items()}
    if isinstance(given, list):
        return [_filled(own, tower, known) for own in given]
    if isinstance(given, str) and given.startswith("?"):
        return given[1:] in tower.header.tensors
    if isinstance(given, str) and given.startswith("="):
        name = given[1:]
        return known[name] if name in known else getattr(tower, name)
    return given


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
    found = _qwen(tower) | {"positions": tower.side() ** 2}
    found["text"]["rope_parameters"]["mrope_interleaved"] = True
    return found


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
    """A patch's colors are last in transformers' matrix, and first in a convolution."""
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
"""Endings of names in transformers that are whole, with no "weight" or "bias" behind them."""
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
"""`facts` and, where anything is done to tensors, `restore` of each kind."""
PROJECTORS: Mapping[str, Projector] = {
    kind: Projector(_NAMES[kind], table.pop("families"), table.pop("tokens"), {"whole": {}} | table, *_CODE[kind])
    for kind, table in _TABLES.items()
}
"""Kinds by `clip.projector_type`."""

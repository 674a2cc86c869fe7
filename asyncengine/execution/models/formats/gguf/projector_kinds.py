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
from typing import Any, NamedTuple

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.formats.gguf.header import Header, shortest
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.formats.gguf.names import read_tables

_TOKENS = (8, 4096)
"""Fewest and most tokens of a picture of Qwen's where the header has no limits in pixels: clip.cpp's own."""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Names of a tower's sizes in transformers' configurations, but of Qwen's."""
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

    def sizes(self, width: str, inner: str, layers: str, heads: str) -> dict[str, int]:
        """Sizes of the tower's layers under these names."""
        count = self.header.positive("attention.head_count")
        if self.width % count:
            raise self.wrong(f"has {self.width} numbers of hidden states for {count} heads")
        return {width: self.width, inner: self.inner, layers: self.layers, heads: count}

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


class Described(NamedTuple):
    """The configuration that an image part adds to its language model's."""

    vision: dict[str, Any]
    processor: dict[str, Any]
    """The content of preprocessor_config.json."""
    whole: dict[str, Any]
    """Fields of config.json beside those of its parts."""
    text: dict[str, Any]
    """Fields that the language model's own part has as well."""


@dataclass(frozen=True, slots=True)
class Projector:
    """One of llama.cpp's kinds of image parts."""

    names: Mapping[str, str]
    """Tensors without their endings -> their names in transformers: "#N": part N of those that are joined, "": a copy
    of what the language model has."""
    families: Mapping[str, Sequence[str]]
    """model_type of the language model's file alone -> (model_type of the whole, of the language model in it)."""
    tokens: Mapping[str, str]
    """Fields of config.json with the id of a token -> the token, which the vocabulary must have."""
    describe: Callable[[Tower], Described]
    restore: Callable[[Tower, str, torch.Tensor], torch.Tensor] = lambda tower, name, tensor: tensor
    """(tower, name in transformers, tensor as it is stored) -> the tensor as transformers has it."""


def _siglip(tower: Tower) -> dict[str, Any]:
    sizes = tower.sizes(*_SIZES)
    return {
        **sizes, "image_size": tower.side() * tower.patch, "patch_size": tower.patch,
        "layer_norm_eps": tower.header["attention.layer_norm_epsilon"], "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gemma3(tower: Tower) -> Described:
    scale = tower.header.get("projector.scale_factor", 4)
    if not scale or tower.side() % scale:
        raise tower.wrong(f"has a clip.vision.projector.scale_factor of {scale} for {tower.side()} patches a side")
    vision = _siglip(tower) | {"model_type": "siglip_vision_model", "vision_use_head": False}
    size = vision["image_size"]
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": size, "width": size}}
    return Described(vision, processor, {"mm_tokens_per_image": (tower.side() // scale) ** 2}, {})


def _idefics3(tower: Tower) -> Described:
    longest = tower.header.positive("preproc_image_size")
    vision = _siglip(tower)
    processor = {
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": True,
        "size": {"longest_edge": longest}, "max_image_size": {"longest_edge": vision["image_size"]},
    }  # fmt: skip
    return Described(vision, processor, {"scale_factor": tower.merged("mm.model.fc.weight")}, {})


def _qwen(tower: Tower, **vision: Any) -> Described:
    merge = tower.merged("mm.0.weight")
    limits = [
        tower.header.get(f"image_{end}_pixels", tokens * (merge * tower.patch) ** 2)
        for end, tokens in zip(("min", "max"), _TOKENS, strict=True)
    ]
    if not 0 < limits[0] <= limits[1] <= _MAX_PIXELS:
        raise tower.wrong(f"has pictures of {limits[0]} to {limits[1]} pixels, at most {_MAX_PIXELS}")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": tower.patch, "merge_size": merge,
        "temporal_patch_size": 2, "size": dict(zip(("shortest_edge", "longest_edge"), limits, strict=True)),
    }  # fmt: skip
    rope = tower.model.config["rope_parameters"] | {"mrope_section": tower.sections()}
    found = {"patch_size": tower.patch, "spatial_merge_size": merge, "temporal_patch_size": 2}
    sizes = tower.sizes("hidden_size", "intermediate_size", "depth", "num_heads")
    found |= {**sizes, "out_hidden_size": tower.model.config["hidden_size"], **vision}
    return Described(found, processor, {}, {"rope_parameters": rope})


def _qwen2(tower: Tower) -> Described:
    sizes = tower.sizes("embed_dim", "inner", "depth", "num_heads")
    ratio = sizes["inner"] // sizes["embed_dim"]
    return _qwen(tower, embed_dim=sizes["embed_dim"], mlp_ratio=ratio, hidden_size=tower.model.config["hidden_size"])


def _qwen25(tower: Tower) -> Described:
    period = tower.header.positive("n_wa_pattern")
    whole = list(range(period - 1, tower.layers, period))
    return _qwen(tower, fullatt_block_indexes=whole, window_size=tower.header.get("window_size", 8 * tower.patch))


def _qwen3(tower: Tower) -> Described:
    found = _qwen(tower, num_position_embeddings=tower.side() ** 2, deepstack_visual_indexes=tower.deep)
    found.text["rope_parameters"]["mrope_interleaved"] = True
    return found


def _activation(tower: Tower) -> str:
    return "silu" if tower.header.metadata.get("clip.use_silu") is True else "gelu"


def _internvl(tower: Tower) -> Described:
    scale, positions = tower.header.positive("projector.scale_factor"), tower.rows("v.position_embd.weight")
    side, tensors = math.isqrt(positions - 1), tower.header.tensors
    if side**2 + 1 != positions or side % scale:
        raise tower.wrong(f"has {positions} positions for squares of {scale} x {scale} patches")
    pixels = side * tower.patch
    sizes = tower.sizes(*_SIZES)
    vision = {
        **sizes, "model_type": "internvl_vision", "image_size": [pixels] * 2, "patch_size": [tower.patch] * 2,
        "hidden_act": _activation(tower), "layer_norm_eps": tower.header["attention.layer_norm_epsilon"],
        "attention_bias": "v.blk.0.attn_q.bias" in tensors, "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
    }  # fmt: skip
    processor = {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": pixels, "width": pixels},
        "crop_to_patches": True, "min_patches": tower.header.get("preproc_min_tiles", 1),
        "max_patches": tower.header.get("preproc_max_tiles", 12),
    }  # fmt: skip
    whole = {"downsample_ratio": 1 / scale, "image_seq_length": (side // scale) ** 2}
    return Described(vision, processor, whole, {})


def _restore_internvl(tower: Tower, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1, -1, tower.width) if name.rpartition(".")[2] in _BATCHED else tensor


def _lfm2(tower: Tower) -> Described:
    scale, tensors = tower.header.positive("projector.scale_factor"), tower.header.tensors
    sizes = tower.sizes(*_SIZES)
    vision = {
        **sizes, "model_type": "siglip2_vision_model", "num_patches": tower.rows("v.position_embd.weight"),
        "patch_size": tower.patch, "layer_norm_eps": tower.header["attention.layer_norm_epsilon"],
        "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False,
    }  # fmt: skip
    processor = {
        "image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": tower.patch, "downsample_factor": scale,
    }  # fmt: skip
    whole = {
        "downsample_factor": scale, "projector_hidden_size": tower.rows("mm.1.weight"),
        "projector_bias": "mm.1.bias" in tensors, "projector_use_layernorm": "mm.input_norm.weight" in tensors,
    }  # fmt: skip
    return Described(vision, processor, whole, {})


def _restore_lfm2(tower: Tower, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A patch's colors are last in transformers' matrix, and first in a convolution."""
    return tensor.permute(0, 2, 3, 1).reshape(len(tensor), -1) if tensor.ndim == 4 else tensor


def _pixtral(tower: Tower) -> Described:
    if "mm.patch_merger.weight" not in tower.header.tensors:
        raise UnsupportedModel(f"{tower.header.path}: Pixtral without a patch merger is not read; Mistral 3 is")
    longest = tower.header.positive("image_size")
    sizes = tower.sizes(*_SIZES)
    vision = {
        **sizes, "model_type": "pixtral", "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "image_size": longest, "patch_size": tower.patch, "hidden_act": _activation(tower),
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.header.get("rope.freq_base", 10000.0)},
    }  # fmt: skip
    sides = {"height": tower.patch, "width": tower.patch}
    processor = {
        "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": longest}, "patch_size": sides,
    }  # fmt: skip
    whole = {
        "spatial_merge_size": tower.merged("mm.patch_merger.weight"), "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in tower.header.tensors, "vision_feature_layer": -1,
    }  # fmt: skip
    return Described(vision, processor, whole, {"sliding_window": None})


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
    "qwen2vl_merger": (_qwen2,),
    "qwen2.5vl_merger": (_qwen25,),
    "qwen3vl_merger": (_qwen3,),
    "internvl": (_internvl, _restore_internvl),
    "lfm2": (_lfm2, _restore_lfm2),
    "pixtral": (_pixtral, _restore_pixtral),
}
"""`describe` and, where anything is done to tensors, `restore` of each kind."""
PROJECTORS: Mapping[str, Projector] = {
    kind: Projector(_NAMES[kind], table["families"], table["tokens"], *_CODE[kind]) for kind, table in _TABLES.items()
}
"""Kinds by `clip.projector_type`."""

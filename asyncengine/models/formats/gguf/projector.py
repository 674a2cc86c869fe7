"""The image part of a GGUF model (`mmproj`): a file beside that of the language model, in llama.cpp's names.

`ProjectedModel` joins both into one checkpoint in transformers' names, with what its image processor is told. Sizes
are those of the tensors, so that no header can claim others; the header has only what tensors do not show.

Sources: llama.cpp's conversion/{qwenvl,qwen3vl,gemma,smolvlm}.py for what a converter does, which is undone here, and
tools/mtmd/clip.cpp for what a header leaves to the reader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.layers.stored import StoredMatrix
from asyncengine.models.formats import StoredTensor
from asyncengine.models.formats.gguf.container import GgufFile, open_files
from asyncengine.models.formats.gguf.header import Header, shortest
from asyncengine.models.formats.gguf.model import GgufModel
from asyncengine.models.formats.gguf.tensors import TensorPart

_TOKENS = (8, 4096)
"""Fewest and most tokens of a picture of Qwen's where the header has no limits in pixels: clip.cpp's own."""
_MAX_PIXELS = 2**26
"""Pixels to which a picture may be enlarged; Qwen's own limit is a quarter of it."""
_LAYER = re.compile(r"v\.(blk|deepstack)\.([0-9]{1,5})\.")


class Tower(NamedTuple):
    """The image part's header, with sizes of its tensors."""

    header: Header
    model: GgufModel
    """The language model."""

    def shape(self, name: str, axes: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that has to be there. Raises `ModelNotFound`."""
        place = self.header.tensors.get(name)
        if place is None or len(place.shape) != axes:
            raise self.wrong(f"lacks the tensor {name}, or has it in another shape than one of {axes} dimensions")
        return place.shape

    def wrong(self, what: str) -> ModelNotFound:
        return ModelNotFound(f"{self.header.path} {what}")

    def sections(self) -> list[int]:
        """Pairs of a head's numbers that rotate by time, row and column. Raises `ModelNotFound`."""
        key = f"{self.model.metadata.single('general.architecture')}.rope.dimension_sections"
        found = self.model.metadata[key][:3] if 3 <= self.model.metadata.length(key) <= 4 else []
        rope = self.model.config["rope_parameters"]
        if 2 * sum(found) != int(self.model.config["head_dim"] * rope.get("partial_rotary_factor", 1.0)):
            raise ModelNotFound(f"{self.model.path}: {key} must say which pairs of a head rotate by which axis")
        return found

    @property
    def width(self) -> int:
        return self.shape("v.patch_embd.weight", 4)[0]

    @property
    def patch(self) -> int:
        return self.shape("v.patch_embd.weight", 4)[-1]

    def numbers(self, kind: str) -> set[int]:
        """Numbers of the layers that have tensors of this kind."""
        every = (found for name in self.header.tensors if (found := _LAYER.match(name)))
        return {int(found[2]) for found in every if found[1] == kind}

    @property
    def layers(self) -> int:
        numbers = self.numbers("blk")
        if numbers != set(range(len(numbers))):
            raise self.wrong("lacks some of its layers")
        return len(numbers)

    def deep(self) -> list[int]:
        """Layers whose hidden states go into the language model's first layers as well."""
        found = sorted(self.numbers("deepstack"))
        if found and found[-1] >= self.layers:
            raise self.wrong(f"has features of layer {found[-1]}, of {self.layers}")
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
        found = {width: self.width, inner: 0, layers: self.layers, heads: self.header.positive("attention.head_count")}
        if self.width % found[heads]:
            raise self.wrong(f"has {self.width} numbers of hidden states for {found[heads]} heads")
        found[inner] = self.shape("v.blk.0.ffn_up.weight")[1 if self.swapped() else 0]
        return found

    def swapped(self) -> dict[str, str]:
        """Names of layers' tensors that early converters took for each other."""
        up = self.shape("v.blk.0.ffn_up.weight")
        names = ("v.blk.{}.ffn_up", "v.blk.{}.ffn_down")
        return dict(zip(names, names[::-1], strict=True)) if up[1] != self.width == up[0] else {}

    def colors(self) -> dict[str, list[float]]:
        """Mean and deviation of each color, which are taken from pixels."""
        found = {}
        for name in ("image_mean", "image_std"):
            values = self.header.value(name)
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

    families: Mapping[str, tuple[str, str]]
    """model_type of the language model's file alone -> (model_type of the whole, of the language model in it)."""
    tokens: Mapping[str, str]
    """Fields of config.json with the id of a token -> the token, which the vocabulary must have."""
    names: Mapping[str, str]
    """Tensors without their endings -> their names in transformers: "#N": part N of those that are joined."""
    describe: Callable[[Tower], Described]


def _siglip(tower: Tower) -> dict[str, Any]:
    sizes = tower.sizes("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        **sizes, "image_size": tower.side() * tower.patch, "patch_size": tower.patch,
        "layer_norm_eps": tower.header.real("attention.layer_norm_epsilon"), "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gemma3(tower: Tower) -> Described:
    scale = tower.header.whole("projector.scale_factor", 4)
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
        tower.header.whole(f"image_{end}_pixels", tokens * (merge * tower.patch) ** 2)
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
    return _qwen(tower, fullatt_block_indexes=whole, window_size=tower.header.whole("window_size", 8 * tower.patch))


def _qwen3(tower: Tower) -> Described:
    found = _qwen(tower, num_position_embeddings=tower.side() ** 2, deepstack_visual_indexes=tower.deep())
    found.text["rope_parameters"]["mrope_interleaved"] = True
    return found


def _blocks(*names: str) -> dict[str, str]:
    """Names of Qwen's layers; `names`: of the norm behind them, the projector's layers, and the feed-forward's."""
    found = {"v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed"}
    of_layers = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
    of_layers |= {f"attn_{name}": f"attn.qkv#{place}" for place, name in enumerate("qkv")}
    of_layers |= dict(zip(("ffn_up", "ffn_down", "ffn_gate"), names[3:], strict=False))
    found |= dict(zip(("v.post_ln", "mm.0", "mm.2"), names[:3], strict=True))
    found |= {f"v.blk.{{}}.{stem}": f"blocks.{{}}.{name}" for stem, name in of_layers.items()}
    return {stem: f"model.visual.{name}" for stem, name in found.items()}


def _siglip_names(before: str) -> dict[str, str]:
    layer = f"{before}encoder.layers.{{}}."
    return {
        "v.patch_embd": f"{before}embeddings.patch_embedding",
        "v.position_embd": f"{before}embeddings.position_embedding", "v.post_ln": f"{before}post_layernorm",
        **{f"v.blk.{{}}.attn_{name}": f"{layer}self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
        **{f"v.blk.{{}}.ln{place}": f"{layer}layer_norm{place}" for place in (1, 2)},
        "v.blk.{}.ffn_up": f"{layer}mlp.fc1", "v.blk.{}.ffn_down": f"{layer}mlp.fc2",
    }  # fmt: skip


_QWEN_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector(
        {"gemma3_text": ("gemma3", "gemma3_text")},
        {
            "image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        _siglip_names("model.vision_tower.") | {
            "mm.input_projection": "model.multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
        },
        _gemma3,
    ),
    "idefics3": Projector(
        {"llama": ("idefics3", "llama")}, {"image_token_id": "<image>"},
        _siglip_names("model.vision_model.") | {"mm.model.fc": "model.connector.modality_projection.proj"}, _idefics3,
    ),
    "qwen2vl_merger": Projector(
        {"qwen2": ("qwen2_vl", "qwen2_vl_text")}, _QWEN_TOKENS,
        _blocks("merger.ln_q", "merger.mlp.0", "merger.mlp.2", "mlp.fc1", "mlp.fc2"), _qwen2,
    ),
    "qwen2.5vl_merger": Projector(
        {"qwen2": ("qwen2_5_vl", "qwen2_5_vl_text")}, _QWEN_TOKENS,
        _blocks("merger.ln_q", "merger.mlp.0", "merger.mlp.2", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
        _qwen25,
    ),
    "qwen3vl_merger": Projector(
        {
            "qwen3": ("qwen3_vl", "qwen3_vl_text"), "qwen3_5_text": ("qwen3_5", "qwen3_5_text"),
            "qwen3_5_moe_text": ("qwen3_5_moe", "qwen3_5_moe_text"),
        },
        _QWEN_TOKENS,
        _blocks("merger.norm", "merger.linear_fc1", "merger.linear_fc2", "mlp.linear_fc1", "mlp.linear_fc2")
        | {
            f"v.deepstack.{{}}.{stem}": f"model.visual.deepstack_merger_list.{{}}.{name}"
            for stem, name in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2"))
        },
        _qwen3,
    ),
}  # fmt: skip
"""Kinds by `clip.projector_type`."""


class ProjectedModel:
    """A `CheckpointSource` of two files: a language model and its image part."""

    def __init__(self, model: GgufModel, path: Path) -> None:
        """Raises `ModelNotFound` for a file that is broken, incomplete, or another model's, `UnsupportedModel` for a
        kind that is not read."""
        (self._file,) = open_files(path)
        header, kind = _header_of(path, self._file)
        pair = kind.families.get(model.config["model_type"])
        if pair is None:
            own = model.metadata.single("general.architecture")
            raise ModelNotFound(f"{path} is the image part of another model than {model.path.name}, which is {own}")
        width, own = header.whole("projection_dim"), model.config["hidden_size"]
        if width != own:
            raise ModelNotFound(f"{path} makes tokens of {width} numbers, and {model.path.name} has {own}")
        self._model, self.folder, self.metadata = model, model.folder, model.metadata
        self.files = (*model.files, path)
        tower = Tower(header, model)
        described = kind.describe(tower)
        self.image_processor: dict[str, Any] = described.processor | tower.colors()
        """The content of preprocessor_config.json."""
        kept = ("architectures", "tie_word_embeddings", "dtype", "pad_token_id")
        self.config: dict[str, Any] = {
            **{name: model.config[name] for name in kept if name in model.config}, "model_type": pair[0],
            **_token_ids(model, kind.tokens), **described.whole,
            "text_config": model.config | {"model_type": pair[1]} | described.text, "vision_config": described.vision,
        }  # fmt: skip
        self._names = {re.sub(r"^model\.", "model.language_model.", name): name for name in model.tensors}
        self._tower = _tensors(tower, kind, self._file)
        self.tensors: dict[str, StoredTensor] = {name: model.tensors[own] for name, own in self._names.items()} | {
            name: StoredTensor("F32", _shape(parts), path) for name, parts in self._tower.items()
        }

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor of the language model as `GgufModel` reads it; the tower's are never quantized."""
        if name in self._names:
            return self._model.read(self._names[name])
        parts = [part.plain() if part.place.kind.form is None else part.dense() for part in self._tower[name]]
        if len(parts) == 1:
            return parts[0]
        return torch.stack(parts, dim=2) if parts[0].ndim == 4 else torch.cat(parts)  # of two frames, or below another

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """A tensor from `read` will not be read again. Nothing happens to a copy."""
        self._model.release(tensor)

    def generation_defaults(self) -> dict[str, Any]:
        """Sampling parameters under generation_config.json's names."""
        return self._model.generation_defaults()


def _header_of(path: Path, file: GgufFile) -> tuple[Header, Projector]:
    """The header of an image part and its kind."""
    header = Header(path, file.metadata, "clip.vision", file.tensors)
    if file.metadata.single("general.architecture") not in ("clip", "mmproj"):
        raise ModelNotFound(f"{path} is no image part of a model (mmproj)")
    name = file.metadata.single("clip.projector_type") or header.value("projector_type")
    if name not in PROJECTORS:
        known = ", ".join(PROJECTORS)
        raise UnsupportedModel(f"{path}: image part {shorten(repr(name), 60)} is not read. Read are {known}")
    return header, PROJECTORS[name]


def _token_ids(model: GgufModel, tokens: Mapping[str, str]) -> dict[str, int]:
    every = model.metadata["tokenizer.ggml.tokens"] if model.metadata.length("tokenizer.ggml.tokens") else []
    places = {token: place for place, token in enumerate(every) if token in tokens.values()}
    if missing := sorted(set(tokens.values()) - places.keys()):
        raise UnsupportedModel(f"{model.path}: its vocabulary lacks {missing[0]}, which stands for pictures")
    return {field: places[token] for field, token in tokens.items()}


def _tensors(tower: Tower, kind: Projector, file: GgufFile) -> dict[str, list[TensorPart]]:
    """The tower's tensors by their names in transformers: the parts that each is joined of."""
    found: dict[str, dict[int, TensorPart]] = {}
    deep, swapped = tower.deep(), tower.swapped()
    for whole, place in file.tensors.items():
        taken = re.fullmatch(r"(.+?)\.(weight|bias)(\.1)?", whole)
        stem, suffix, frame = taken.groups() if taken else (whole, "", None)
        number = ""
        if (layer := _LAYER.match(stem)) is not None:
            number = layer[2] if layer[1] == "blk" else str(deep.index(int(layer[2])))
            stem = f"v.{layer[1]}.{{}}.{stem[layer.end() :]}"
        there, _, part = kind.names.get(swapped.get(stem, stem), "").partition("#")
        if not there:
            raise tower.wrong(f"has a tensor that such an image part does not have: {shorten(whole, 100)}")
        if place.kind.form is None and place.kind.plain is None:
            raise UnsupportedModel(f"{file.path} has the tensor {shorten(whole, 100)} as {place.kind.name}")
        name = there.format(number) if there.endswith("_weight") else f"{there.format(number)}.{suffix}"
        added = 1.0 if stem == "mm.soft_emb_norm" else 0.0
        found.setdefault(name, {})[int(part or bool(frame))] = TensorPart(file, place, added=added)
    for name, parts in found.items():
        if len({part.place.shape for part in parts.values()}) > 1 or parts.keys() != set(range(len(parts))):
            raise tower.wrong(f"has parts of {name} that do not go together")
    return {name: [parts[place] for place in sorted(parts)] for name, parts in found.items()}


def _shape(parts: Sequence[TensorPart]) -> tuple[int, ...]:
    first, *others = parts[0].place.shape
    if len(parts) > 1 and len(others) == 3:
        return (first, others[0], len(parts), *others[1:])
    return (first * len(parts), *others)

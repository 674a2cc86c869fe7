"""A GGUF model as a checkpoint: its configuration, and its tensors by the names that transformers gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import StoredMatrix
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor
from asyncengine.execution.models.formats.gguf import architectures
from asyncengine.execution.models.formats.gguf.container import Metadata, TensorInfo, broken, open_files
from asyncengine.execution.models.formats.gguf.header import Header, shortest
from asyncengine.execution.models.formats.gguf.tensors import Mapped, model_tensors
from asyncengine.execution.models.refusals import check_sizes

# A GGUF header as the config.json of the same model on the Hugging Face hub, so that each family has one table only.

Factors = Mapping[str, NDArray[np.float32]]
"""Tensors `rope_freqs`, `rope_factors_long` and `rope_factors_short`, as far as a file has them: divisors of the rotary
frequencies, which converters computed beforehand."""


def _width_of_shared_experts(header: Header) -> int:
    gates = (header.tensors.get(f"blk.0.ffn_gate{suffix}.weight") for suffix in ("_shexp", ""))
    return next((gate.shape[0] for gate in gates if gate is not None), 0)


def _experts(header: Header, key: str) -> int:
    # a dense model of a family with experts has no router, and may lack the key
    return int(header[key] if "ffn_gate_inp.weight" in header.tensors_of_layers else header.get(key, 0))


def _expansion(header: Header) -> int:
    inner, width = header["ssm.inner_size"], header.positive("embedding_length")
    if inner % width:
        key = f"{header.architecture}.ssm.inner_size"
        raise ModelNotFound(f"{header.path}: {key} must be a multiple of .embedding_length")
    return int(inner // width)


def original_length(header: Header) -> int:
    """The context length before rotary frequencies were scaled."""
    return int(header.get("rope.scaling.original_context_length", header["context_length"]))


WORKED_OUT: Mapping[str, Callable[[Header], Any]] = {
    "layer_types": lambda header: ["full_attention" if heads else "linear_attention" for heads in header.attending()],
    "moe_intermediate_size": lambda header: header.get(
        "expert_feed_forward_length", header.get("feed_forward_length", 0)
    ),
    "original_max_position_embeddings": original_length,
    # llama.cpp's switch for the Granite family
    "position_embedding_type": lambda header: "rope" if header.get("rope.scaling.finetuned", True) else None,
    "shared_intermediate_size": _width_of_shared_experts,
    "use_parallel_residual": lambda header: (
        header.get("use_parallel_residual", True) and "ffn_norm.weight" not in header.tensors_of_layers
    ),
    "num_experts_per_tok": lambda header: _experts(header, "expert_used_count"),
    **dict.fromkeys(
        ("n_routed_experts", "num_experts", "num_local_experts"), lambda header: _experts(header, "expert_count")
    ),
    **dict.fromkeys(("mamba_expand", "expand"), _expansion),
}
"""Functions for fields of config.json that follow from more than one value of the header."""


def header_of(
    path: Path, metadata: Metadata, tensors: Mapping[str, TensorInfo]
) -> tuple[Header, architectures.Architecture]:
    """The header of a text generator, and its architecture. Raises `UnsupportedModel` for a file of another type or an
    unknown architecture, `ModelNotFound` for a file that is no model."""
    name = metadata.get("general.architecture")
    for file_type in (metadata.short.get("general.type"), name):
        if isinstance(file_type, str) and file_type in architectures.OTHER_FILES:
            raise UnsupportedModel(f"{path} {architectures.OTHER_FILES[file_type]}")
    if any(key.startswith("imatrix.") for key in metadata.short):
        raise UnsupportedModel(f"{path} {architectures.OTHER_FILES['imatrix']}")
    if not isinstance(name, str) or not name:
        raise ModelNotFound(f"{path} names no general.architecture: it is no model")
    if name not in architectures.ARCHITECTURES:
        known = ", ".join(architectures.ARCHITECTURES)
        raise UnsupportedModel(f"{path}: GGUF architecture {shorten(repr(name), 60)} is not read. Read are {known}")
    if not tensors:
        raise ModelNotFound(f"{path} has no tensors: it holds a tokenizer alone")
    header, row = Header(path, name, metadata, tensors), architectures.ARCHITECTURES[name]
    scales = ("attention.temperature_scale", "rope.scaling_beta")
    if row.model_type == "ministral3" and header.keys().isdisjoint(scales):
        return header, architectures.LLAMA_ROW  # Ollama gives Mistral Small 3 this name
    return header, architectures.MIXTRAL_ROW if row is architectures.LLAMA_ROW and header.get("expert_count") else row


def hugging_face_config(header: Header, row: architectures.Architecture, factors: Factors) -> dict[str, Any]:
    """The content of config.json. Raises `ModelNotFound` for a value that is missing or of a wrong type."""
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelNotFound(f"{header.path}: the tensor token_embd.weight is missing, or is no matrix")
    more = dict(row.more(header)) if row.more else {}
    preset = more.pop("rope", architectures.Rope())
    token_names = ("bos", "eos", "eot", "eom", "padding")
    ids = {name: header.metadata.short.get(f"tokenizer.ggml.{name}_token_id") for name in token_names}
    listed = header.metadata.short.get("tokenizer.ggml.eos_token_ids")
    candidates = [ids["eos"], ids["eot"], ids["eom"], *(listed if isinstance(listed, list) else ())]
    ends = list(dict.fromkeys([token for token in candidates if type(token) is int]))
    config: dict[str, Any] = {
        "model_type": row.model_type,
        "architectures": ["ForCausalLM"],  # `refusals.check_architectures` looks at the ending alone
        "vocab_size": table.shape[0],
        "hidden_size": header["embedding_length"],
        "intermediate_size": header.get("feed_forward_length", 0),
        "num_hidden_layers": header["block_count"] and header.layers,
        "max_position_embeddings": header["context_length"],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": ids["bos"] if type(ids["bos"]) is int else None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"] if type(ids["padding"]) is int else None,
    }
    if row.attention != "none":
        config["num_attention_heads"] = heads = header["attention.head_count"]
        config["num_key_value_heads"] = header.get("attention.head_count_kv", heads)
    if row.attention in ("rotated", "unrotated"):
        config["head_dim"] = head_dim = header.get("attention.key_length", config["hidden_size"] // max(heads, 1))
        if header.get("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{header.path}: keys and values of different lengths are not read")
    if row.attention == "rotated":
        rope = config["rope_parameters"] = _rope_parameters(header, preset, factors, head_dim, partial=row.partial)
        config |= {"partial_rotary_factor": rope["partial_rotary_factor"]} if row.partial else {}
    if row.norm:
        rms, plain = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
        config[row.norm] = header[plain if rms not in header and plain in header else rms]
    if any(info.type.form is not None for info in header.tensors.values()):
        config["dtype"] = "bfloat16"  # of tensors that are not quantized, and of activations
    config |= zip(row.state.split(), header.state_sizes(), strict=True) if row.state else ()
    for key in row.keys.split():
        name, fixed, value = key.partition("=")
        if fixed:
            config[name] = value == "True"
        elif name in architectures.PRESENT:
            config[name] = not header.tensors_of_layers.isdisjoint(architectures.PRESENT[name])
        elif name in WORKED_OUT:
            config[name] = WORKED_OUT[name](header)
        else:
            header_key, *default = architectures.VALUES[name]
            if default == ["none"]:
                config[name] = header.get(header_key, None) or None
            else:
                config[name] = header.get(header_key, *default) if default else header[header_key]
    return config | more


def _rope_parameters(
    header: Header, preset: architectures.Rope, factors: Factors, head_dim: int, *, partial: bool
) -> dict[str, Any]:
    """The `rope_parameters` of transformers, by layer type if layers with a window have others.

    Raises `UnsupportedModel` for an unknown scaling, or partly rotated heads in a family that cannot have them.
    """
    before = f"{header.path}: {header.architecture}"
    theta = header.get("rope.freq_base", preset.base)
    if theta <= 0:
        raise ModelNotFound(f"{before}.rope.freq_base must be positive, got {theta}")
    rotated = header.get("rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ModelNotFound(f"{before}.rope.dimension_count is {rotated}, heads have {head_dim}")
    if rotated != head_dim and not partial:
        raise UnsupportedModel(f"{before} whose heads are rotated in part is not read")
    for name, values in factors.items():
        if values.shape != (rotated // 2,) or not np.isfinite(values).all() or not (values > 0).all():
            raise ModelNotFound(f"{header.path}: the tensor {name} must hold {rotated // 2} positive numbers")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rope |= {"partial_rotary_factor": rotated / head_dim} if partial else {}
    scaling = header.metadata.short.get(f"{header.architecture}.rope.scaling.type", preset.scaling or None)
    factor = header.get("rope.scaling.factor", header.get("rope.scale_linear", preset.factor))
    # `rope_freqs` (Llama 3's scaling, among others) hold for every length: both sets of factors are then the same
    long, short = (factors.get("rope_freqs", factors.get(f"rope_factors_{name}")) for name in ("long", "short"))
    if long is not None and short is not None:
        rope |= {
            "rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist(),
            "original_max_position_embeddings": original_length(header),
        }  # fmt: skip
        rope |= {"factor": 1.0, "attention_factor": 1.0} if "rope_freqs" in factors else {}
    elif scaling == "yarn":
        rope |= {
            "rope_type": "yarn", "factor": factor or 1.0, "original_max_position_embeddings": original_length(header),
        }  # fmt: skip
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            rope[name] = header.get(f"rope.scaling.yarn_{name}", header.get(f"rope.scaling.{name}", default))
        if "rope.scaling.yarn_attn_factor" in header:
            rope["attention_factor"] = header["rope.scaling.yarn_attn_factor"]
        rope |= preset.yarn
    elif scaling not in (None, "none", "linear"):
        raise UnsupportedModel(f"{before}.rope.scaling.type {str(scaling)[:40]!r} is not read")
    elif scaling != "none" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    if preset.local is None:
        return rope
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": preset.local}}


_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class GgufModel(CheckpointSource):
    """A model in a GGUF file, or in several (gguf-split)."""

    def __init__(self, path: Path, defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Open a file, or any one of a model's several, and read its header. `defaults`: sampling parameters that
        override the file's own.

        Raises `ModelNotFound` for a missing or broken file, `UnsupportedModel` for one that is no text generator, or
        has an architecture or tensor type that is not read.
        """
        self.path = self.folder = path
        self._opened = files = open_files(path)
        self.files = tuple([file.path for file in files])
        self.metadata: Metadata = files[0].metadata
        tensors: dict[str, Mapped] = {name: (file, info) for file in files for name, info in file.tensors.items()}
        if len(tensors) != sum([len(file.tensors) for file in files]):
            raise broken(path, "two of its parts have a tensor of the same name")
        header, row = header_of(path, self.metadata, {name: info for name, (_, info) in tensors.items()})
        factors = {}
        for factor in _FACTORS:
            if f"{factor}.weight" in tensors:
                file, info = tensors[f"{factor}.weight"]
                if info.type.plain != "F32" or len(info.shape) != 1:
                    raise broken(file.path, "its rotary factors are no vector of float32")
                factors[factor] = file.array(info).view("<f4")
        self.config = hugging_face_config(header, row, factors)
        try:
            check_sizes(self.config, len(tensors))
        except ModelNotFound as error:
            raise ModelNotFound(f"{path}: {str(error).removeprefix('config.json: ')}") from None
        self._defaults: dict[str, Any] = {}
        for key, name in _SAMPLING.items():
            value = self.metadata.short.get(f"general.sampling.{key}")
            if type(value) in (int, float):
                self._defaults[name] = shortest(value) if isinstance(value, float) else value
        self._defaults.update(defaults)
        self._stored = model_tensors(header, row, tensors)
        self.tensors = {name: tensor.stored for name, tensor in self._stored.items()}
        self._values: dict[str, torch.Tensor] = {}
        for key, (name_in_layer, shape) in row.values.items():
            for layer, value in enumerate(_each_layer(header, key)):
                name = row.prefix.format(layer) + name_in_layer
                self._values[name] = torch.full(shape, value)
                self.tensors[name] = StoredTensor("F32", shape, path)

    def generation_defaults(self) -> dict[str, Any]:
        return dict(self._defaults)

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """The tensor of this name in transformers: memory-mapped if nothing has to be undone, or in its stored form."""
        return self._values[name].clone() if name in self._values else self._stored[name].read()

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        if not isinstance(tensor, torch.Tensor):
            tensor.release(0, tensor.shape[0])
            return
        # a tensor that was computed lies in no file, and its pages are its own
        for file in self._opened:
            first = tensor.data_ptr() - file.bytes.ctypes.data
            if 0 <= first < len(file.bytes) and tensor.is_contiguous():
                file.release(first, first + tensor.nbytes)


def _each_layer(header: Header, key: str) -> list[float]:
    """A finite number for each layer. `key`: the full key of an array, or of one number for all layers. Raises
    `ModelNotFound`."""
    layers = header["block_count"]
    stored = header.metadata.short.get(key)
    values: list[Any] = stored if isinstance(stored, list) else [stored] * layers
    if len(values) != layers or not all(isinstance(each, float) and math.isfinite(each) for each in values):
        raise ModelNotFound(f"{header.path}: {key} must have a finite number for each of {layers} layers")
    return values

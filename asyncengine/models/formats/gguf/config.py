"""A GGUF header as the config.json that its model has on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.models.formats.gguf.architecture import Architecture
from asyncengine.models.formats.gguf.architectures import ARCHITECTURES, MIXTRAL, OTHER_KINDS
from asyncengine.models.formats.gguf.container import Metadata, TensorPlace
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.rope import Factors, rope_parameters


def header_of(path: Path, metadata: Metadata, tensors: Mapping[str, TensorPlace]) -> Header:
    """The header of a text generator. Raises `UnsupportedModel` for files of other kinds and unknown architectures."""
    kind, name = metadata.single("general.type"), metadata.single("general.architecture")
    for found in (kind, name):
        if isinstance(found, str) and found in OTHER_KINDS:
            raise UnsupportedModel(f"{path} {OTHER_KINDS[found]}")
    if any(key.startswith("imatrix.") for key in metadata):
        raise UnsupportedModel(f"{path} {OTHER_KINDS['imatrix']}")
    if not isinstance(name, str) or not name:
        raise ModelNotFound(f"{path} names no general.architecture: it is no model")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{path}: GGUF architecture {shorten(repr(name), 60)} is not read. Read are {known}")
    if not tensors:
        raise ModelNotFound(f"{path} has no tensors: it holds a tokenizer alone")
    return Header(path, metadata, name, tensors)


def architecture_of(header: Header) -> Architecture:
    """What a header's architecture is in transformers, which knows some of llama.cpp's by several names."""
    known = ARCHITECTURES[header.architecture]
    if known.model_type == "ministral3" and not any(
        header.value(key) is not None for key in ("attention.temperature_scale", "rope.scaling_beta")
    ):
        return ARCHITECTURES["llama"]  # what Ollama calls Mistral Small 3
    return MIXTRAL if known.model_type == "llama" and header.whole("expert_count", 0) else known


def hugging_face_config(header: Header, factors: Factors) -> dict[str, Any]:
    """What config.json would say. Raises `ModelNotFound` for a value that is missing or of a wrong type."""
    known = architecture_of(header)
    attention = {} if known.attention == "none" else _attention(header, known)
    width, more = _not_zero(header, "embedding_length"), dict(known.more(header))
    if known.attention == "rotated":
        attention["rope_parameters"] = _rope(header, known, factors, attention["head_dim"], more)
    config = {
        "model_type": known.model_type,
        "architectures": [known.causal],
        "vocab_size": _vocabulary(header),
        "hidden_size": width,
        "intermediate_size": header.whole("feed_forward_length", 0, zeros=known.hybrid),
        "num_hidden_layers": header.layers,
        **attention,
        "max_position_embeddings": header.whole("context_length"),
        "tie_word_embeddings": not header.has("output.weight"),
        **_tokens(header),
        **more,
    }
    if known.norm:
        kind = "layer_norm_epsilon" if known.layer_norm else "layer_norm_rms_epsilon"
        config[known.norm] = header.real(f"attention.{kind}", known.epsilon)
    if any(place.kind.form is not None for place in header.tensors.values()):
        config["dtype"] = "bfloat16"  # of what is not quantized, and of the numbers between layers
    return config


def _not_zero(header: Header, key: str, *, zeros: bool = False) -> int:
    found = header.whole(key, zeros=zeros)
    if not found:
        raise ModelNotFound(f"{header.path}: {header.architecture}.{key} must not be 0")
    return found


def _attention(header: Header, known: Architecture) -> dict[str, Any]:
    heads = _not_zero(header, "attention.head_count", zeros=known.hybrid)
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": header.whole("attention.head_count_kv", heads, zeros=known.hybrid),
    }
    if known.attention == "latent":
        return found
    head_dim = header.whole("attention.key_length", _not_zero(header, "embedding_length") // heads)
    if header.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{header.path}: keys and values of different lengths are not read")
    return {**found, "head_dim": head_dim}


def _rope(header: Header, known: Architecture, factors: Factors, head_dim: int, more: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`. What `more` says of them is taken out of it."""
    local, yarn = more.pop("rope_local", None), more.pop("yarn_more", {})
    rope = rope_parameters(header, factors, head_dim, **more.pop("rope_defaults", {}))
    if "partial_rotary_factor" in rope and not known.partial:
        raise UnsupportedModel(f"{header.path}: {header.architecture} whose heads are rotated in part is not read")
    if known.partial:
        more["partial_rotary_factor"] = rope.setdefault("partial_rotary_factor", 1.0)
    if rope["rope_type"] == "yarn":
        rope |= yarn
    return rope if local is None else {"full_attention": rope, "sliding_attention": local}


def _vocabulary(header: Header) -> int:
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelNotFound(f"{header.path}: the tensor token_embd.weight is missing, or is no matrix")
    return table.shape[0]


def _tokens(header: Header) -> dict[str, Any]:
    """Special tokens; generation ends at the end of a turn as well, where the file names one."""
    ends = [token for name in ("eos", "eot", "eom") if (token := header.token(name)) is not None]
    unique = list(dict.fromkeys([*ends, *header.tokens("tokenizer.ggml.eos_token_ids")]))
    return {
        "bos_token_id": header.token("bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": header.token("padding"),
    }

"""A GGUF header as the config.json that its model has on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.models.formats.gguf.architectures import (
    ARCHITECTURES,
    LLAMA_ROW,
    MIXTRAL_ROW,
    OTHER_KINDS,
    Architecture,
)
from asyncengine.models.formats.gguf.container import Metadata, TensorPlace
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.rope import Factors, original_length, rope_parameters

Reader = Callable[[Header], Any]


def _whole(key: str, default: int | None = None) -> Reader:
    return lambda header: header.whole(key, default)


def _real(key: str, default: float | None = None) -> Reader:
    return lambda header: header.real(key, default)


def _has(*tensors: str) -> Reader:
    return lambda header: header.has(*tensors)


def _experts(key: str) -> Reader:
    # dense models of a family with experts have no such key
    return lambda header: header.whole(key, None if header.has("ffn_gate_inp.weight") else 0)


def _width_of_shared_experts(header: Header) -> int:
    gates = (header.tensors.get(f"blk.0.ffn_gate{suffix}.weight") for suffix in ("_shexp", ""))
    return next((gate.shape[0] for gate in gates if gate is not None), 0)


def _expansion(header: Header) -> int:
    inner, width = header.whole("ssm.inner_size"), header.positive("embedding_length")
    if inner % width:
        key = f"{header.architecture}.ssm.inner_size"
        raise ModelNotFound(f"{header.path}: {key} must be a multiple of .embedding_length")
    return inner // width


_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_ATTENTION_BIAS = _has("attn_q.bias", "attn_qkv.bias")
READERS: Mapping[str, Reader] = {
    "attention_bias": _ATTENTION_BIAS,
    "attention_multiplier": _real("attention.scale"),
    "attention_out_bias": _has("attn_output.bias"),
    "clip_qkv": lambda header: header.real("attention.clamp_kqv", 0.0) or None,
    "conv_L_cache": _whole("shortconv.l_cache"),
    "conv_bias": _has("shortconv.conv.bias"),
    "embedding_multiplier": _real("embedding_scale"),
    "kv_lora_rank": _whole("attention.kv_lora_rank"),
    "layer_types": lambda header: ["full_attention" if each else "linear_attention" for each in header.attending()],
    "logit_scale": _real("logit_scale"),
    "logits_scaling": _real("logit_scale"),
    "mamba_d_ssm": _whole("ssm.inner_size"),
    "mamba_proj_bias": _has("ssm_in.bias"),
    "mamba_rms_norm": _has("ssm_norm.weight"),
    "mlp_bias": _has("ffn_up.bias"),
    "moe_intermediate_size": lambda header: header.whole(
        "expert_feed_forward_length", header.whole("feed_forward_length", 0)
    ),
    "moe_latent_size": lambda header: header.whole("moe_latent_size", 0) or None,
    "moe_shared_expert_intermediate_size": _whole("expert_shared_feed_forward_length"),
    "n_group": _whole("expert_group_count", 1),
    "n_shared_experts": _whole("expert_shared_count", 0),
    "norm_topk_prob": lambda header: header.flag("expert_weights_norm", True),
    "num_dense_layers": _whole("leading_dense_block_count", 0),
    "num_experts_per_tok": _experts("expert_used_count"),
    "original_max_position_embeddings": original_length,
    # llama.cpp's switch for the Granite family
    "position_embedding_type": lambda header: "rope" if header.flag("rope.scaling.finetuned", True) else None,
    "projectors_bias": _has("ssm_out.bias"),
    "residual_multiplier": _real("residual_scale"),
    "routed_scaling_factor": _real("expert_weights_scale", 1.0),
    "shared_expert_intermediate_size": _whole("expert_shared_feed_forward_length", 0),
    "shared_intermediate_size": _width_of_shared_experts,
    "sliding_window": lambda header: header.whole("attention.sliding_window", 0) or None,
    "topk_group": _whole("expert_group_used_count", 1),
    "use_bias": _has("attn_q.bias", "attn_qkv.bias", "ssm_in.bias"),
    "use_expert_bias": _has("exp_probs_b.bias"),
    "use_parallel_residual": lambda header: (
        header.flag("use_parallel_residual", True) and not header.has("ffn_norm.weight")
    ),
    "use_qkv_bias": _ATTENTION_BIAS,
    **dict.fromkeys(("conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv"), _whole("ssm.conv_kernel")),
    **dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), _has("ssm_conv1d.bias")),
    **dict.fromkeys(("mamba_expand", "expand"), _expansion),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), _experts("expert_count")),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm"), _has("attn_q_norm.weight")),
}
"""Keys of config.json that rows of `ARCHITECTURES` name, and how each is read of a header and its tensors."""


def _read(header: Header, row: Architecture) -> dict[str, Any]:
    found = dict(zip(row.state.split(), header.state_sizes(), strict=True)) if row.state else {}
    for key in row.keys.split():
        name, fixed, value = key.partition("=")
        found[name] = value == "True" if fixed else READERS[name](header)
    return found


def header_of(path: Path, metadata: Metadata, tensors: Mapping[str, TensorPlace]) -> tuple[Header, Architecture]:
    """The header of a text generator and its row. Raises `UnsupportedModel` for files of other kinds and unknown
    architectures, `ModelNotFound` for what is no model."""
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
    header, row = Header(path, metadata, name, tensors), ARCHITECTURES[name]
    scales = (header.value(key) for key in ("attention.temperature_scale", "rope.scaling_beta"))
    if row.model_type == "ministral3" and not any(scale is not None for scale in scales):
        return header, LLAMA_ROW  # Ollama gives Mistral Small 3 this name
    return header, MIXTRAL_ROW if row is LLAMA_ROW and header.whole("expert_count", 0) else row


def hugging_face_config(header: Header, row: Architecture, factors: Factors) -> dict[str, Any]:
    """The content of config.json. Raises `ModelNotFound` for a value that is missing or of a wrong type."""
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelNotFound(f"{header.path}: the tensor token_embd.weight is missing, or is no matrix")
    ends = header.ends()
    config: dict[str, Any] = {
        "model_type": row.model_type,
        "architectures": ["ForCausalLM"],  # the ending is what tells text generators
        "vocab_size": table.shape[0],
        "hidden_size": header.positive("embedding_length"),
        "intermediate_size": header.whole("feed_forward_length", 0),
        "num_hidden_layers": header.layers,
        "max_position_embeddings": header.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": header.token("padding"),
    }
    if row.attention != "none":
        config["num_attention_heads"] = heads = header.positive("attention.head_count")
        config["num_key_value_heads"] = header.whole("attention.head_count_kv", heads)
    if row.attention in ("rotated", "unrotated"):
        config["head_dim"] = head_dim = header.whole("attention.key_length", config["hidden_size"] // heads)
        if header.whole("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{header.path}: keys and values of different lengths are not read")
    if row.attention == "rotated":
        rope = config["rope_parameters"] = rope_parameters(header, row, factors, head_dim)
        if row.partial:
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if row.norm:
        key = next((key for key in _EPSILONS if header.value(key) is not None), _EPSILONS[0])
        config[row.norm] = header.real(key)
    if any(place.kind.form is not None for place in header.tensors.values()):
        config["dtype"] = "bfloat16"  # for what is not quantized, and the numbers between layers
    return {**config, **_read(header, row), **row.more(header)}

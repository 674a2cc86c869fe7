"""llama.cpp's architectures that are read, a row for each.

Sources: llama.cpp's convert_hf_to_gguf.py for what a converter does, llama-model.cpp for what a header leaves to the
reader. Comments name what Ollama's own converter does otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.models.formats.gguf.architecture import (
    FEED_FORWARD,
    GRANITE_KEYS,
    HEAD_NORMS,
    LLAMA,
    QWEN_MOE,
    Architecture,
    Rope,
    each,
    halves,
)
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.states import STATES
from asyncengine.models.sizes import MAX_LAYERS

Fields = Mapping[str, Any]


def windows(header: Header, period: int, default: int | None = None) -> dict[str, Any]:
    """The window, and which layers have it: those of `attention.sliding_window_pattern`, else all but the last of
    each `period`. A window of 0 is none. `default` is the window that a header may leave out."""
    window = header.whole("attention.sliding_window", default)
    layers = min(header.whole("block_count"), MAX_LAYERS)
    pattern = header.value("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [bool(each) for each in pattern]
    else:
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            period = pattern
        windowed = [(index + 1) % period != 0 for index in range(layers)]
    kinds = ["sliding_attention" if each and window else "full_attention" for each in windowed]
    return {"sliding_window": window or None, "layer_types": kinds}


def _scale_of_scores(header: Header, *, by_width: bool) -> int:
    """The number whose root scores are divided by: the length of a head, in the largest models width over heads."""
    width = header.whole("embedding_length") // (header.whole("attention.head_count") or 1)
    return width if by_width else header.whole("attention.key_length", width)


def _gemma2(header: Header) -> Fields:
    return {
        "query_pre_attn_scalar": _scale_of_scores(header, by_width=header.whole("block_count") == 46),
        "attn_logit_softcapping": header.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.real("final_logit_softcapping", 30.0),
        **windows(header, 2, 4096),
    }


def _gemma3(header: Header) -> Fields:
    # Ollama's files leave out the norms' epsilon, and have a cap for 1B (26 layers), which has none
    cap = 0.0 if header.whole("block_count") == 26 else header.real("final_logit_softcapping", 0.0)
    return {
        "query_pre_attn_scalar": _scale_of_scores(header, by_width=header.whole("block_count") == 62),
        "final_logit_softcapping": cap or None,
        "rms_norm_eps": header.real("attention.layer_norm_rms_epsilon", 1e-6),
        **windows(header, 6, 0),
    }


def _gemma3_rope(header: Header) -> Rope:
    # Ollama's files leave out the base, and the scaling of 4B to 27B
    local = header.real("rope.freq_base_swa", header.real("rope.local.freq_base", 10000.0))
    factor = 8.0 if header.whole("block_count") in (34, 48, 62) else 0.0
    return Rope(header.real("rope.global.freq_base", 1e6), factor, local=local)


def _granite(header: Header) -> Fields:
    if not header.flag("rope.scaling.finetuned", True):  # llama.cpp's switch for this family
        raise UnsupportedModel(f"{header.path}: granite without rotary embeddings is not read")
    return {}


def _olmo2(header: Header) -> Fields:
    if not header.whole("attention.sliding_window", 0):
        return {}
    return {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], **windows(header, 4)}


def _olmo2_rope(header: Header) -> Rope:
    windowed = header.whole("attention.sliding_window", 0)
    return Rope(local=header.real("rope.freq_base", 10000.0) if windowed else None)


def _mistral3_rope(header: Header) -> Rope:
    # the second of two names is Ollama's
    logarithm = header.real("rope.scaling.mscale_all_dim", 0.0)
    yarn = {
        "llama_4_scaling_beta": header.real("attention.temperature_scale", header.real("rope.scaling_beta", 0.0)),
        "mscale": 1.0,
        "mscale_all_dim": header.real("rope.scaling.yarn_log_multiplier", logarithm),
    }
    return Rope(yarn=yarn)


def _gpt_oss(header: Header) -> Fields:
    width = header.whole("expert_feed_forward_length", header.whole("feed_forward_length", 0))
    return {"intermediate_size": width, **windows(header, 2)}


def _gpt_oss_rope(header: Header) -> Rope:
    return Rope(kind="yarn" if header.value("rope.scaling.factor") else "", yarn={"truncate": False})


_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = {**HEAD_NORMS, **_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_NORMS_AFTER = {
    **{name: there for name, there in HEAD_NORMS.items() if name not in ("attn_norm", "ffn_norm")}, **_AFTER,
}  # fmt: skip
_SEED = {**LLAMA, "post_attention_norm": "post_attention_layernorm"}
_GLM = {
    **LLAMA, "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
_HUNYUAN = {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_APERTUS = {**HEAD_NORMS, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_XIELU = {
    f"xielu.{name}": (f"mlp.act_fn.{name}", shape)
    for name, shape in {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}.items()
}
_STABLELM = {**LLAMA, **each("attn_{}_norm", "self_attn.{}_layernorm.norms.[]", "q k")}
_STARCODER = {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_MIXTRAL = {
    **LLAMA, "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.[].w1",
    "ffn_down_exps": "block_sparse_moe.experts.[].w2", "ffn_up_exps": "block_sparse_moe.experts.[].w3",
}  # fmt: skip
_GPT_OSS = {
    **{name: there for name, there in LLAMA.items() if name not in ("ffn_norm", *FEED_FORWARD)},
    "ffn_gate_exps": "mlp.experts.gate_up_proj#0", "ffn_up_exps": "mlp.experts.gate_up_proj#1",
    "ffn_down_exps": "mlp.experts.down_proj#", "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
}  # fmt: skip
_OLLAMA_GPT_OSS = {
    **_GPT_OSS, "attn_out": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj#",  # in its first files; gate and up are apart since
}  # fmt: skip

_BIASES = "attention_bias mlp_bias"
_EXPERTS = "num_experts num_experts_per_tok moe_intermediate_size"
_QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM")
_QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", HEAD_NORMS, "attention_bias")

_GPT_OSS_ROW = Architecture(
    "gpt_oss", "GptOssForCausalLM", _GPT_OSS, "num_local_experts num_experts_per_tok attention_bias", _gpt_oss,
    rope=_gpt_oss_rope, join="turns",
)  # fmt: skip
LLAMA_ROW = Architecture("llama", "LlamaForCausalLM", keys=_BIASES, moved=halves)
MIXTRAL_ROW = Architecture(
    "mixtral", "MixtralForCausalLM", _MIXTRAL, "num_local_experts num_experts_per_tok", moved=halves
)
"""llama.cpp's name for Mixtral is llama, too: a header with experts is."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA_ROW,
    "mistral3": Architecture(
        "ministral3", "Ministral3ForCausalLM", more=lambda header: {"sliding_window": None}, rope=_mistral3_rope,
        moved=halves,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", keys=_BIASES, moved=halves),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    # of models with images, all three parts of a text's position are alike, and rotate as one
    "qwen2vl": _QWEN2,
    "qwen25vl": _QWEN2,
    "qwen3vl": _QWEN3,
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", QWEN_MOE,
        f"{_EXPERTS} shared_expert_intermediate_size norm_topk_prob=False",
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", QWEN_MOE, f"{_EXPERTS} attention_bias norm_topk_prob=True"
    ),
    "gpt-oss": _GPT_OSS_ROW,
    "gptoss": replace(_GPT_OSS_ROW, layer=_OLLAMA_GPT_OSS),
    "gemma": Architecture("gemma", "GemmaForCausalLM", keys="attention_bias", norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _SANDWICH, more=_gemma2, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _SANDWICH, more=_gemma3, norm="", norm_offset=1.0, rope=_gemma3_rope
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM", {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        "sliding_window original_max_position_embeddings", partial=True,
    ),
    "apertus": Architecture("apertus", "ApertusForCausalLM", _APERTUS, "attention_bias", values=_XIELU),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _GLM, "attention_bias", partial=True),
    "granite": Architecture(
        "granite", "GraniteForCausalLM", keys=f"{_BIASES} {GRANITE_KEYS}", more=_granite, moved=halves
    ),
    "olmo": Architecture("olmo", "OlmoForCausalLM", keys="clip_qkv attention_bias=False", norm="", moved=halves),
    "olmo2": Architecture(
        "olmo2", "Olmo2ForCausalLM", _NORMS_AFTER, "attention_bias", _olmo2, rope=_olmo2_rope
    ),
    "exaone4": Architecture(
        "exaone4", "Exaone4ForCausalLM", _NORMS_AFTER,
        more=lambda header: windows(header, 4, 4096 if header.whole("block_count") == 64 else 0),
    ),
    "command-r": Architecture(
        "cohere", "CohereForCausalLM", HEAD_NORMS, "logit_scale use_qk_norm attention_bias", norm="layer_norm_eps"
    ),
    "cohere2": Architecture(
        "cohere2", "Cohere2ForCausalLM", LLAMA, "logit_scale attention_bias", lambda header: windows(header, 4),
        "layer_norm_eps",
    ),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _STARCODER, "use_bias sliding_window", norm="norm_epsilon"
    ),
    "stablelm": Architecture(
        "stablelm", "StableLmForCausalLM", _STABLELM, "use_qkv_bias use_parallel_residual qk_layernorm",
        norm="layer_norm_eps", partial=True,
    ),
    "nemotron": Architecture(
        "nemotron", "NemotronForCausalLM", keys=_BIASES, norm="norm_eps", partial=True, norm_offset=1.0
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _HUNYUAN, "attention_bias"),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _SEED, f"{_BIASES} attention_out_bias"),
    **STATES,
}  # fmt: skip
"""Rows by `general.architecture`."""

OTHER_KINDS: Mapping[str, str] = {
    "clip": "is the image part of a model (mmproj); pass the file of its language model",
    "mmproj": "is the image part of a model (mmproj); pass the file of its language model",
    "adapter": "is a LoRA adapter in GGUF; adapters are read in PEFT's format (adapters={'NAME': PATH})",
    "imatrix": "is an importance matrix, made while quantizing, and no model",
    "controlvector": "is a control vector and no model",
    "bert": "is an embedding model: it gives vectors and writes no text",
    "nomic-bert": "is an embedding model: it gives vectors and writes no text",
    "whisper": "is a speech recognizer: it reads sound",
}
"""Files that are no text generator, by `general.type` or `general.architecture`."""

"""llama.cpp's architectures that are read: the family each is in transformers, what its tensors are called there, and
what its converter did to them.

Source: llama.cpp's convert_hf_to_gguf.py (what was done), llama-model.cpp (what a header leaves to the reader).
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncengine.errors import UnsupportedModel
from asyncengine.models.formats.gguf import names
from asyncengine.models.formats.gguf.architecture import Architecture, Fields
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.hybrids import HYBRIDS
from asyncengine.models.formats.gguf.kimi import KIMI
from asyncengine.models.formats.gguf.mamba import MAMBA


def _bias(header: Header) -> bool:
    return any(header.has(f"blk.0.{name}.bias") for name in ("attn_q", "attn_qkv"))


def _llama(header: Header) -> Fields:
    return {"attention_bias": _bias(header), "mlp_bias": header.has("blk.0.ffn_up.bias")}


def _attention_bias(header: Header) -> Fields:
    return {"attention_bias": _bias(header)}


def layer_types(header: Header, period: int, full: int) -> list[str]:
    """One for each layer: those that `attention.sliding_window_pattern` says, else layer `full` of each `period` has no
    window."""
    layers = header.whole("block_count")
    pattern = header.value("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [bool(each) for each in pattern]
    else:
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            period, full = pattern, pattern - 1
        windowed = [index % period != full for index in range(min(layers, 4096))]
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _gemma2(header: Header) -> Fields:
    large = header.whole("block_count") == 46  # 27B scales scores by the width over the heads
    return {
        **_scores(header, large),
        "attn_logit_softcapping": header.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.real("final_logit_softcapping", 30.0),
        "sliding_window": header.whole("attention.sliding_window", 4096),
        "layer_types": layer_types(header, 2, 1),
    }


def _gemma3(header: Header) -> Fields:
    """Files of Ollama's own making leave out the base, and the scaling of 4B to 27B; 1B has a cap too many there."""
    window = header.whole("attention.sliding_window", 0)
    layers = header.whole("block_count")
    cap = 0.0 if layers == 26 else header.real("final_logit_softcapping", 0.0)
    base = header.real("rope.freq_base_swa", header.real("rope.local.freq_base", 10000.0))
    return {
        **_scores(header, layers == 62),
        "final_logit_softcapping": cap or None,
        "sliding_window": window or None,
        "layer_types": layer_types(header, 6, 5) if window else ["full_attention"] * min(layers, 4096),
        "rope_local": {"rope_type": "default", "rope_theta": base},
        "rope_defaults": {
            "base": header.real("rope.global.freq_base", 1e6), "scaling": 8.0 if layers in (34, 48, 62) else 0.0,
        },
    }  # fmt: skip


def _scores(header: Header, large: bool) -> Fields:
    heads = header.whole("attention.head_count") or 1
    width = header.whole("embedding_length") // heads
    return {"query_pre_attn_scalar": width if large else header.whole("attention.key_length", width)}


def _phi3(header: Header) -> Fields:
    length = header.whole("context_length")
    return {
        "sliding_window": header.whole("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": header.whole("rope.scaling.original_context_length", length),
    }


def _granite(header: Header) -> Fields:
    if not header.flag("rope.scaling.finetuned", True):  # llama.cpp's switch for this family
        raise UnsupportedModel(f"{header.path}: granite without rotary embeddings is not read")
    return {
        **_llama(header),
        "attention_multiplier": header.real("attention.scale"),
        "embedding_multiplier": header.real("embedding_scale"),
        "residual_multiplier": header.real("residual_scale"),
        "logits_scaling": header.real("logit_scale"),
    }


def _olmo(header: Header) -> Fields:
    clip = header.real("attention.clamp_kqv", 0.0)
    return {"clip_qkv": clip or None, "attention_bias": False}


def _olmo2(header: Header) -> Fields:
    window = header.whole("attention.sliding_window", 0)
    if not window:
        return _attention_bias(header)
    local = {"rope_type": "default", "rope_theta": header.real("rope.freq_base", 10000.0)}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": layer_types(header, 4, 3),
        "rope_local": local,
        **_attention_bias(header),
    }


def _exaone4(header: Header) -> Fields:
    large = header.whole("block_count") == 64
    window = header.whole("attention.sliding_window", 4096 if large else 0)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * min(header.whole("block_count"), 4096)}
    return {"sliding_window": window, "layer_types": layer_types(header, 4, 3)}


def _cohere(header: Header) -> Fields:
    return {
        "logit_scale": header.real("logit_scale"),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
        **_attention_bias(header),
    }


def _cohere2(header: Header) -> Fields:
    return {
        "logit_scale": header.real("logit_scale"),
        "sliding_window": header.whole("attention.sliding_window"),
        "layer_types": layer_types(header, 4, 3),
        **_attention_bias(header),
    }


def _starcoder2(header: Header) -> Fields:
    return {"use_bias": _bias(header), "sliding_window": header.whole("attention.sliding_window", 0) or None}


def _stablelm(header: Header) -> Fields:
    return {
        "use_qkv_bias": _bias(header),
        "use_parallel_residual": header.flag("use_parallel_residual", True) and not header.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": header.has("blk.0.attn_q_norm.weight"),
    }


def _seed(header: Header) -> Fields:
    return {**_llama(header), "attention_out_bias": header.has("blk.0.attn_output.bias")}


def _mistral3(header: Header) -> Fields:
    """Ollama's converter had names of its own for what came with this family."""
    logarithm = header.real("rope.scaling.mscale_all_dim", 0.0)
    return {"sliding_window": None, "yarn_more": {
        "llama_4_scaling_beta": temperature_scale(header),
        "mscale": 1.0,
        "mscale_all_dim": header.real("rope.scaling.yarn_log_multiplier", logarithm),
    }}  # fmt: skip


def temperature_scale(header: Header) -> float:
    """What queries grow by with the logarithm of their position; 0: they do not."""
    return header.real("attention.temperature_scale", header.real("rope.scaling_beta", 0.0))


def _experts(header: Header) -> Fields:
    return {
        "num_experts": header.whole("expert_count"),
        "num_experts_per_tok": header.whole("expert_used_count"),
        "moe_intermediate_size": header.whole("expert_feed_forward_length", header.whole("feed_forward_length", 0)),
    }


def _qwen3moe(header: Header) -> Fields:
    return {**_experts(header), **_attention_bias(header), "norm_topk_prob": True}


def _qwen2moe(header: Header) -> Fields:
    shared = header.whole("expert_shared_feed_forward_length", 0)
    return {**_experts(header), "norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _gpt_oss(header: Header) -> Fields:
    return {
        "num_local_experts": header.whole("expert_count"),
        "num_experts_per_tok": header.whole("expert_used_count"),
        "intermediate_size": header.whole("expert_feed_forward_length", header.whole("feed_forward_length", 0)),
        "sliding_window": header.whole("attention.sliding_window"),
        "layer_types": layer_types(header, 2, 1),
        "yarn_more": {"truncate": False},
        "rope_defaults": {"kind": "yarn" if header.value("rope.scaling.factor") else ""},
        **_attention_bias(header),
    }


MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", names.MIXTRAL, paired=True,
    more=lambda header: {
        "num_local_experts": header.whole("expert_count"),
        "num_experts_per_tok": header.whole("expert_used_count"),
    },
)  # fmt: skip
"""What llama.cpp calls llama, where there are experts."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", paired=True, more=_llama),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", paired=True, more=_mistral3),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", paired=True, more=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", names.HEAD_NORMS, more=_attention_bias),
    # with images; of a text, all three parts of a position are alike, and rotate as one
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen25vl": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", names.HEAD_NORMS, more=_attention_bias),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", names.QWEN_MOE, more=_qwen2moe),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", names.QWEN_MOE, more=_qwen3moe),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", names.GPT_OSS, more=_gpt_oss),
    "gptoss": Architecture("gpt_oss", "GptOssForCausalLM", names.OLLAMA_GPT_OSS, more=_gpt_oss),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0, more=_attention_bias),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", names.SANDWICH, norm_offset=1.0, more=_gemma2),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", names.SANDWICH, epsilon=1e-6, norm_offset=1.0, more=_gemma3
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", names.PHI, partial=True, more=_phi3),
    "apertus": Architecture(
        "apertus", "ApertusForCausalLM", names.APERTUS, values=names.XIELU, more=_attention_bias
    ),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", names.GLM, partial=True, more=_attention_bias),
    "granite": Architecture("granite", "GraniteForCausalLM", paired=True, more=_granite),
    "olmo": Architecture("olmo", "OlmoForCausalLM", norm="", paired=True, more=_olmo),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", names.AFTER, more=_olmo2),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", names.AFTER, more=_exaone4),
    "command-r": Architecture(
        "cohere", "CohereForCausalLM", names.HEAD_NORMS, "layer_norm_eps", layer_norm=True, more=_cohere
    ),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", norm="layer_norm_eps", layer_norm=True, more=_cohere2),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", names.STARCODER, "norm_epsilon", layer_norm=True, more=_starcoder2
    ),
    "stablelm": Architecture(
        "stablelm", "StableLmForCausalLM", names.STABLELM, "layer_norm_eps", layer_norm=True, partial=True,
        more=_stablelm,
    ),
    "nemotron": Architecture(
        "nemotron", "NemotronForCausalLM", norm="norm_eps", layer_norm=True, partial=True, norm_offset=1.0, more=_llama
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", names.HUNYUAN, more=_attention_bias
    ),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", names.SEED, more=_seed),
    **HYBRIDS,
    **MAMBA,
    **KIMI,
}  # fmt: skip
"""By `general.architecture`."""

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

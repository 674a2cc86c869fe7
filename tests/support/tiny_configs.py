"""Configurations of tiny models: one of every supported family, and one for every option that changes a forward.

Sizes are chosen so that mistakes show: a vocabulary of 160, windows of 24 that outputs cross, grouped queries, and
biases where the family has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import transformers as hf
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

VOCAB = 160
WINDOW = 24
WHOLE = 64
"""A width that all compiled kernels take; the others' fits no panel, so that their linears are of several forms."""
HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
GROUPS = 2 if "group_size" in inspect.signature(MambaRMSNormGated).parameters else 1
"""Groups of Mamba-2's states: transformers 5.17 normalises all of them as one, which later releases mended."""
MakeConfig = Callable[[], Any]


def common(**changes: Any) -> dict[str, Any]:
    """The sizes that most families name alike, with `changes`."""
    return {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, **changes,
    }  # fmt: skip


def tiny(name: str, **changes: Any) -> MakeConfig:
    """A configuration of that class with the common sizes. transformers imports the class's module when it is made."""
    return lambda: getattr(hf, name)(**common(**deepcopy(changes)))


def changed(name: str, **fields: Any) -> MakeConfig:
    """The tiny model of that family with other options."""

    def make() -> Any:
        config = FAMILIES[name]()
        return type(config)(**{**config.to_dict(), **fields})

    return make


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


def _mamba2(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": WHOLE, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}
    return hf.Mamba2Config(**{**sizes, "state_size": 32, "n_groups": 4, "pad_token_id": 0, **changes})


def _falcon(**changes: Any) -> Any:
    sizes = {"hidden_size": WHOLE, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 32}
    return hf.FalconH1Config(**common(**{**sizes, **changes}))


def _old_falcon(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": WHOLE, "ffn_hidden_size": 80, "num_hidden_layers": 3}
    ends = {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    return hf.FalconConfig(**{**sizes, **ends, **changes})


def _gpt_oss() -> Any:
    # transformers 5.17 has the bound by heart, whatever the configuration says
    bound = {"swiglu_limit": 2.0} if hasattr(hf.GptOssConfig(), "swiglu_limit") else {}
    sizes = common(hidden_size=WHOLE, intermediate_size=32, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    windows = {"sliding_window": WINDOW, "layer_types": list(_ALTERNATING)}
    return hf.GptOssConfig(**sizes, **windows, **bound, rope_parameters=_ROPE)


_COMPRESSED = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
_LATENT = {
    **_COMPRESSED, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
_ROPE = rope("default")
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, MakeConfig] = {
    "llama": tiny("LlamaConfig"),
    "llama3.1-rope": tiny(
        "LlamaConfig", hidden_size=WHOLE, tie_word_embeddings=True,
        rope_parameters=rope("llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=64),
    ),
    "llama4": tiny(
        "Llama4TextConfig", num_hidden_layers=4, head_dim=16, hidden_size=WHOLE, intermediate_size=32,
        intermediate_size_mlp=80, num_local_experts=4, num_experts_per_tok=1, moe_layers=[1, 2, 3],
        no_rope_layers=[1, 0, 1, 1], attention_chunk_size=WINDOW, floor_scale=8, attn_scale=0.4, rope_parameters=_ROPE,
    ),
    "qwen2": tiny("Qwen2Config", hidden_size=WHOLE, num_key_value_heads=4),
    "qwen3": tiny("Qwen3Config", hidden_size=WHOLE, head_dim=16, tie_word_embeddings=True),
    "mistral": tiny("MistralConfig", sliding_window=WINDOW, head_dim=12),
    "gemma": tiny("GemmaConfig", hidden_size=WHOLE, head_dim=16),
    "gemma2": tiny(
        "Gemma2Config", head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING, query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0, final_logit_softcapping=0.5,
    ),
    "gemma3": tiny(
        "Gemma3TextConfig", head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING, query_pre_attn_scalar=24,
    ),
    "gemma4": tiny(
        "Gemma4TextConfig", num_hidden_layers=6, head_dim=16, global_head_dim=32, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=3, use_double_wide_mlp=True,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, final_logit_softcapping=0.5,
    ),
    "phi3": tiny("Phi3Config", sliding_window=WINDOW),
    "granite": tiny(
        "GraniteConfig", hidden_size=WHOLE, attention_multiplier=0.2, embedding_multiplier=2.0,
        residual_multiplier=0.7, logits_scaling=1.5,
    ),
    "olmo": tiny("OlmoConfig", hidden_size=WHOLE, clip_qkv=1.0),
    "olmo2": tiny("Olmo2Config"),
    "olmo3": tiny("Olmo3Config", sliding_window=WINDOW, layer_types=_ALTERNATING),
    "olmo-hybrid": tiny(
        "OlmoHybridConfig", hidden_size=WHOLE, num_hidden_layers=4, layer_types=HYBRID, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20, rope_parameters=_ROPE,
    ),
    "exaone4": tiny("Exaone4Config", sliding_window=WINDOW, layer_types=_ALTERNATING),
    "glm": tiny("GlmConfig", head_dim=16),
    "glm4": tiny("Glm4Config", head_dim=16),
    "hunyuan": tiny("HunYuanDenseV1Config", head_dim=16),
    "ministral3": tiny(
        "Ministral3Config", hidden_size=WHOLE, head_dim=16,
        rope_parameters=rope("yarn", factor=32.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
                             llama_4_scaling_beta=0.4),
    ),
    "seedoss": tiny("SeedOssConfig", hidden_size=WHOLE, head_dim=16),
    "starcoder2": tiny("Starcoder2Config", sliding_window=WINDOW),
    "qwen2moe": tiny(
        "Qwen2MoeConfig", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32,
        shared_expert_intermediate_size=40, mlp_only_layers=[1], norm_topk_prob=False,
    ),
    "qwen3moe": tiny(
        "Qwen3MoeConfig", hidden_size=WHOLE, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, norm_topk_prob=True,
    ),
    "qwen3next": tiny(
        "Qwen3NextConfig", num_hidden_layers=4, head_dim=16, layer_types=HYBRID, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=40, mlp_only_layers=[1],
    ),
    "qwen3.5": tiny(
        "Qwen3_5TextConfig", hidden_size=WHOLE, intermediate_size=96, num_hidden_layers=4, head_dim=16,
        layer_types=HYBRID, linear_num_key_heads=4, linear_num_value_heads=16, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_conv_kernel_dim=3, tie_word_embeddings=True,
    ),
    "qwen3.5moe": tiny(
        "Qwen3_5MoeTextConfig", hidden_size=WHOLE, num_hidden_layers=4, head_dim=16, layer_types=HYBRID,
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=16,
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "mixtral": tiny("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": tiny("OlmoeConfig", hidden_size=WHOLE, num_experts=5, num_experts_per_tok=3),
    "granitemoe": tiny(
        "GraniteMoeSharedConfig", hidden_size=WHOLE, intermediate_size=32, num_local_experts=5, num_experts_per_tok=2,
        shared_intermediate_size=48, attention_multiplier=0.2, embedding_multiplier=2.0, residual_multiplier=0.7,
        logits_scaling=1.5,
    ),
    "phimoe": tiny(
        "PhimoeConfig", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1, attention_bias=True,
        lm_head_bias=True,
    ),
    "glm4moe": tiny(
        "Glm4MoeConfig", hidden_size=WHOLE, head_dim=16, n_routed_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.5,
        use_qk_norm=True, attention_bias=True,
    ),
    "dots1": tiny(
        "Dots1Config", hidden_size=WHOLE, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True,
        sliding_window=WINDOW, max_window_layers=2,
    ),
    "ernie4.5moe": tiny(
        "Ernie4_5_MoeConfig", hidden_size=WHOLE, moe_num_experts=6, moe_k=2, moe_intermediate_size=32,
        moe_num_shared_experts=1, use_bias=True, tie_word_embeddings=False,
    ),
    "minimax-m2": tiny(
        "MiniMaxM2Config", hidden_size=WHOLE, intermediate_size=32, head_dim=32, num_local_experts=6,
        num_experts_per_tok=2, rope_parameters={**_ROPE, "partial_rotary_factor": 0.5},
    ),
    "gemma4moe": tiny(
        "Gemma4TextConfig", hidden_size=WHOLE, head_dim=16, global_head_dim=32, sliding_window=WINDOW,
        layer_types=[*_ALTERNATING[:2], "full_attention"], num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32,
    ),
    "gpt-oss": _gpt_oss,
    "hunyuanmoe": tiny("HunYuanMoEV1Config", head_dim=12, num_experts=4, moe_topk=2),
    "granitehybrid": tiny(  # Granite 4 as it is without a recurrent layer
        "GraniteMoeHybridConfig", hidden_size=64, layer_types=["attention"] * 3, num_local_experts=0,
        shared_intermediate_size=64, position_embedding_type="rope", mamba_n_heads=8, attention_multiplier=0.2,
        logits_scaling=1.5,
    ),
    "granite4": tiny(
        "GraniteMoeHybridConfig", hidden_size=64,
        layer_types=["linear_attention", "full_attention", "linear_attention"], num_local_experts=5,
        intermediate_size=32, shared_intermediate_size=64, mamba_n_heads=8, mamba_d_state=32, mamba_n_groups=GROUPS,
        attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=1.5,
    ),
    "bamba": tiny("BambaConfig", attn_layer_indices=[1], mamba_n_heads=4, mamba_d_state=16, mamba_proj_bias=True),
    "falcon-h1": tiny(
        "FalconH1Config", hidden_size=WHOLE, mamba_d_ssm=96, mamba_n_heads=6, mamba_n_groups=2, mamba_d_state=32,
        mamba_rms_norm=True, ssm_multipliers=[0.7, 1.2, 0.8, 1.3, 0.9], ssm_in_multiplier=1.25, ssm_out_multiplier=0.7,
        mlp_multipliers=[1.3, 0.6], key_multiplier=0.5, attention_in_multiplier=1.2, attention_out_multiplier=0.9,
        embedding_multiplier=1.5, lm_head_multiplier=0.6,
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=WHOLE, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=32,
        n_groups=GROUPS, use_bias=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "nemotron-h": tiny(
        "NemotronHConfig", num_hidden_layers=None, hidden_size=WHOLE,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"], head_dim=16,
        mamba_num_heads=5, mamba_head_dim=16, ssm_state_size=16, n_groups=1, use_bias=True, mlp_bias=True,
    ),
    "nemotron-3": tiny(
        "NemotronHConfig", num_hidden_layers=None, hidden_size=WHOLE,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"], head_dim=16, mamba_num_heads=5,
        mamba_head_dim=16, ssm_state_size=16, n_groups=1, n_routed_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=48, moe_shared_expert_intermediate_size=80, n_group=2, topk_group=1,
        routed_scaling_factor=1.5,
    ),
    "lfm2": tiny("Lfm2Config", hidden_size=WHOLE, layer_types=["conv", "full_attention", "conv"], conv_bias=True),
    "lfm2moe": tiny(
        "Lfm2MoeConfig", layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, moe_intermediate_size=32,
        num_experts=6, num_experts_per_tok=2, routed_scaling_factor=1.5,
    ),
    "lfm3": tiny(
        "Lfm3Config", num_hidden_layers=4, head_dim=16, sliding_window=WINDOW, conv_L_cache=4,
        layer_types=["conv", "sliding_attention", "full_attention", "conv"],
    ),
    "kimi-linear": tiny(
        "KimiLinearConfig", num_hidden_layers=4, num_key_value_heads=4, layer_types=HYBRID,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], linear_head_dim=16, linear_num_heads=3,
        kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, moe_intermediate_size=32,
        num_local_experts=6, num_experts_per_tok=2, n_shared_experts=2, n_group=2, topk_group=1,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v2": tiny(
        "DeepseekV2Config", **_LATENT, hidden_size=WHOLE, q_lora_rank=None, topk_method="greedy",
    ),
    "deepseek-v3": tiny(
        "DeepseekV3Config", **{**_LATENT, "kv_lora_rank": 32, "v_head_dim": 32}, hidden_size=WHOLE, q_lora_rank=32,
        norm_topk_prob=True, routed_scaling_factor=1.5,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.8),
    ),
    "glm4moelite": tiny(
        "Glm4MoeLiteConfig", **{name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"},
        hidden_size=WHOLE, q_lora_rank=24, mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "youtu": tiny(
        "YoutuConfig", num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        q_lora_rank=64, tie_word_embeddings=True,
    ),
    "minicpm3": tiny("MiniCPM3Config", **_COMPRESSED, q_lora_rank=24, scale_emb=1.5, dim_model_base=32),
    "cohere": tiny("CohereConfig", logit_scale=0.5),
    "cohere2": tiny("Cohere2Config", logit_scale=0.5, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "apertus": tiny("ApertusConfig"),
    "smollm3": tiny("SmolLM3Config", hidden_size=WHOLE, no_rope_layers=[1, 0, 1]),
    "nemotron": tiny("NemotronConfig", head_dim=16, attention_bias=True, mlp_bias=True),
    "stablelm": tiny("StableLmConfig", hidden_size=64),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=48, word_embed_proj_dim=48, ffn_dim=80, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "opt-350m": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=48, word_embed_proj_dim=32, do_layer_norm_before=False, ffn_dim=80,
        num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2,
    ),
    "falcon": _old_falcon,
    "falcon-40b": lambda: _old_falcon(new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=6, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    ),
    "mpt": lambda: hf.MptConfig(
        vocab_size=VOCAB, d_model=WHOLE, n_layers=3, n_heads=4, max_seq_len=512, bos_token_id=1, eos_token_id=2,
    ),
    "gpt-neo": lambda: hf.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=48, num_layers=3, num_heads=4, window_size=WINDOW, bos_token_id=1,
        attention_types=[[["global", "local"], 1], [["local"], 1]], max_position_embeddings=512, eos_token_id=2,
    ),
}  # fmt: skip

_EACH = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5]
_LONG = {"short_factor": _EACH, "long_factor": [3 * factor for factor in _EACH]}
_HALF, _ALL = (rope("default", partial_rotary_factor=part) for part in (0.5, 1.0))
_FULL = ["full_attention"] * 3
OPTIONS: dict[str, MakeConfig] = {
    "llama with biases": changed("llama", attention_bias=True, mlp_bias=True),
    "llama, gelu": changed("llama", hidden_act="gelu"),
    "llama, squared relu": changed("llama", hidden_act="relu2", tie_word_embeddings=True),
    "llama, linear": changed("llama", rope_parameters=rope("linear", factor=4.0)),
    "llama, dynamic": changed("llama", rope_parameters=rope("dynamic", factor=4.0)),
    "llama, yarn": changed(
        "llama", rope_parameters=rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=4.0),
    ),
    "phi3, partial": changed(
        "phi3", hidden_size=WHOLE, sliding_window=None, tie_word_embeddings=True, rope_parameters=_HALF,
    ),
    "phi3, longrope": changed(
        "phi3", rope_parameters=rope("longrope", **_LONG), original_max_position_embeddings=32, sliding_window=None,
    ),
    "phi3, longrope within": changed(
        "phi3", rope_parameters=rope("longrope", **_LONG), original_max_position_embeddings=256,
    ),
    "granite with biases": changed("granite", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "granite, uneven": changed("granite", embedding_multiplier=1.003, residual_multiplier=0.22, logits_scaling=3.7),
    "granitehybrid without positions": changed("granitehybrid", position_embedding_type=None),
    "olmo with biases": changed("olmo", attention_bias=True, clip_qkv=None, tie_word_embeddings=True),
    "olmo2 with biases": changed("olmo2", attention_bias=True),
    "olmo3, yarn": changed(
        "olmo3", rope_parameters={"sliding_attention": _ROPE, "full_attention": rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, attention_factor=1.2)},
    ),
    "olmo-hybrid, without positions": changed(
        "olmo-hybrid", rope_parameters={"rope_type": "default", "rope_theta": None}, linear_allow_neg_eigval=False,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "deepseek-v2, groups": changed(
        "deepseek-v2", q_lora_rank=24, topk_method="group_limited_greedy", routed_scaling_factor=1.7,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7),
    ),
    "deepseek-v3, halves": changed(
        "deepseek-v3", q_lora_rank=None, rope_interleave=False, norm_topk_prob=False, n_group=1, topk_group=1,
    ),
    "smollm3 with windows": changed(
        "smollm3", use_sliding_window=True, sliding_window=WINDOW, layer_types=None, attention_bias=True,
        mlp_bias=True,
    ),
    "stablelm, parallel": changed("stablelm", use_parallel_residual=True, use_qkv_bias=True),
    "stablelm, norms of heads": changed("stablelm", qk_layernorm=True, rope_parameters=_ALL),
    "stablelm, partial norms": changed("stablelm", qk_layernorm=True, tie_word_embeddings=True),
    "glm4 without biases": changed("glm4", attention_bias=False, tie_word_embeddings=True),
    "glm, all rotated": changed("glm", rope_parameters=_ALL),
    "exaone4 without windows": changed("exaone4", sliding_window=None, layer_types=_FULL, tie_word_embeddings=True),
    "starcoder2 without biases": changed("starcoder2", use_bias=False, sliding_window=None, hidden_act="relu"),
    "hunyuan, alpha": changed("hunyuan", attention_bias=True, rope_parameters=rope("dynamic", alpha=50.0, factor=1.0)),
    "seedoss with biases": changed("seedoss", attention_bias=False, attention_out_bias=True, mlp_bias=True),
    "ministral3 with a window": changed("ministral3", sliding_window=WINDOW),
    "qwen2moe, every second layer": changed(
        "qwen2moe", mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False,
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2, layer_types=None,
    ),
    "qwen3moe, not normalised": changed(
        "qwen3moe", norm_topk_prob=False, mlp_only_layers=[0], use_sliding_window=True, sliding_window=WINDOW,
    ),
    "mixtral with a window": changed("mixtral", hidden_size=WHOLE, sliding_window=WINDOW),
    "olmoe, normalised": changed("olmoe", norm_topk_prob=True, attention_bias=True, num_key_value_heads=4),
    "granitemoe alone": tiny(
        "GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=3, tie_word_embeddings=True,
        attention_multiplier=0.3,
    ),
    "granitehybrid, experts": changed("granitehybrid", num_local_experts=4, num_experts_per_tok=2),
    "phimoe, longrope within": changed(
        "phimoe", max_position_embeddings=512, original_max_position_embeddings=256,
        rope_parameters=rope("longrope", **_LONG, short_mscale=1.2, long_mscale=1.4,
                             original_max_position_embeddings=256),
    ),
    "glm4moe, one group": changed(
        "glm4moe", n_group=1, topk_group=1, norm_topk_prob=False, use_qk_norm=False, first_k_dense_replace=0,
    ),
    "ernie4.5moe, none shared": changed(
        "ernie4.5moe", moe_num_shared_experts=0, moe_layer_interval=2, moe_layer_start_index=0, use_bias=False,
    ),
    "llama4, two experts": changed(
        "llama4", num_experts_per_tok=2, use_qk_norm=False, attn_temperature_tuning=False, attention_bias=True,
        attention_chunk_size=50, no_rope_layers=[1, 1, 0, 1], layer_types=None,
    ),
    "gpt-oss, yarn": changed("gpt-oss", rope_parameters=None, hidden_size=48, attention_bias=False),
    "qwen3next, plain": changed(
        "qwen3next", num_experts=0, attention_bias=True, linear_num_value_heads=2, linear_key_head_dim=16,
        tie_word_embeddings=True,
    ),
    "qwen3next, not normalised": changed("qwen3next", norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[]),
    "qwen3.5, untied": changed("qwen3.5", hidden_size=48, tie_word_embeddings=False, linear_num_value_heads=8),
    "qwen3.5, begins with attention": changed("qwen3.5", layer_types=["full_attention"] * 2 + ["linear_attention"] * 2),
    "gemma-untied": tiny(
        "GemmaConfig", head_dim=12, num_key_value_heads=4, attention_bias=True, tie_word_embeddings=False,
    ),
    "gemma2-uncapped": tiny(
        "Gemma2Config", head_dim=16, sliding_window=WINDOW, attention_bias=True, attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3-scaled": tiny(
        "Gemma3TextConfig", head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={"sliding_attention": _ROPE, "full_attention": rope("linear", factor=8.0, rope_theta=1e6)},
        final_logit_softcapping=20.0, attn_logit_softcapping=1.0,  # which transformers does not read
    ),
    "gemma4-keys-are-values": tiny(
        "Gemma4TextConfig", head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        attention_bias=True, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "full_attention"], hidden_size_per_layer_input=0,
    ),
    "cohere-head-norms": tiny(
        "CohereConfig", logit_scale=2.0, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False,
    ),
    "apertus-plain": tiny(
        "ApertusConfig", hidden_size=WHOLE, hidden_act="relu2", attention_bias=True, rope_parameters=_ROPE,
    ),
    "gpt2-scaled-by-layer": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=WHOLE, n_layer=3, n_head=4, n_positions=512, n_inner=80, activation_function="relu",
        scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, reorder_and_upcast_attn=True,
        tie_word_embeddings=False,
    ),
    "falcon, one norm": lambda: _old_falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, tie_word_embeddings=False,
    ),
    "falcon, one after the other": lambda: _old_falcon(parallel_attn=False, multi_query=False, activation="relu"),
    "bloom, tied": changed("bloom", hidden_size=WHOLE, n_head=4, tie_word_embeddings=True),
    "mpt, clipped": lambda: hf.MptConfig(
        vocab_size=VOCAB, d_model=48, n_layers=3, n_heads=6, max_seq_len=512, bos_token_id=1, eos_token_id=2,
        attn_config={"clip_qkv": 1.0, "softmax_scale": 0.3},
    ),
    "opt-bare": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=WHOLE, ffn_dim=80, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=512, enable_bias=False, layer_norm_elementwise_affine=False,
        _remove_final_layer_norm=True, activation_function="gelu", tie_word_embeddings=False,
    ),
    "mamba2-bounded-steps": lambda: _mamba2(time_step_limit=(0.6, 0.8), use_conv_bias=False, conv_kernel=2),
    "mamba2-tied": lambda: _mamba2(tie_word_embeddings=True, head_dim=8, num_heads=16),
    "falcon-normed-after-gate": lambda: _falcon(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon-gate-alone": lambda: _falcon(mamba_rms_norm=False, mamba_d_ssm=None, mamba_n_heads=8, mamba_n_groups=2),
    "bamba-without-attention": tiny(
        "BambaConfig", mamba_n_heads=8, mamba_d_state=16, mamba_conv_bias=False, attention_bias=True, mlp_bias=True,
    ),
    "granite4-dense-rotated": tiny(
        "GraniteMoeHybridConfig", hidden_size=WHOLE, layer_types=["linear_attention", "full_attention"],
        num_hidden_layers=2, num_local_experts=0, shared_intermediate_size=64, mamba_n_heads=8, mamba_d_state=16,
        mamba_proj_bias=True, position_embedding_type="rope",
    ),
    "nemotron-3-latent": tiny(
        "NemotronHConfig", num_hidden_layers=None, hidden_size=WHOLE,
        layers_block_type=["linear_attention", "moe", "mlp", "moe"], mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, n_routed_experts=4, moe_latent_size=32, moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=80, mlp_bias=True, norm_topk_prob=False,
    ),
    "kimi-linear-wide": changed("kimi-linear", hidden_size=WHOLE, kv_lora_rank=32, v_head_dim=16),
    "lfm3-plain": changed(
        "lfm3", hidden_size=WHOLE, use_attention_gate=False, use_sandwich_norm=False, attention_bias=True,
        tie_word_embeddings=False, conv_bias=True,
    ),
    "lfm2-own-width": tiny(
        "Lfm2Config", hidden_size=WHOLE, layer_types=["conv", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False, conv_L_cache=5, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Options that change the forward: the families' own tiny models have some already. With longrope, transformers changes
the frequencies while a sequence grows, and leaves cached keys as they are; its forward over all tokens knows one set,
as the decoder does."""

if not hasattr(hf, "Lfm3Config"):  # transformers before 5.24
    del FAMILIES["lfm3"], OPTIONS["lfm3-plain"]

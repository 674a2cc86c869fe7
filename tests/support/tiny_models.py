"""Tiny random checkpoints of every supported family, in ordinary Hugging Face format.

Sizes are chosen so that mistakes show: a vocabulary of 160, windows of 24 that outputs cross, grouped queries, biases
where the family has them, and weights large enough that greedy outputs wander instead of repeating one token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

VOCAB = 160
WINDOW = 24
WHOLE = 64
"""A width that all compiled kernels take; the others' fits no panel, so that their linears are of several forms."""
HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
GROUPS = 2 if "group_size" in inspect.signature(MambaRMSNormGated).parameters else 1
"""Of Mamba-2's states: transformers 5.17 normalises all groups as one, which later releases mended."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _common(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    values.update(changes)
    return values


def _alternating(layers: int = 3) -> list[str]:
    return ["sliding_attention" if index % 2 == 0 else "full_attention" for index in range(layers)]


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_common()),
    "llama3.1-rope": lambda: hf.LlamaConfig(
        **_common(
            hidden_size=WHOLE,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **_common(
            num_hidden_layers=4,
            head_dim=16,
            hidden_size=WHOLE,
            intermediate_size=32,
            intermediate_size_mlp=80,
            num_local_experts=4,
            num_experts_per_tok=1,
            moe_layers=[1, 2, 3],
            no_rope_layers=[1, 0, 1, 1],
            attention_chunk_size=WINDOW,
            floor_scale=8,
            attn_scale=0.4,
            rope_parameters=_ROPE,
        )
    ),
    "qwen2": lambda: hf.Qwen2Config(**_common(hidden_size=WHOLE, num_key_value_heads=4)),
    "qwen3": lambda: hf.Qwen3Config(**_common(hidden_size=WHOLE, head_dim=16, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralConfig(**_common(sliding_window=WINDOW, head_dim=12)),
    "gemma": lambda: hf.GemmaConfig(**_common(hidden_size=WHOLE, head_dim=16)),
    "gemma2": lambda: hf.Gemma2Config(
        **_common(
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_alternating(),
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=0.5,
        )
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_common(head_dim=16, sliding_window=WINDOW, layer_types=_alternating(), query_pre_attn_scalar=24)
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **_common(
            num_hidden_layers=6,
            head_dim=16,
            global_head_dim=32,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
            final_logit_softcapping=0.5,
        )
    ),
    "phi3": lambda: hf.Phi3Config(**_common(sliding_window=WINDOW)),
    "granite": lambda: hf.GraniteConfig(
        **_common(
            hidden_size=WHOLE,
            attention_multiplier=0.2,
            embedding_multiplier=2.0,
            residual_multiplier=0.7,
            logits_scaling=1.5,
        )
    ),
    "olmo": lambda: hf.OlmoConfig(**_common(hidden_size=WHOLE, clip_qkv=1.0)),
    "olmo2": lambda: hf.Olmo2Config(**_common()),
    "olmo3": lambda: hf.Olmo3Config(**_common(sliding_window=WINDOW, layer_types=_alternating())),
    "exaone4": lambda: hf.Exaone4Config(**_common(sliding_window=WINDOW, layer_types=_alternating())),
    "glm": lambda: hf.GlmConfig(**_common(head_dim=16)),
    "glm4": lambda: hf.Glm4Config(**_common(head_dim=16)),
    "hunyuan": lambda: hf.HunYuanDenseV1Config(**_common(head_dim=16)),
    "ministral3": lambda: hf.Ministral3Config(
        **_common(
            hidden_size=WHOLE,
            head_dim=16,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        )
    ),
    "seedoss": lambda: hf.SeedOssConfig(**_common(hidden_size=WHOLE, head_dim=16)),
    "starcoder2": lambda: hf.Starcoder2Config(**_common(sliding_window=WINDOW)),
    "qwen2moe": lambda: hf.Qwen2MoeConfig(
        **_common(
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
            norm_topk_prob=False,
        )
    ),
    "qwen3moe": lambda: hf.Qwen3MoeConfig(
        **_common(
            hidden_size=WHOLE,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        )
    ),
    "qwen3next": lambda: hf.Qwen3NextConfig(
        **_common(
            num_hidden_layers=4,
            head_dim=16,
            layer_types=HYBRID,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=20,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
        )
    ),
    "qwen3.5": lambda: hf.Qwen3_5TextConfig(
        **_common(
            hidden_size=WHOLE,
            intermediate_size=96,
            num_hidden_layers=4,
            head_dim=16,
            layer_types=HYBRID,
            linear_num_key_heads=4,
            linear_num_value_heads=16,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=3,
            tie_word_embeddings=True,
        )
    ),
    "qwen3.5moe": lambda: hf.Qwen3_5MoeTextConfig(
        **_common(
            hidden_size=WHOLE,
            num_hidden_layers=4,
            head_dim=16,
            layer_types=HYBRID,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=24,
            linear_value_head_dim=16,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
    "mixtral": lambda: hf.MixtralConfig(**_common(num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": lambda: hf.OlmoeConfig(**_common(hidden_size=WHOLE, num_experts=5, num_experts_per_tok=3)),
    "granitemoe": lambda: hf.GraniteMoeSharedConfig(
        **_common(
            hidden_size=WHOLE,
            intermediate_size=32,
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            attention_multiplier=0.2,
            embedding_multiplier=2.0,
            residual_multiplier=0.7,
            logits_scaling=1.5,
        )
    ),
    "phimoe": lambda: hf.PhimoeConfig(
        **_common(
            num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1, attention_bias=True, lm_head_bias=True
        )
    ),
    "glm4moe": lambda: hf.Glm4MoeConfig(
        **_common(
            hidden_size=WHOLE,
            head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        )
    ),
    "dots1": lambda: hf.Dots1Config(
        **_common(
            hidden_size=WHOLE,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            sliding_window=WINDOW,
            max_window_layers=2,
        )
    ),
    "ernie4.5moe": lambda: hf.Ernie4_5_MoeConfig(
        **_common(
            hidden_size=WHOLE,
            moe_num_experts=6,
            moe_k=2,
            moe_intermediate_size=32,
            moe_num_shared_experts=1,
            use_bias=True,
            tie_word_embeddings=False,
        )
    ),
    "minimax-m2": lambda: hf.MiniMaxM2Config(
        **_common(
            hidden_size=WHOLE,
            intermediate_size=32,
            head_dim=32,
            num_local_experts=6,
            num_experts_per_tok=2,
            rope_parameters={**_ROPE, "partial_rotary_factor": 0.5},
        )
    ),
    "gemma4moe": lambda: hf.Gemma4TextConfig(
        **_common(
            hidden_size=WHOLE,
            head_dim=16,
            global_head_dim=32,
            sliding_window=WINDOW,
            layer_types=[*_alternating(2), "full_attention"],
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=32,
        )
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **_common(
            hidden_size=WHOLE,
            intermediate_size=32,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_alternating(),
            num_local_experts=4,
            num_experts_per_tok=2,
            # transformers 5.17 has the bound by heart, whatever the configuration says
            **({"swiglu_limit": 2.0} if hasattr(hf.GptOssConfig(), "swiglu_limit") else {}),
            rope_parameters=_ROPE,
        )
    ),
    "hunyuanmoe": lambda: hf.HunYuanMoEV1Config(**_common(head_dim=12, num_experts=4, moe_topk=2)),
    "granitehybrid": lambda: hf.GraniteMoeHybridConfig(  # Granite 4 as it is without a recurrent layer
        **_common(
            hidden_size=64,
            layer_types=["attention"] * 3,
            num_local_experts=0,
            shared_intermediate_size=64,
            position_embedding_type="rope",
            mamba_n_heads=8,
            attention_multiplier=0.2,
            logits_scaling=1.5,
        )
    ),
    "granite4": lambda: hf.GraniteMoeHybridConfig(
        **_common(
            hidden_size=64,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=5,
            intermediate_size=32,
            shared_intermediate_size=64,
            mamba_n_heads=8,
            mamba_d_state=32,
            mamba_n_groups=GROUPS,
            attention_multiplier=0.2,
            residual_multiplier=0.7,
            logits_scaling=1.5,
        )
    ),
    "bamba": lambda: hf.BambaConfig(
        **_common(attn_layer_indices=[1], mamba_n_heads=4, mamba_d_state=16, mamba_proj_bias=True)
    ),
    "falcon-h1": lambda: hf.FalconH1Config(
        **_common(
            hidden_size=WHOLE,
            mamba_d_ssm=96,
            mamba_n_heads=6,
            mamba_n_groups=2,
            mamba_d_state=32,
            mamba_rms_norm=True,
            ssm_multipliers=[0.7, 1.2, 0.8, 1.3, 0.9],
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=0.7,
            mlp_multipliers=[1.3, 0.6],
            key_multiplier=0.5,
            attention_in_multiplier=1.2,
            attention_out_multiplier=0.9,
            embedding_multiplier=1.5,
            lm_head_multiplier=0.6,
        )
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=WHOLE,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        state_size=32,
        n_groups=GROUPS,
        use_bias=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(
        **_common(
            num_hidden_layers=None,
            hidden_size=WHOLE,
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
            head_dim=16,
            mamba_num_heads=5,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=1,
            use_bias=True,
            mlp_bias=True,
        )
    ),
    "nemotron-3": lambda: hf.NemotronHConfig(
        **_common(
            num_hidden_layers=None,
            hidden_size=WHOLE,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            head_dim=16,
            mamba_num_heads=5,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=1,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=80,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
        )
    ),
    "lfm2": lambda: hf.Lfm2Config(
        **_common(hidden_size=WHOLE, layer_types=["conv", "full_attention", "conv"], conv_bias=True)
    ),
    "lfm2moe": lambda: hf.Lfm2MoeConfig(
        **_common(
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            moe_intermediate_size=32,
            num_experts=6,
            num_experts_per_tok=2,
            routed_scaling_factor=1.5,
        )
    ),
    "kimi-linear": lambda: hf.KimiLinearConfig(
        **_common(
            num_hidden_layers=4,
            num_key_value_heads=4,
            layer_types=HYBRID,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            linear_head_dim=16,
            linear_num_heads=3,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            moe_intermediate_size=32,
            num_local_experts=6,
            num_experts_per_tok=2,
            n_shared_experts=2,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
        )
    ),
    "cohere": lambda: hf.CohereConfig(**_common(logit_scale=0.5)),
    "cohere2": lambda: hf.Cohere2Config(**_common(logit_scale=0.5, sliding_window=WINDOW, layer_types=_alternating())),
    "apertus": lambda: hf.ApertusConfig(**_common()),
    "smollm3": lambda: hf.SmolLM3Config(**_common(hidden_size=WHOLE, no_rope_layers=[1, 0, 1])),
    "nemotron": lambda: hf.NemotronConfig(**_common(head_dim=16, attention_bias=True, mlp_bias=True)),
    "stablelm": lambda: hf.StableLmConfig(**_common(hidden_size=64)),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        word_embed_proj_dim=48,
        ffn_dim=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "opt-350m": lambda: hf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        ffn_dim=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
}


def make_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, heavy: bool = False) -> Any:
    """A random model of the family with every parameter drawn anew, norms near one, sinks and biases not zero.

    `heavy`: some weights are several times as large as the others, as trained ones are; clamps and bounds show.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    randomize(model, name, generator, heavy)
    return model.to(dtype)


def randomize(model: Any, name: str, generator: torch.Generator, heavy: bool = False) -> None:
    """Draw all parameters anew. `name` of the family: some scale what they multiply."""
    tied = 0.1 if getattr(model.config, "tie_word_embeddings", False) else 1.0
    if name.startswith("gemma"):
        tied = 0.02  # this family scales its embeddings up
    elif name == "opt-350m":
        tied = 0.3
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.randn(1, generator=generator))
            elif key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith("A_log"):  # what a state forgets with each token: some heads little, some much
                parameter.copy_(noise - 2.0)
                continue
            if heavy:
                noise *= 1 + 4 * (torch.rand(parameter.shape, generator=generator) < 0.02)
            if (parameter.dim() == 1 and "norm" in key and "weight" in key) or ("ln_" in key and "weight" in key):
                parameter.add_(0.2 * noise)
                if name.startswith("gemma4") and ("q_norm" in key or "k_norm" in key):
                    parameter.mul_(0.4)  # its scores are not scaled
            elif parameter.dim() == 1 or "bias" in key:
                parameter.copy_(
                    (0.1 if name.startswith("gpt2") else 0.3) * noise
                )  # GPT-2 has so many that they drown the tokens
            elif "wpe" in key or "embed_positions" in key:
                parameter.copy_(noise * (2.0 if name == "opt-350m" else 1.0))  # its last norm leaves tokens little room
            elif "embed" in key or "wte" in key:
                parameter.copy_(noise * tied)  # else a tied output just repeats its input
            else:
                inputs = parameter.shape[0 if name.startswith("gpt2") else -1]  # GPT-2 stores the transpose
                parameter.copy_(noise * 1.6 / inputs**0.5)


def make_checkpoint(
    name: str,
    folder: Path,
    sharded: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    heavy: bool = False,
) -> Path:
    """Write a random checkpoint of the family into `folder` (made if needed); several small shards if `sharded`."""
    from transformers.utils import logging

    model = make_model(name, seed, dtype, heavy)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    if bars:
        logging.enable_progress_bar()
    return folder

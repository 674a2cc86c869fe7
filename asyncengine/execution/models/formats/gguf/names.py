"""Names of tensors: in a file, and in transformers' checkpoints.

Sources: gguf-py's tensor_mapping.py for the former, transformers' modules for the latter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class TensorName(NamedTuple):
    """A tensor's name in a file: "blk.LAYER.STEM.SUFFIX"; the layer is None outside of layers, the suffix may be ""."""

    layer: int | None
    stem: str
    suffix: str

    def __str__(self) -> str:
        before = "" if self.layer is None else f"blk.{self.layer}."
        return f"{before}{self.stem}{self.suffix and '.'}{self.suffix}"


NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,4})\.)?(?!blk\.)(.+?)(?:\.(weight|bias))?", re.DOTALL)
"""Names that converters give: layer, stem and suffix."""


def each(name: str, there: str, parts: str) -> dict[str, str]:
    """Names that differ in one part: `each("attn_{}", "self_attn.{}_proj", "q k v")`."""
    return {name.format(part): there.format(part) for part in parts.split()}


FEED_FORWARD = each("ffn_{}", "mlp.{}_proj", "gate up down")
LLAMA: Mapping[str, str] = {
    "attn_norm": "input_layernorm", **each("attn_{}", "self_attn.{}_proj", "q k v"), "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", **FEED_FORWARD,
}  # fmt: skip
"""Tensors of a layer: stem in a file -> name of the module in transformers.

"[]" in a name stands for the index of the first axis: such a tensor is several there (experts, norms of heads). "#0"
and "#1" behind it make it the first or second part of that tensor, "#" the only one (see `Architecture.join`).
"""
HEAD_NORMS = {**LLAMA, **each("attn_{}_norm", "self_attn.{}_norm", "q k")}
QWEN_MOE = {
    **HEAD_NORMS, **each("ffn_{}_exps", "mlp.experts.[].{}_proj", "gate up down"),
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **each("ffn_{}_shexp", "mlp.shared_expert.{}_proj", "gate up down"),
}  # fmt: skip
OUTER: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}  # fmt: skip
"""Stems that stand for several, one below the other: llama.cpp's converter makes them if it is told so
(`--fuse-qkv`, `--fuse-gate-up-exps`), and Ollama's first gpt-oss has the former."""
PARAMETERS = ("sinks", "expert_bias", "e_score_correction_bias", "dt_bias", "A_log", "D")
"""Parameters that a module has itself: transformers adds no suffix; files have ".weight", ".bias" or none."""
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH = {**HEAD_NORMS, **AFTER, "ffn_norm": "pre_feedforward_layernorm"}
NORMS_AFTER = {
    **{name: there for name, there in HEAD_NORMS.items() if name not in ("attn_norm", "ffn_norm")}, **AFTER,
}  # fmt: skip
SEED = {**LLAMA, "post_attention_norm": "post_attention_layernorm"}
GLM = {
    **LLAMA, "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
HUNYUAN = {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
APERTUS = {**HEAD_NORMS, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
XIELU = {
    f"xielu.{name}": (f"mlp.act_fn.{name}", shape)
    for name, shape in {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}.items()
}
STABLELM = {**LLAMA, **each("attn_{}_norm", "self_attn.{}_layernorm.norms.[]", "q k")}
STARCODER = {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
MIXTRAL = {
    **LLAMA, "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.[].w1",
    "ffn_down_exps": "block_sparse_moe.experts.[].w2", "ffn_up_exps": "block_sparse_moe.experts.[].w3",
}  # fmt: skip
GPT_OSS = {
    **{name: there for name, there in LLAMA.items() if name not in ("ffn_norm", *FEED_FORWARD)},
    "ffn_gate_exps": "mlp.experts.gate_up_proj#0", "ffn_up_exps": "mlp.experts.gate_up_proj#1",
    "ffn_down_exps": "mlp.experts.down_proj#", "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
}  # fmt: skip
OLLAMA_GPT_OSS = {
    **GPT_OSS, "attn_out": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj#",  # in its first files; gate and up are apart since
}  # fmt: skip


def _mamba_names(prefix: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm"}
    return {f"ssm_{name}": prefix + there for name, there in {**parts, "out": "out_proj"}.items()}


QWEN_STATE = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
QWEN = {name: there for name, there in {**HEAD_NORMS, **QWEN_STATE}.items() if name != "ffn_norm"}
QWEN35_MOE = {name: there for name, there in {**QWEN_MOE, **QWEN_STATE}.items() if name != "ffn_norm"}
QWEN_HEAD = {
    "nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}  # fmt: skip
HEAD_LAYER = "mtp.layers.0."
"""The beginning of transformers' names of other tensors of that layer."""
QWEN3_NEXT_FUSED = {**FUSED, "ssm_in": ("attn_qkv", "attn_gate"), "ssm_ba": ("ssm_beta", "ssm_alpha")}
LFM = {
    "attn_norm": "operator_norm", **each("attn_{}", "self_attn.{}_proj", "q k v"), "attn_output": "self_attn.out_proj",
    **each("attn_{}_norm", "self_attn.{}_layernorm", "q k"), **each("shortconv.{}", "conv.{}", "conv in_proj out_proj"),
    "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
}  # fmt: skip
LFM_MOE = {
    **LFM, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.[].w1", "ffn_up_exps": "feed_forward.experts.[].w3",
    "ffn_down_exps": "feed_forward.experts.[].w2",
}  # fmt: skip
LFM_OUTER = {
    "token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head",
    "output_norm": "model.embedding_norm",  # Ollama's converter calls it so
}  # fmt: skip
GRANITE = {
    **LLAMA, **_mamba_names("mamba."), "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear#0", "ffn_up_exps": "block_sparse_moe.input_linear#1",
    "ffn_down_exps": "block_sparse_moe.output_linear#",
    **{f"ffn_gate{suffix}": "shared_mlp.input_linear#0" for suffix in ("", "_shexp")},
    **{f"ffn_up{suffix}": "shared_mlp.input_linear#1" for suffix in ("", "_shexp")},
    **{f"ffn_down{suffix}": "shared_mlp.output_linear" for suffix in ("", "_shexp")},
}  # fmt: skip
FALCON = {
    **LLAMA, **_mamba_names("mamba."), "ffn_norm": "pre_ff_layernorm",
    **each("ffn_{}", "feed_forward.{}_proj", "gate up down"),
}  # fmt: skip
MAMBA2 = {"attn_norm": "norm", **_mamba_names("mixer.")}
NEMOTRON = {
    **MAMBA2, **each("attn_{}", "mixer.{}_proj", "q k v"), "attn_output": "mixer.o_proj",
    **each("ffn_{}", "mixer.{}_proj", "up down"), **each("ffn_{}_exps", "mixer.experts.[].{}_proj", "up down"),
    **each("ffn_{}_shexp", "mixer.shared_experts.{}_proj", "up down"), "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias", "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
KIMI = {
    **LLAMA, "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.kv_b_proj#0", "attn_v_b": "self_attn.kv_b_proj#1",
    **each("ssm_conv1d_{}", "self_attn.{}_conv1d", "q k v"), **each("ssm_{}_a", "self_attn.{}_a_proj", "f g"),
    **each("ssm_{}_b", "self_attn.{}_b_proj", "f g"), "ssm_beta": "self_attn.b_proj", "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias", "ssm_norm": "self_attn.o_norm", "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias", "ffn_gate_exps": "block_sparse_moe.experts.[].w1",
    "ffn_up_exps": "block_sparse_moe.experts.[].w3", "ffn_down_exps": "block_sparse_moe.experts.[].w2",
    **each("ffn_{}_shexp", "block_sparse_moe.shared_experts.{}_proj", "gate up down"),
}  # fmt: skip

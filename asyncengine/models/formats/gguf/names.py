"""What GGUF calls a tensor, and what transformers calls it: a table for each architecture.

Source: gguf-py's tensor_mapping.py for the one side, transformers' modules for the other. "{}" in a name stands for the
index of the first axis: such a tensor is several tensors there (experts, norms of single heads).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncengine.models.formats.gguf import gpt_oss

OUTER: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = "model.layers.{}."

LLAMA: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Of a layer: "blk.N." + the name on the left + ".weight" or ".bias"."""
HEAD_NORMS = {**LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
HUNYUAN = {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
SANDWICH = {
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma 2 and 3."""
AFTER = {
    **{name: there for name, there in HEAD_NORMS.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""OLMo 2, EXAONE 4: norms of what a branch gives."""
APERTUS = {**HEAD_NORMS, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
XIELU: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
    "xielu.eps": ("mlp.act_fn.eps", ()),
}
"""Values of a header, one for each layer, that are tensors in transformers: (name in a layer, shape)."""
SEED = {**LLAMA, "post_attention_norm": "post_attention_layernorm"}
PHI = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GLM = {
    **LLAMA,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
STARCODER = {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
STABLELM = {
    **LLAMA,
    "attn_q_norm": "self_attn.q_layernorm.norms.{}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{}",
}
MIXTRAL = {
    **LLAMA,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
QWEN_MOE = {
    **HEAD_NORMS,
    **_EXPERTS,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GPT_OSS = {
    **{name: there for name, there in LLAMA.items() if name != "ffn_norm"},
    "ffn_gate_exps": gpt_oss.GATE,
    "ffn_up_exps": gpt_oss.UP,
    "ffn_down_exps": gpt_oss.DOWN,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
OLLAMA_GPT_OSS = {
    **GPT_OSS,
    "attn_out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_up_exps": gpt_oss.GATE_UP,
}
"""As Ollama's own converter calls it: rows of gate and up taking turns in one tensor at first, apart since."""
WITHOUT_SUFFIX = (
    "self_attn.sinks", "feed_forward.expert_bias", "mixer.gate.e_score_correction_bias",
    "block_sparse_moe.gate.e_score_correction_bias",
    *(f"{layer}.{name}" for layer in ("linear_attn", "mamba", "mixer", "self_attn") for name in ("dt_bias", "A_log")),
    "mamba.D", "mixer.D",
)  # fmt: skip
"""Parameters of a module itself: transformers adds no ".weight"; files have it, or ".bias", or nothing."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
"""One tensor where others have several, one below the other: of Ollama's first gpt-oss, and of llama.cpp's converter if
it is told so (`--fuse-qkv`, `--fuse-gate-up-exps`)."""

IGNORED = (
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight|(v|mm|mtp)\..*"
)
"""Tensors that became part of the configuration, and parts that Ollama keeps in the same file: of images, and what
predicts further tokens."""
FUSED_STATES = {**FUSED, "ssm_in": ("attn_qkv", "attn_gate"), "ssm_ba": ("ssm_beta", "ssm_alpha")}
"""Of Qwen3-Next: rows go key head by key head, so that a part's lie among the other's."""


class TensorName(NamedTuple):
    """A tensor's name in a file, taken apart."""

    layer: int | None
    """None: of no layer."""
    stem: str
    suffix: str
    """"weight" or "bias"; empty where the name has neither."""

    @property
    def whole(self) -> str:
        """As the file has it."""
        before = "" if self.layer is None else f"blk.{self.layer}."
        return f"{before}{self.stem}{self.suffix and '.'}{self.suffix}"


def split_name(name: str) -> TensorName | None:
    """None: no name of a tensor that converters give."""
    stem, dot, suffix = name.rpartition(".")
    if not dot or suffix not in ("weight", "bias"):
        stem, suffix = name, ""
    if not stem.startswith("blk."):
        return TensorName(None, stem, suffix)
    number, _, inner = stem.removeprefix("blk.").partition(".")
    if not (number.isascii() and number.isdecimal() and len(number) < 6 and str(int(number)) == number):
        return None
    return TensorName(int(number), inner, suffix)


def hugging_face_name(
    name: TensorName, layer: Mapping[str, str], outer: Mapping[str, str] = OUTER, prefix: str = LAYER
) -> str | None:
    """The name in a checkpoint of transformers, with "{}" where a tensor is several; None: unknown."""
    there = (outer if name.layer is None else layer).get(name.stem)
    if there is None:
        return None
    before = "" if name.layer is None else prefix.format(name.layer)
    if there in WITHOUT_SUFFIX:
        return before + there
    suffix = name.suffix or ("weight" if name.stem.endswith("_norm") else "")  # Falcon-H1's have none
    return f"{before}{there}.{suffix}" if suffix else None

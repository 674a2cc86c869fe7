"""llama.cpp's architectures with layers that keep a state beside attention: Qwen3-Next, Qwen 3.5, LFM2.

Source: llama.cpp's conversion/qwen.py and lfm2.py (what was done), src/models/qwen35.cpp, qwen3next.cpp and lfm2.cpp
(what a header leaves to the reader). Those with Mamba-2 and Kimi's are apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncengine.errors import ModelNotFound
from asyncengine.models.formats.gguf import names
from asyncengine.models.formats.gguf.architecture import Architecture, Fields
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.names import TensorName
from asyncengine.models.formats.gguf.undo import Undo, grouped_heads, taking_turns
from asyncengine.models.sizes import MAX_LAYERS

_STATE: Mapping[str, str] = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
_QWEN = {**{name: there for name, there in names.HEAD_NORMS.items() if name != "ffn_norm"}, **_STATE}
_QWEN_MOE = {**{name: there for name, there in names.QWEN_MOE.items() if name != "ffn_norm"}, **_STATE}
_LFM = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM_MOE = {
    **_LFM,
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
_LFM_OUTER = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_LFM_OUTER["output_norm"] = "model.embedding_norm"  # Ollama's converter calls it so
_MOST = 2**20
"""Numbers of all heads."""
_PERIOD = 4
"""Layers of Qwen3.5 from one with attention to the next, where a header does not say it."""


def _qwen_layers(header: Header) -> list[str]:
    recurrent = header.of_layers("attention.recurrent_layers")
    heads = header.of_layers("attention.head_count_kv")
    if not recurrent and 0 in heads:  # Ollama's converter says it so
        recurrent = [not each for each in heads]
    period = max(header.whole("full_attention_interval", _PERIOD), 1)
    marks = recurrent or [(index + 1) % period != 0 for index in range(min(header.layers, MAX_LAYERS))]
    return ["linear_attention" if each else "full_attention" for each in marks]


def _qwen35(header: Header) -> Fields:
    keys, values = header.whole("ssm.group_count"), header.whole("ssm.time_step_rank")
    inner = header.whole("ssm.inner_size")
    size = header.whole("ssm.state_size")
    if not keys or not values or values % keys or inner % values or max(inner, keys * size) > _MOST:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.ssm has {values} heads of values in {inner} numbers, {keys} "
            f"of keys of {size}"
        )
    return {
        "layer_types": _qwen_layers(header),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": header.whole("ssm.conv_kernel"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }


def _qwen35moe(header: Header) -> Fields:
    return {
        **_qwen35(header),
        "num_experts": header.whole("expert_count"),
        "num_experts_per_tok": header.whole("expert_used_count"),
        "moe_intermediate_size": header.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": header.whole("expert_shared_feed_forward_length", 0),
    }


def _undo_qwen35(header: Header, name: TensorName) -> Undo | None:
    """Heads of values are in another order where several belong to a head of keys."""
    keys, values = header.whole("ssm.group_count"), header.whole("ssm.time_step_rank")
    size = header.whole("ssm.inner_size") // max(values, 1)
    before = 2 * keys * header.whole("ssm.state_size")
    moved = keys != values
    match name.stem:
        case "attn_qkv":
            return Undo(grouped_heads(keys, values, size, before)) if moved else None
        case "attn_gate":
            return Undo(grouped_heads(keys, values, size)) if moved else None
        case "ssm_alpha" | "ssm_beta" | "ssm_dt":
            return Undo(grouped_heads(keys, values, 1)) if moved else None
        case "ssm_a":
            return Undo(grouped_heads(keys, values, 1) if moved else None, decay=True)
        case "ssm_conv1d":
            return Undo(grouped_heads(keys, values, size, before) if moved else None, shape="taps")
        case "ssm_out":
            return Undo(columns=np.argsort(grouped_heads(keys, values, size))) if moved else None
    return None


def _undo_qwen3next(header: Header, name: TensorName) -> Undo | None:
    """Heads lie as transformers has them; of what goes key head by key head there, older files have all in one tensor,
    and all files b and a."""
    keys, values = header.whole("ssm.group_count"), header.whole("ssm.time_step_rank")
    each, size = values // max(keys, 1), header.whole("ssm.inner_size") // max(values, 1)
    match name.stem:
        case "ssm_a":
            return Undo(decay=True)
        case "ssm_conv1d":
            return Undo(shape="taps")
        case "ssm_beta" | "ssm_alpha":
            part = 0 if name.stem == "ssm_beta" else 1
            return Undo(taking_turns(keys, [each, each], [part]), among=2 * values)
        case "attn_qkv" | "attn_gate" if header.has(f"blk.{name.layer}.ssm_in.weight"):
            sizes = [header.whole("ssm.state_size")] * 2 + [each * size] * 2
            wanted = [0, 1, 2] if name.stem == "attn_qkv" else [3]
            return Undo(taking_turns(keys, sizes, wanted), among=keys * sum(sizes))
    return None


def _lfm(header: Header) -> Fields:
    heads = header.of_layers("attention.head_count_kv")
    if not heads:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.attention.head_count_kv must say which layers attend"
        )
    return {
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": header.whole("shortconv.l_cache"),
        "conv_bias": header.has("blk.0.shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "intermediate_size": _width(header),
    }


def _width(header: Header) -> int:
    """The tensor's: there are files of Ollama's whose header has another."""
    gate = header.tensors.get("blk.0.ffn_gate.weight")
    return header.whole("feed_forward_length") if gate is None else gate.shape[0]


def _lfm_moe(header: Header) -> Fields:
    return {
        **_lfm(header),
        "num_experts": header.whole("expert_count"),
        "num_experts_per_tok": header.whole("expert_used_count"),
        "moe_intermediate_size": header.whole("expert_feed_forward_length"),
        "num_dense_layers": header.whole("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in header.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": header.real("expert_weights_scale", 1.0),
    }


def _undo_lfm(header: Header, name: TensorName) -> Undo | None:
    return Undo(shape="taps") if (name.stem, name.suffix) == ("shortconv.conv", "weight") else None


HYBRIDS: Mapping[str, Architecture] = {
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", _QWEN, norm_offset=1.0, partial=True, hybrid=True, undo=_undo_qwen35,
        more=_qwen35,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN_MOE, norm_offset=1.0, partial=True, hybrid=True,
        undo=_undo_qwen35, more=_qwen35moe,
    ),
    # what Qwen 3.5 is as well, but for the order of rows in transformers' checkpoints
    "qwen3next": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN_MOE, fused=names.FUSED_STATES, norm_offset=1.0,
        partial=True, hybrid=True, undo=_undo_qwen3next, more=_qwen35moe,
    ),
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", _LFM, "norm_eps", outer=_LFM_OUTER, hybrid=True, undo=_undo_lfm, more=_lfm
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", "Lfm2MoeForCausalLM", _LFM_MOE, "norm_eps", outer=_LFM_OUTER, hybrid=True, undo=_undo_lfm,
        more=_lfm_moe,
    ),
}  # fmt: skip
"""By `general.architecture`."""

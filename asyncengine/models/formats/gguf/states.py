"""llama.cpp's architectures whose layers keep a state: Qwen3-Next and 3.5, LFM2, Granite 4, Falcon-H1, Mamba-2,
Nemotron-H and Nemotron 3, Kimi Linear.

Sources: llama.cpp's conversion/{qwen,lfm2,mamba,granite,falcon_h1,nemotron,kimi_linear}.py for what a converter does,
the files of the same names in src/models for what a header leaves to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncengine.errors import ModelNotFound
from asyncengine.models.formats.gguf.architecture import (
    FUSED,
    GRANITE_KEYS,
    HEAD_NORMS,
    LLAMA,
    OUTER,
    QWEN_MOE,
    Architecture,
    Moved,
    Order,
    TensorName,
    each,
    halves,
)
from asyncengine.models.formats.gguf.header import MAX_STATES, Header, StateSizes
from asyncengine.models.sizes import MAX_LAYERS

Fields = Mapping[str, Any]
_QWEN_PERIOD = 4
"""Layers of Qwen 3.5 from one with attention to the next, where a header does not say it."""


def _qwen(header: Header) -> Fields:
    recurrent = header.of_layers("attention.recurrent_layers")
    heads = header.of_layers("attention.head_count_kv")
    if not recurrent and 0 in heads:  # Ollama's converter says it so
        recurrent = [not each for each in heads]
    period = max(header.whole("full_attention_interval", _QWEN_PERIOD), 1)
    marks = recurrent or [(index + 1) % period != 0 for index in range(min(header.layers, MAX_LAYERS))]
    return {"layer_types": ["linear_attention" if each else "full_attention" for each in marks]}


def _grouped_heads(state: StateSizes, size: int, before: int = 0) -> Order:
    """llama.cpp has heads of values in turns of the heads of keys that they belong to, transformers has those of one
    head of keys beside each other: the order of `before` rows that stay, and `size` rows of each head."""
    each = state.heads // state.groups
    head = np.arange(state.heads, dtype=np.int64)
    places = (head % each) * state.groups + head // each
    moved = (places[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)
    return np.concatenate([np.arange(before, dtype=np.int64), before + moved])


def _qwen35_moved(header: Header, name: TensorName, rows: int) -> Moved | None:
    state = header.state_sizes()
    if state.heads == state.groups:
        return None
    match name.stem:
        case "attn_qkv" | "ssm_conv1d":
            return Moved(_grouped_heads(state, state.head_dim, 2 * state.groups * state.size))
        case "attn_gate":
            return Moved(_grouped_heads(state, state.head_dim))
        case "ssm_alpha" | "ssm_beta" | "ssm_dt" | "ssm_a":
            return Moved(_grouped_heads(state, 1))
        case "ssm_out":
            return Moved(columns=np.argsort(_grouped_heads(state, state.head_dim)))
    return None


def _of_each_group(groups: int, sizes: Sequence[int], wanted: Sequence[int]) -> Moved:
    """Rows go group by group, in each part by part of so many rows (`sizes`): those of the parts `wanted`, of each the
    rows of all groups."""
    begins = np.cumsum([0, *sizes])
    groups_at = np.arange(groups, dtype=np.int64)[:, None] * begins[-1]
    parts = [(groups_at + begins[part] + np.arange(sizes[part])).reshape(-1) for part in wanted]
    return Moved(np.concatenate(parts), int(groups * begins[-1]))


def _qwen3next_moved(header: Header, name: TensorName, rows: int) -> Moved | None:
    """The order of tensors that go key head by key head in a file: b and a, in older files all the others as well."""
    state = header.state_sizes()
    each = state.heads // state.groups
    match name.stem:
        case "ssm_beta" | "ssm_alpha":
            return _of_each_group(state.groups, [each, each], [0 if name.stem == "ssm_beta" else 1])
        case "attn_qkv" | "attn_gate" if f"blk.{name.layer}.ssm_in.weight" in header.tensors:
            sizes = [state.size] * 2 + [each * state.head_dim] * 2
            return _of_each_group(state.groups, sizes, [0, 1, 2] if name.stem == "attn_qkv" else [3])
    return None


def _lfm(header: Header) -> Fields:
    gate = header.tensors.get("blk.0.ffn_gate.weight")
    return {
        "layer_types": ["full_attention" if each else "conv" for each in header.attending()],
        # there are files of Ollama's whose header has another width than the tensor
        "intermediate_size": header.whole("feed_forward_length") if gate is None else gate.shape[0],
    }


def _nemotron(header: Header) -> Fields:
    def kind(layer: int, heads: int) -> str:
        if heads:
            return "full_attention"
        if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors:
            return "moe"
        return "mlp" if f"blk.{layer}.ffn_up.weight" in header.tensors else "linear_attention"

    return {"layers_block_type": [kind(*each) for each in enumerate(header.attending())]}


def _kimi(header: Header) -> Fields:
    heads, dense = header.attending(), header.whole("leading_dense_block_count", 0)
    count, dim = header.whole("attention.head_count"), header.whole("kda.head_dim")
    shared = header.whole("rope.dimension_count")
    key, value = header.whole("attention.key_length_mla"), header.whole("attention.value_length_mla")
    if key <= shared or not value or not dim or count * max(key, value, dim) > MAX_STATES:
        raise ModelNotFound(
            f"{header.path}: {header.architecture} has {count} heads with keys of {key}, values of {value} and "
            f"states of {dim} numbers, of which {shared} of a key are shared"
        )
    return {
        "mlp_layer_types": ["dense" if index < dense else "sparse" for index in range(len(heads))],
        "num_key_value_heads": count, "linear_num_heads": count, "linear_head_dim": dim,
        "qk_rope_head_dim": shared, "qk_nope_head_dim": key - shared, "v_head_dim": value,
    }  # fmt: skip


def _mamba_names(prefix: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm"}
    return {f"ssm_{name}": prefix + there for name, there in {**parts, "out": "out_proj"}.items()}


_QWEN_STATE = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_QWEN = {name: there for name, there in {**HEAD_NORMS, **_QWEN_STATE}.items() if name != "ffn_norm"}
_QWEN35_MOE = {name: there for name, there in {**QWEN_MOE, **_QWEN_STATE}.items() if name != "ffn_norm"}
_QWEN3_NEXT_FUSED = {**FUSED, "ssm_in": ("attn_qkv", "attn_gate"), "ssm_ba": ("ssm_beta", "ssm_alpha")}
_LFM = {
    "attn_norm": "operator_norm", **each("attn_{}", "self_attn.{}_proj", "q k v"), "attn_output": "self_attn.out_proj",
    **each("attn_{}_norm", "self_attn.{}_layernorm", "q k"), **each("shortconv.{}", "conv.{}", "conv in_proj out_proj"),
    "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
}  # fmt: skip
_LFM_MOE = {
    **_LFM, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.[].w1", "ffn_up_exps": "feed_forward.experts.[].w3",
    "ffn_down_exps": "feed_forward.experts.[].w2",
}  # fmt: skip
_LFM_OUTER = {
    "token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head",
    "output_norm": "model.embedding_norm",  # Ollama's converter calls it so
}  # fmt: skip
_GRANITE = {
    **LLAMA, **_mamba_names("mamba."), "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear#0", "ffn_up_exps": "block_sparse_moe.input_linear#1",
    "ffn_down_exps": "block_sparse_moe.output_linear#",
    **{f"ffn_gate{suffix}": "shared_mlp.input_linear#0" for suffix in ("", "_shexp")},
    **{f"ffn_up{suffix}": "shared_mlp.input_linear#1" for suffix in ("", "_shexp")},
    **{f"ffn_down{suffix}": "shared_mlp.output_linear" for suffix in ("", "_shexp")},
}  # fmt: skip
_FALCON = {
    **LLAMA, **_mamba_names("mamba."), "ffn_norm": "pre_ff_layernorm",
    **each("ffn_{}", "feed_forward.{}_proj", "gate up down"),
}  # fmt: skip
_MAMBA2 = {"attn_norm": "norm", **_mamba_names("mixer.")}
_NEMOTRON = {
    **_MAMBA2, **each("attn_{}", "mixer.{}_proj", "q k v"), "attn_output": "mixer.o_proj",
    **each("ffn_{}", "mixer.{}_proj", "up down"), **each("ffn_{}_exps", "mixer.experts.[].{}_proj", "up down"),
    **each("ffn_{}_shexp", "mixer.shared_experts.{}_proj", "up down"), "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias", "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_KIMI = {
    **LLAMA, "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.kv_b_proj#0", "attn_v_b": "self_attn.kv_b_proj#1",
    **each("ssm_conv1d_{}", "self_attn.{}_conv1d", "q k v"), **each("ssm_{}_a", "self_attn.{}_a_proj", "f g"),
    **each("ssm_{}_b", "self_attn.{}_b_proj", "f g"), "ssm_beta": "self_attn.b_proj", "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias", "ssm_norm": "self_attn.o_norm", "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias", "ffn_gate_exps": "block_sparse_moe.experts.[].w1",
    "ffn_up_exps": "block_sparse_moe.experts.[].w3", "ffn_down_exps": "block_sparse_moe.experts.[].w2",
    **each("ffn_{}_shexp", "block_sparse_moe.shared_experts.{}_proj", "gate up down"),
}  # fmt: skip

_EXPERTS = "num_experts num_experts_per_tok moe_intermediate_size"
_GROUPED_EXPERTS = "num_experts_per_tok moe_intermediate_size routed_scaling_factor n_group topk_group"
_QWEN_KEYS = "linear_conv_kernel_dim attention_bias"
_MAMBA_KEYS = "mamba_d_conv mamba_conv_bias mamba_proj_bias attention_bias"
_NEMOTRON_KEYS = "conv_kernel use_bias use_conv_bias mlp_bias"
_QWEN_SIZES = "linear_num_value_heads linear_value_head_dim linear_key_head_dim linear_num_key_heads"
_MAMBA_SIZES = "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups"
_NEMOTRON_SIZES = "mamba_num_heads mamba_head_dim ssm_state_size n_groups"

_QWEN35_MOE_ROW = Architecture(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN35_MOE,
    f"{_QWEN_KEYS} {_EXPERTS} shared_expert_intermediate_size", _qwen, partial=True, norm_offset=1.0,
    moved=_qwen35_moved, state=_QWEN_SIZES,
)  # fmt: skip
_NEMOTRON_ROW = Architecture(
    "nemotron_h", "NemotronHForCausalLM", _NEMOTRON, _NEMOTRON_KEYS, _nemotron, "layer_norm_epsilon", "unrotated",
    moved=halves, outer=_BACKBONE, prefix="backbone.layers.{}.", state=_NEMOTRON_SIZES,
)  # fmt: skip
STATES: Mapping[str, Architecture] = {
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", _QWEN, _QWEN_KEYS, _qwen, partial=True, norm_offset=1.0,
        moved=_qwen35_moved, state=_QWEN_SIZES,
    ),
    "qwen35moe": _QWEN35_MOE_ROW,
    # but for the order of rows in transformers' checkpoints, Qwen3-Next is Qwen 3.5
    "qwen3next": replace(_QWEN35_MOE_ROW, moved=_qwen3next_moved, fused=_QWEN3_NEXT_FUSED),
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", _LFM, "conv_L_cache conv_bias block_auto_adjust_ff_dim=False", _lfm, "norm_eps",
        outer=_LFM_OUTER,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", "Lfm2MoeForCausalLM", _LFM_MOE,
        f"conv_L_cache conv_bias {_EXPERTS} num_dense_layers use_expert_bias routed_scaling_factor norm_topk_prob=True",
        _lfm, "norm_eps", outer=_LFM_OUTER,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", _GRANITE,
        f"{_MAMBA_KEYS} {GRANITE_KEYS} layer_types mamba_expand num_local_experts num_experts_per_tok "
        "shared_intermediate_size position_embedding_type",
        moved=halves, state=_MAMBA_SIZES,
    ),
    # Falcon-H1's converter multiplies the tensors by all of the family's factors
    "falcon-h1": Architecture(
        "falcon_h1", "FalconH1ForCausalLM", _FALCON,
        f"{_MAMBA_KEYS} mlp_bias projectors_bias mamba_d_ssm mamba_rms_norm mamba_norm_before_gate=False",
        outer={**OUTER, "output_norm": "model.final_layernorm"}, state=_MAMBA_SIZES,
    ),
    "mamba2": Architecture(
        "mamba2", "Mamba2ForCausalLM", _MAMBA2, "conv_kernel use_bias use_conv_bias expand", norm="layer_norm_epsilon",
        attention="none", outer=_BACKBONE, prefix="backbone.layers.{}.", state="num_heads head_dim state_size n_groups",
    ),
    "nemotron_h": _NEMOTRON_ROW,
    "nemotron_h_moe": replace(
        _NEMOTRON_ROW,
        keys=f"{_NEMOTRON_KEYS} {_GROUPED_EXPERTS} n_routed_experts moe_shared_expert_intermediate_size "
        "moe_latent_size norm_topk_prob",
    ),
    "kimi-linear": Architecture(
        "kimi_linear", "KimiLinearForCausalLM", _KIMI,
        f"{_GROUPED_EXPERTS} layer_types linear_conv_kernel_dim kv_lora_rank num_local_experts n_shared_experts "
        "norm_topk_prob=True",
        _kimi, attention="latent", decay_shape=(1, 1, -1, 1), join="latent",
    ),
}  # fmt: skip
"""Rows by `general.architecture`."""

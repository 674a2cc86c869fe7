"""llama.cpp's architectures with Mamba-2: alone, and beside attention (Granite 4, Falcon-H1, Nemotron-H, Nemotron 3).

Source: llama.cpp's conversion/mamba.py, granite.py, falcon_h1.py and nemotron.py (what was done); mamba2.cpp,
mamba-base.cpp, granite-hybrid.cpp, falcon-h1.cpp and nemotron-h.cpp of src/models (what a header leaves to the reader).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncengine.errors import ModelNotFound
from asyncengine.models.formats.gguf import names
from asyncengine.models.formats.gguf.architecture import Architecture, Fields
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.names import TensorName
from asyncengine.models.formats.gguf.undo import Undo

MOST_STATES = 2**20
"""Numbers of all heads."""


def _state_names(prefix: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm"}
    return {f"ssm_{name}": prefix + there for name, there in {**parts, "out": "out_proj"}.items()}


_GRANITE = {
    **names.LLAMA,
    **_state_names("mamba."),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.gate_linear",
    "ffn_up_exps": "block_sparse_moe.up_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    **{f"ffn_gate{suffix}": "shared_mlp.gate_linear" for suffix in ("", "_shexp")},
    **{f"ffn_up{suffix}": "shared_mlp.up_linear" for suffix in ("", "_shexp")},
    **{f"ffn_down{suffix}": "shared_mlp.output_linear" for suffix in ("", "_shexp")},
}
"""`joins` puts gates and what they multiply together, as transformers has them."""
_FALCON = {
    **names.LLAMA,
    **_state_names("mamba."),
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
_FALCON_OUTER = {**names.OUTER, "output_norm": "model.final_layernorm"}
_PURE = {"attn_norm": "norm", **_state_names("mixer.")}
_PURE_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_PURE_LAYER = "backbone.layers.{}."
_NEMOTRON = {
    **_PURE,
    **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


class _State(NamedTuple):
    """Sizes of the states."""

    heads: int
    head_dim: int
    size: int
    groups: int
    taps: int


def _state(header: Header) -> _State:
    heads, inner = header.whole("ssm.time_step_rank"), header.whole("ssm.inner_size")
    size, groups = header.whole("ssm.state_size"), header.whole("ssm.group_count")
    if not heads or not groups or inner % heads or heads % groups or max(inner, groups * size) > MOST_STATES:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.ssm has states of {heads} heads in {inner} numbers, and {groups} "
            f"groups of {size}"
        )
    return _State(heads, inner // heads, size, groups, header.whole("ssm.conv_kernel"))


def _prefixed(header: Header, state: _State) -> Fields:
    """As the families say it whose options are called mamba_..."""
    return {
        "mamba_n_heads": state.heads,
        "mamba_d_head": state.head_dim,
        "mamba_d_state": state.size,
        "mamba_n_groups": state.groups,
        "mamba_d_conv": state.taps,
        "mamba_conv_bias": header.any_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": header.any_layer("ssm_in.bias"),
    }


def _plain(header: Header, state: _State) -> Fields:
    return {
        "n_groups": state.groups,
        "conv_kernel": state.taps,
        "use_bias": header.any_layer("ssm_in.bias"),
        "use_conv_bias": header.any_layer("ssm_conv1d.bias"),
    }


def _attending(header: Header) -> list[int]:
    """For each layer, its heads of keys."""
    found = header.of_layers("attention.head_count_kv")
    if not found:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.attention.head_count_kv must say which layers attend"
        )
    return found


def _granite(header: Header) -> Fields:
    state = _state(header)
    gate = next(
        (header.tensors[n] for n in ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate.weight") if header.has(n)), None
    )
    rotates = header.flag("rope.scaling.finetuned", True)  # llama.cpp's switch for this family
    return {
        **_prefixed(header, state),
        "layer_types": ["full_attention" if each else "linear_attention" for each in _attending(header)],
        "mamba_expand": state.heads * state.head_dim // max(header.whole("embedding_length"), 1),
        "num_local_experts": header.whole("expert_count", 0),
        "num_experts_per_tok": header.whole("expert_used_count", 0),
        "shared_intermediate_size": 0 if gate is None else gate.shape[0],
        "position_embedding_type": "rope" if rotates else None,
        "attention_bias": header.any_layer("attn_q.bias"),
        "attention_multiplier": header.real("attention.scale"),
        "embedding_multiplier": header.real("embedding_scale"),
        "residual_multiplier": header.real("residual_scale"),
        "logits_scaling": header.real("logit_scale"),
    }


def _falcon(header: Header) -> Fields:
    """All of this family's factors are in the tensors; the norm, if there is one, comes after the gate."""
    state = _state(header)
    return {
        **_prefixed(header, state),
        "mamba_d_ssm": state.heads * state.head_dim,
        "mamba_rms_norm": header.any_layer("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": header.any_layer("attn_q.bias"),
        "projectors_bias": header.any_layer("ssm_out.bias"),
        "mlp_bias": header.any_layer("ffn_up.bias"),
    }


def _pure(header: Header) -> Fields:
    state, width = _state(header), header.whole("embedding_length")
    if not width or state.heads * state.head_dim % width:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.ssm.inner_size must be a multiple of .embedding_length"
        )
    return {
        **_plain(header, state),
        "num_heads": state.heads,
        "head_dim": state.head_dim,
        "state_size": state.size,
        "expand": state.heads * state.head_dim // width,
    }


def _nemotron(header: Header) -> Fields:
    """Its norms' epsilon may have either name; dt is bounded as the family's configuration does."""
    state = _state(header)
    epsilon = header.real("attention.layer_norm_epsilon", 0.0)
    return {
        **_plain(header, state),
        "layers_block_type": [_kind(header, *each) for each in enumerate(_attending(header))],
        "layer_norm_epsilon": header.real("attention.layer_norm_rms_epsilon", epsilon),
        "mamba_num_heads": state.heads,
        "mamba_head_dim": state.head_dim,
        "ssm_state_size": state.size,
        "mlp_bias": header.any_layer("ffn_up.bias"),
        **(_experts(header) if header.any_layer("ffn_gate_inp.weight") else {}),
    }


def _kind(header: Header, layer: int, heads: int) -> str:
    if heads:
        return "full_attention"
    if header.has(f"blk.{layer}.ffn_gate_inp.weight"):
        return "moe"
    return "mlp" if header.has(f"blk.{layer}.ffn_up.weight") else "linear_attention"


def _experts(header: Header) -> Fields:
    return {
        "n_routed_experts": header.whole("expert_count"),
        "num_experts_per_tok": header.whole("expert_used_count"),
        "moe_intermediate_size": header.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": header.whole("expert_shared_feed_forward_length"),
        "moe_latent_size": header.whole("moe_latent_size", 0) or None,
        "routed_scaling_factor": header.real("expert_weights_scale", 1.0),
        "norm_topk_prob": header.flag("expert_weights_norm", True),
        "n_group": header.whole("expert_group_count", 1),
        "topk_group": header.whole("expert_group_used_count", 1),
    }


def _undo(header: Header, name: TensorName) -> Undo | None:
    match name.stem, name.suffix:
        case "ssm_conv1d", "weight":
            return Undo(shape="taps")
        case "ssm_a", _:
            return Undo(decay=True, shape="flat")
        case (("ssm_d" | "ssm_norm"), _):
            return Undo(shape="flat")
    return None


_NEMOTRON_H = Architecture(
    "nemotron_h", "NemotronHForCausalLM", _NEMOTRON, norm="", paired=True, outer=_PURE_OUTER, prefix=_PURE_LAYER,
    hybrid=True, attention="unrotated", undo=_undo, more=_nemotron,
)  # fmt: skip
MAMBA: Mapping[str, Architecture] = {
    "granitehybrid": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", _GRANITE, paired=True, hybrid=True, undo=_undo,
        more=_granite,
    ),
    "falcon-h1": Architecture(
        "falcon_h1", "FalconH1ForCausalLM", _FALCON, outer=_FALCON_OUTER, undo=_undo, more=_falcon
    ),
    "mamba2": Architecture(
        "mamba2", "Mamba2ForCausalLM", _PURE, "layer_norm_epsilon", outer=_PURE_OUTER, prefix=_PURE_LAYER,
        attention="none", undo=_undo, more=_pure,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}  # fmt: skip
"""By `general.architecture`."""

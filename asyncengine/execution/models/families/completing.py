"""Fields of config.json that transformers' configuration classes derive from others, by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.families.common import ATTENTION

_STATES = ("linear_attention", "full_attention")
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Layer types of Nemotron-H by their letters."""


def complete(config: ModelConfig, table: Mapping[str, Any]) -> None:
    """Set the fields that the family derives from others. `table`: the family's table in decoders.toml."""
    for name, other in table.get("same", {}).items():
        setattr(config, name, config.get(name, getattr(config, other)))
    if (rule := table.get("alternate")) is not None:
        _alternate(config, config.get(rule.get("field", ""), rule["every"]), rule.get("kind", "sliding_attention"))
    if (finish := _COMPLETE.get(config.model_type)) is not None:
        finish(config)


def _alternate(config: Any, every: int, layer_type: str = "sliding_attention") -> None:
    """Set layer types that config.json does not list: one layer in `every` has full attention, others `layer_type`."""
    if config.layer_types is None:
        layers = range(config.num_hidden_layers)
        config.layer_types = [layer_type if (layer + 1) % every else "full_attention" for layer in layers]


def _slide_from(config: Any) -> None:
    """Set layer types that config.json does not list: sliding windows from layer `max_window_layers` on, if any."""
    if config.layer_types is None:
        first = config.num_hidden_layers if config.sliding_window is None else config.max_window_layers
        config.layer_types = [ATTENTION[layer >= first] for layer in range(config.num_hidden_layers)]


def _qwen(config: ModelConfig) -> None:
    config.sliding_window = config.sliding_window if config.get("use_sliding_window") else None
    _slide_from(config)


def _qwen2_moe(config: ModelConfig) -> None:
    slides = config.get("use_sliding_window")
    if not slides:
        config.sliding_window = 0
    if config.layer_types is None:
        first = config.get("max_window_layers", 28) if slides else 0
        config.layer_types = [ATTENTION[layer < first and not layer % 2] for layer in range(config.num_hidden_layers)]


def _qwen3_moe(config: ModelConfig) -> None:
    if config.model_type == "qwen3_vl_moe_text" or not config.get("use_sliding_window"):
        config.sliding_window = None


def _unrotated(config: ModelConfig) -> None:
    """Set which layers of SmolLM 3 and Llama 4 have rotary embeddings, and the layer types that follow from it."""
    layers, every = range(config.num_hidden_layers), config.get("no_rope_layer_interval", 4)
    default = [int((layer + 1) % every != 0) for layer in layers]
    if config.model_type == "smollm3":
        config.no_rope_layers = config.get("no_rope_layers", default)
        slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
        types = [ATTENTION[bool(slides and not rotates)] for rotates in config.no_rope_layers]
    else:
        step = config.get("interleave_moe_layer_step", 1)
        config.no_rope_layers = config.get("no_rope_layers") or default
        config.moe_layers = config.get("moe_layers", list(range(step - 1, len(layers), step)))
        chunks = config.attention_chunk_size is not None
        types = ["chunked_attention" if rotates and chunks else "full_attention" for rotates in config.no_rope_layers]
    config.layer_types = types if config.layer_types is None else config.layer_types


def _gemma(config: ModelConfig) -> None:
    if config.hidden_act == "gelu":
        config.hidden_act = "gelu_pytorch_tanh"  # older files say so and mean this


def _gemma4(config: ModelConfig) -> None:
    """Set `per_layer_config`: layers with full attention, of which the last is always one, have heads of another size
    than those with windows."""
    config.layer_types = [*config.layer_types[:-1], "full_attention"]
    default = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    groups = config.get("num_global_key_value_heads") if config.attention_k_eq_v else None
    full = default | {"head_dim": config.get("global_head_dim", 512)}
    full |= {"num_key_value_heads": groups} if groups else {}
    special = {index: full for index, layer_type in enumerate(config.layer_types) if layer_type == "full_attention"}
    overrides = {int(index): fields for index, fields in config.get("per_layer_config", special).items()}
    layers = [ModelConfig(**default | overrides.get(index, {})) for index in range(config.num_hidden_layers)]
    config.per_layer_config = dict(enumerate(layers)) | dict(zip(config.layer_types, layers, strict=True))


def _exaone(config: ModelConfig) -> None:
    _alternate(config, 0 if config.sliding_window is None else config.get("sliding_window_pattern", 4))


def _falcon(config: ModelConfig) -> None:
    config.hidden_size = config.get("n_embed") or config.hidden_size
    if config.model_type == "falcon":
        config.ffn_hidden_size = config.get("ffn_hidden_size", 4 * config.hidden_size)


def _gpt_neo(config: ModelConfig) -> None:
    spans = config.get("attention_types", [[["global", "local"], 12]])
    config.attention_layers = [layer_type for pattern, times in spans for _ in range(times) for layer_type in pattern]


def _minimax(config: ModelConfig) -> None:
    if config.get("rotary_dim") is not None:
        config.partial_rotary_factor = config.get("partial_rotary_factor", config.rotary_dim / config.head_dim)


def _ernie(config: ModelConfig) -> None:
    if config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1


def _latent(config: ModelConfig) -> None:
    config.head_dim = config.qk_rope_head_dim
    if config.model_type == "minicpm3" and config.v_head_dim is None:
        config.v_head_dim = config.hidden_size // config.num_attention_heads
    if config.model_type == "glm4_moe_lite" and config.mlp_layer_types is None:
        config.mlp_layer_types = ["dense", *["sparse"] * (config.num_hidden_layers - 1)]


def _kimi_linear(config: ModelConfig) -> None:
    """Read `linear_attn_config`, in which released checkpoints have the fields of layers with linear attention."""
    linear, layers = config.get("linear_attn_config", {}), range(config.num_hidden_layers)
    config.head_dim = config.qk_rope_head_dim
    renamed = {"head_dim": "head_dim", "num_heads": "num_heads", "conv_kernel_dim": "short_conv_kernel_size"}
    for name, other in renamed.items():
        if other in linear:
            setattr(config, f"linear_{name}", linear[other])
    if config.layer_types is None and {"full_attn_layers", "kda_layers"} <= linear.keys():
        types = dict.fromkeys(linear["kda_layers"], _STATES[0]) | dict.fromkeys(linear["full_attn_layers"], _STATES[1])
        config.layer_types = [types[layer + 1] for layer in layers]
    elif config.layer_types is None:
        config.layer_types = [_STATES[bool(layer and layer % 4 == 0)] for layer in layers]
    if config.get("mlp_layer_types") is None:
        dense = config.get("first_k_dense_replace", 1)
        config.mlp_layer_types = ["dense" if layer < dense else "sparse" for layer in layers]


def _lfm(config: ModelConfig) -> None:
    layers = range(config.num_hidden_layers)
    config.tie_word_embeddings = config.get("tie_embedding", config.tie_word_embeddings)
    if config.model_type == "lfm2":
        config.intermediate_size = config.get("block_ff_dim", config.intermediate_size)
        if not config.layer_types:
            attend = config.get("full_attn_idxs", layers)
            config.layer_types = ["full_attention" if layer in attend else "conv" for layer in layers]
    elif config.model_type == "lfm3":
        pattern = ["sliding_attention", "conv", "full_attention", "conv"]
        config.layer_types = config.layer_types or [pattern[layer % 4] if layer else "conv" for layer in layers]
        config.rope_parameters = config.rope_parameters or {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        }


def _mamba(config: ModelConfig) -> None:
    family, layers = config.model_type, range(config.num_hidden_layers)
    types = ["hybrid" if family == "falcon_h1" else _STATES[0] for _ in layers]
    if family == "granitemoehybrid":
        types = config.layer_types or types
    if family == "bamba":
        config.partial_rotary_factor = 0.5  # whatever the file says
        types = [_STATES[layer in (config.get("attn_layer_indices") or ())] for layer in layers]
    config.layer_types = types
    width = config.mamba_d_ssm if family == "falcon_h1" else None
    if family != "mamba2" and config.get("mamba_d_head", "auto") == "auto":
        config.mamba_d_head = (width or config.mamba_expand * config.hidden_size) // config.mamba_n_heads


def _nemotron_h(config: ModelConfig) -> None:
    if config.get("layers_block_type") is None:
        config.layers_block_type = [_LETTERS[letter] for letter in config.hybrid_override_pattern]
    config.layer_types = config.layers_block_type
    config.num_hidden_layers = len(config.layers_block_type)


def _olmo_hybrid(config: ModelConfig) -> None:
    if "full_attention" not in config.layer_types:
        config.layer_types[-1] = "full_attention"
    dim = config.get("linear_key_head_dim", int(0.75 * config.hidden_size / config.linear_num_key_heads))
    config.linear_key_head_dim, config.linear_value_head_dim = dim, config.get("linear_value_head_dim", 2 * dim)


_COMPLETE: Mapping[str, Callable[[ModelConfig], None]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"), _qwen),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), _qwen3_moe),
    **dict.fromkeys(("smollm3", "llama4_text"), _unrotated),
    **dict.fromkeys(("falcon", "bloom"), _falcon),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"), _latent),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _lfm),
    **dict.fromkeys(("mamba2", "bamba", "falcon_h1", "granitemoehybrid"), _mamba),
    "qwen2_moe": _qwen2_moe, "dots1": _slide_from, "ministral": _slide_from, "gemma": _gemma, "gemma4_text": _gemma4,
    "exaone4": _exaone, "gpt_neo": _gpt_neo, "minimax_m2": _minimax, "ernie4_5_moe": _ernie,
    "kimi_linear": _kimi_linear, "nemotron_h": _nemotron_h, "olmo_hybrid": _olmo_hybrid,
}  # fmt: skip

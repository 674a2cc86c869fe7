"""Sizes in config.json that no model has, refused before anything is built of them.

transformers builds whatever a configuration says: a million layers take minutes and all memory there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.errors import ModelNotFound

MAX_LAYERS = 4096
MAX_WIDTH = 2**20
"""Largest width of hidden states, heads and experts."""
MAX_INNER = 2**24
"""Largest inner width of a feed-forward layer."""
MAX_VOCABULARY = 2**24
MAX_POSITIONS = 2**27
LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), MAX_LAYERS),
    **dict.fromkeys(
        (
            "hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "num_attention_heads",
            "n_head", "n_heads", "num_key_value_heads", "num_kv_heads", "head_dim", "num_experts", "num_local_experts",
            "n_routed_experts", "kv_lora_rank", "q_lora_rank",
        ),
        MAX_WIDTH,
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "moe_intermediate_size"), MAX_INNER),
    "vocab_size": MAX_VOCABULARY,
    **dict.fromkeys(LENGTH_FIELDS, MAX_POSITIONS),
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LISTED = ("hybrid_override_pattern", "layers_block_type")
"""Fields that say how many layers there are by naming each."""
_NEVER_NONE = ("vocab_size", "hidden_size", "num_attention_heads")


def check_sizes(config: Mapping[str, Any], num_tensors: int | None) -> None:
    """Refuse impossible sizes, in the configuration and in those inside it. `num_tensors`: in the files, if there are.

    Raises `ModelNotFound` naming the field and its limit.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            # a model of several parts may have them in other files
            check_sizes(value, None)
        if name in _LISTED and isinstance(value, (str, list)) and not 1 <= len(value) <= MAX_LAYERS:
            raise ModelNotFound(f"config.json: {name} must name between 1 and {MAX_LAYERS} layers, got {len(value)}")
        limit = _LIMITS.get(name)
        if limit is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue  # a wrong type is found by the family's own configuration
        least = 1 if name in _LAYERS or name in _NEVER_NONE else value
        if not least <= value <= limit:
            raise ModelNotFound(
                f"config.json: {name} must be between {min(least, 1)} and {limit}, got {_digits(value)}"
            )
        if num_tensors is not None and name in _LAYERS and value > num_tensors:
            raise ModelNotFound(f"config.json: {name} is {value}, but the files hold only {num_tensors} tensors")


def check_elements(described: int, held: int) -> None:
    """Refuse files that cannot hold a good part of what config.json describes, before memory is taken for the rest."""
    if described > 4 * held:
        raise ModelNotFound(f"config.json describes a model of {described} weights, but the files hold only {held}")


def _digits(value: float) -> str:
    return str(value) if abs(value) < 1e20 else "far more"

"""Exact on-policy training: those public names of `asyncengine.integrations.trl` that need no trainer of TRL's."""

from asyncengine.integrations.trl import (
    ExactModel,
    TokenScores,
    active_adapter,
    checkpoint_name,
    make_exact,
    named_weights,
)  # fmt: skip

__all__ = ["ExactModel", "TokenScores", "active_adapter", "checkpoint_name", "make_exact", "named_weights"]

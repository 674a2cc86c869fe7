"""A padded batch of a trainer as the rows of one step: each sequence from its first token on, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncengine.device.pinned import Int64Array
from asyncengine.errors import InvalidParameter


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Sequences of a padded batch [B, S], one behind the other: T tokens in R rows. A row of padding alone has none."""

    ids: torch.Tensor
    """int64 [T]."""
    counts: Int64Array
    """[R] tokens of each, >= 1."""
    places: torch.Tensor
    """int64 [T]: where each token lies in the flattened batch."""
    rows: torch.Tensor
    """int64 [T]: the row of each token."""
    positions: torch.Tensor
    """int64 [T]: its position there."""

    def aligned(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[R, longest, ...] of values [T, ...]: all from the first column on, with zeros behind their ends. No token of
        a causal model sees what is there, so that it needs no mask."""
        shape = (len(self.counts), int(self.counts.max()), *values.shape[1:])
        return torch.zeros(shape, dtype=dtype or values.dtype).index_put(
            (self.rows, self.positions), values.to(dtype or values.dtype)
        )

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...] of values [R, longest, ...]."""
        return values[self.rows, self.positions]


def read_sequences(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocab: int, most: int) -> Sequences:
    """The sequences of int64 input_ids [B, S], whose tokens `attention_mask` [B, S] marks; None: there is no padding.

    Raises `InvalidParameter` for other shapes, an empty batch, an id that is not below `vocab`, a sequence of more than
    `most` tokens, and for a mask with a hole: tokens that are not side by side are no sequence.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InvalidParameter("input_ids", "must be integers [batch, length]", tuple(input_ids.shape))
    taken = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    if taken.shape != input_ids.shape:
        raise InvalidParameter("attention_mask", "must have the shape of input_ids", tuple(taken.shape))
    if bool(((taken[:, 1:] & ~taken[:, :-1]).sum(1) + taken[:, 0] > 1).any()):
        raise InvalidParameter("attention_mask", "must mark the tokens of each row side by side, without a hole")
    lengths = taken.sum(1)
    counts = lengths[lengths > 0].numpy().astype(np.int64)
    places = taken.flatten().nonzero()[:, 0]
    ids = input_ids.flatten()[places].to(torch.int64)
    if not counts.size or counts.max() > most:
        raise InvalidParameter("input_ids", f"must be sequences of 1 to {most} tokens", int(counts.max(initial=0)))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise InvalidParameter("input_ids", f"must be from 0 to {vocab - 1}", (int(ids.min()), int(ids.max())))
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Sequences(ids, counts, places, torch.from_numpy(rows), torch.from_numpy(positions))

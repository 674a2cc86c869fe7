"""Masks on logits: rows in parts, and all that is sent without waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncengine.execution.sampling import masks
from asyncengine.execution.sampling.masks import FilledMasks, apply_masks

VOCAB = 75


def random_masks(places: list[int], seed: int = 0) -> tuple[FilledMasks, torch.Tensor]:
    """Some masks, and what they allow: bool [len(places), VOCAB]."""
    allowed = torch.rand(len(places), VOCAB, generator=torch.Generator().manual_seed(seed)) < 0.3
    words = torch.zeros(len(places), -(-VOCAB // 32), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << (token % 32)
    packed = torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))
    return FilledMasks(places, packed, {}, []), allowed


@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4], [1, 2, 4]])
def test_rows_in_parts(places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    filled, allowed = random_masks(places)
    expected = logits.clone()
    expected[places] = expected[places].masked_fill(~allowed, float("-inf"))
    for most in (1, 2 * VOCAB, 2**24):
        monkeypatch.setattr(masks, "_PART_ELEMENTS", most)
        found = logits.clone()
        apply_masks(found, filled)
        assert torch.equal(found, expected)

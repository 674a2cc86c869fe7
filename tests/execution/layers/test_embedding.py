"""Rows of a table of embeddings, and ids that it does not have."""

from __future__ import annotations

import pytest
import torch
from support.layer_options import fill, options

from asyncengine.execution.layers.basic import Embedding

TOKENS, WIDTH = 96, 64


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_rows_of_the_table(scale: float) -> None:
    """Times the scale, which is rounded to the type first, as families do."""
    layer, table = Embedding(options(torch.bfloat16), "embed", TOKENS, WIDTH, scale), torch.randn(TOKENS, WIDTH)
    fill(layer, {"embed.weight": table.bfloat16()})
    ids = torch.tensor([7, 7, 0, 95])
    assert torch.equal(layer(ids), table.bfloat16()[ids] * torch.tensor(scale).bfloat16())
    for wrong in (TOKENS, -1):
        with pytest.raises(IndexError, match=r"token ids must be in 0 \.\. 95"):
            layer(torch.tensor([3, wrong]))

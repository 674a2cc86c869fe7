"""Products of each head with its own matrix: near float64, and to the bit those of a row alone by any team."""

from __future__ import annotations

import pytest
import torch
from support.layer_options import options
from support.teams import team_of

from asyncengine.execution.layers.latent_attention import HeadProducts
from asyncengine.execution.layers.weight_forms import PackedWeight

SHAPES = [(5, 24, 16, 8), (3, 64, 32, 0), (16, 512, 128, 64), (2, 12, 512, 0)]
"""Heads, outputs (that fill panels and that do not), inputs, and numbers behind these."""
ERROR = {torch.float32: 1e-6, torch.bfloat16: 5e-3}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs", "behind"), SHAPES)
def test_near_float64_and_alike_alone(heads: int, outputs: int, inputs: int, behind: int, dtype: torch.dtype) -> None:
    """300 rows are computed in two parts; their heads lie in a wider matrix, as those of a merged projection."""
    products = HeadProducts(options(dtype), heads, outputs, inputs)
    assert isinstance(products.weight, PackedWeight)
    matrices = (draw(heads, outputs, inputs) * inputs**-0.5).to(dtype)
    for head, matrix in enumerate(matrices):
        products.load(head, matrix.T.contiguous().T)
    wide = draw(300, heads * (inputs + behind) + 6).to(dtype)
    x = wide[:, :-6].unflatten(1, (heads, -1))
    for threads in (1, 3):
        with team_of(threads):
            found = products(x)
            alone = [products(x[row : row + 1]) for row in (0, 7, 256, 299)]
        assert torch.equal(found[..., :behind], x[..., inputs:])
        wanted = torch.einsum("thi,hoi->tho", x[..., :inputs].double(), matrices.double())
        error = (found[..., behind:].double() - wanted).abs().max() / wanted.abs().max()
        assert float(error) < ERROR[dtype]
        assert torch.equal(torch.cat(alone), found[[0, 7, 256, 299]])
        assert torch.equal(products(x[:13]), found[:13])


def test_by_torch() -> None:
    """float16 has no kernel."""
    products = HeadProducts(options(torch.float16), 2, 12, 16)
    for head in range(2):
        products.load(head, draw(12, 16).half() * (head + 1))
    x = draw(3, 2, 20).half()
    found = products(x)
    assert torch.equal(found[..., :4], x[..., 16:])
    wanted = x[:, 1, :16].float() @ (2 * draw(12, 16).half()).float().T
    torch.testing.assert_close(found[:, 1, 4:].float(), wanted, rtol=2e-2, atol=2e-2)

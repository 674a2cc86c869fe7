"""Embedding and output layer, apart and as one matrix, which then exists once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.forwards import relative_error
from support.layer_options import fill, options
from support.reachable import tensors_in

from asyncengine.execution.layers.embedding import Embedding, LMHead

TOKENS, WIDTH = 96, 64


def tied(dtype: torch.dtype, scale: float = 1.0, tokens: int = TOKENS, **fields: Any) -> tuple[Embedding, LMHead]:
    shared = options(dtype, **fields)
    head = LMHead(shared, "lm_head", tokens, WIDTH, tied="embed")
    return Embedding(shared, "embed", tokens, WIDTH, scale, head), head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, WIDTH**0.5, 0.3])
def test_rows_of_the_table(dtype: torch.dtype, scale: float, panels: bool) -> None:
    """Times the scale, which is rounded to the type first, as families do; tied or not, the very rows."""
    apart, (both, head) = Embedding(options(dtype), "embed", TOKENS, WIDTH, scale), tied(dtype, scale)
    table = torch.randn(TOKENS, WIDTH).to(dtype)
    fill(apart, {"embed.weight": table})
    fill(head, {"embed.weight": table})
    assert not dict(both.slots())
    assert (apart.nbytes, both.nbytes) == (table.nbytes, 0)
    for ids in (torch.arange(TOKENS).flip(0), torch.tensor([7, 7, 0, 95]), torch.arange(0), torch.arange(9)[::2]):
        for layer in (apart, both):
            found = layer(ids)
            assert found.dtype == dtype
            assert torch.equal(found, table[ids] * torch.tensor(scale).to(dtype))
    for layer in (apart, both):
        for wrong in (TOKENS, -1):
            with pytest.raises(IndexError, match=r"token ids must be in 0 \.\. 95"):
                layer(torch.tensor([3, wrong]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, 101, 3])
def test_logits(dtype: torch.dtype, bias: bool, tokens: int, panels: bool) -> None:
    """Logits are float32, of a vocabulary that fills panels, and of two that do not."""
    head = LMHead(options(dtype), "lm_head", tokens, WIDTH, bias=bias)
    weight, offset = torch.randn(tokens, WIDTH).to(dtype), torch.randn(tokens).to(dtype)
    fill(head, {"lm_head.weight": weight, **({"lm_head.bias": offset} if bias else {})})
    for rows in (1, 3, 9, 33):
        x = torch.randn(rows, WIDTH).to(dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), offset.double() if bias else None)
        found = head(x)
        assert found.dtype == torch.float32
        exact = head.weight.name == "packed"
        limit = 1e-6 if exact or dtype == torch.float32 else 1e-2
        assert relative_error(expected, found) < limit


def test_a_tied_matrix_exists_once(panels: bool) -> None:
    table, head = tied(torch.bfloat16)
    assert head.nbytes == TOKENS * WIDTH * 2
    assert sum(each.nbytes for each in tensors_in([table, head])) == head.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_tied_quantized_matrix(dtype: torch.dtype, bits: int) -> None:
    """The matrix has 8 bits either way; fewer tokens than a panel has are tried, too."""
    pytest.importorskip("numba")
    for tokens in (50, 7):
        table, head = tied(dtype, 2.0, tokens, bits=bits)
        weight = torch.randn(tokens, WIDTH).to(dtype)
        fill(head, {"embed.weight": weight})
        ids = torch.tensor([0, tokens - 1, 5])
        assert relative_error(2.0 * weight[ids].float(), table(ids)) < 0.01
        assert table(ids).dtype == dtype
        x = torch.randn(3, WIDTH).to(dtype)
        assert relative_error(x.float() @ weight.float().T, head(x)) < 0.02
        for wrong in (tokens, -1):
            with pytest.raises(IndexError, match="token ids"):
                table(torch.tensor([wrong]))


def test_adapters_come_after_the_scale() -> None:
    """An adapter's addend has the scale in it already: its loader multiplies by it."""
    table, head = tied(torch.float32, 3.0)
    weight = torch.randn(TOKENS, WIDTH)
    fill(head, {"embed.weight": weight})
    seen = []

    class Adapters:
        def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
            seen.append((path, x.tolist()))
            y += 1.0

    torch.testing.assert_close(table(torch.tensor([4, 2]), Adapters()), weight[[4, 2]] * 3.0 + 1.0)
    x = torch.randn(1, WIDTH)
    torch.testing.assert_close(head(x, Adapters()), x @ weight.T + 1.0, rtol=1e-5, atol=1e-5)
    assert [path for path, _ in seen] == ["embed", "lm_head"]

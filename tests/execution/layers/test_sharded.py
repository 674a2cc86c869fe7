"""Weights that are spread over ranks: the same bits as in one process, in every form, wherever a matrix is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.layer_options import options
from support.panels import use_panels
from support.rank_threads import gathers, in_ranks
from support.stored_matrices import FORMS, RandomMatrix

pytest.importorskip("numba")

from asyncengine.execution.device import shared_gather
from asyncengine.execution.layers.basic import Linear, Matrix
from asyncengine.execution.layers.sharded import ShardedWeight, cut_rows
from asyncengine.execution.layers.stored import StoredForm

pytestmark = pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))
INPUTS = 512


@pytest.fixture(autouse=True)
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("outputs", "size", "firsts", "cuts"),
    [
        (256, 2, [0], (0, 128, 256)),
        (100, 2, [0], (0, 64, 100)),
        (96, 3, [0], (0, 32, 64, 96)),
        (64, 3, [0], None),
        (33, 2, [0], (0, 32, 33)),
        (32, 2, [0], None),
        (80, 2, [0, 40, 60], (0, 40, 80)),  # within a part, as far from its beginning as panels are high
        (200, 2, [0, 40], (0, 104, 200)),
    ],
)
def test_cuts(outputs: int, size: int, firsts: list[int], cuts: tuple[int, ...] | None) -> None:
    assert cut_rows(outputs, size, firsts) == cuts


def matrices(sizes: list[int], settings: Any) -> tuple[dict[str, StoredForm], dict[str, Any]]:
    """(stored forms, weights and biases) of matrices of so many outputs, by name."""
    forms, ordered = settings.get("forms", []), settings.get("ordered", False)
    stored = {str(at): StoredForm(name, FORMS[name], ordered) for at, name in enumerate(forms) if name}
    given: dict[str, Any] = {}
    for at, outputs in enumerate(sizes):
        name = forms[at] if forms else ""
        matrix = RandomMatrix(name, outputs, INPUTS, ordered=ordered) if name else numbers(outputs, INPUTS)
        given |= {f"{at}.weight": matrix, f"{at}.bias": numbers(outputs)}
    return stored, given


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        ([64, 32, 32], {}),
        ([48, 40, 40], {}),
        ([64, 32, 40], {"bits": 8}),
        ([40, 24, 41], {"bits": 4}),
        ([64, 32, 32], {"forms": ["Q4_K", "Q4_K", "Q6_K"]}),
        ([64, 32, 64], {"forms": ["Q4_0", "", "Q4_0"]}),
        ([40, 24, 72], {"forms": ["Q8_0"] * 3}),
        ([64, 32, 32], {"forms": ["mxfp4"] * 3}),
        ([64, 32, 32], {"forms": ["w8a8"] * 3}),
        ([64, 32, 32], {"forms": ["awq"] * 3, "ordered": True}),
        ([96], {"forms": ["nvfp4"]}),
    ],
)
def test_linears_give_the_same_bits(parts: list[int], settings: Any, size: int) -> None:
    """Linears of several matrices, with biases, are tried in every form; each rank holds its part and no more."""
    stored, given = matrices(parts, settings)
    x = {rows: numbers(rows, INPUTS) for rows in (1, 7)}

    def make(ranks: Any = None) -> tuple[Linear, list[torch.Tensor]]:
        own = options(bits=settings.get("bits"), forms=stored, ranks=ranks)
        linear = Linear(own, [Matrix(str(at), outputs) for at, outputs in enumerate(parts)], INPUTS, bias=True)
        for name, slot in linear.slots():
            assert slot.takes == stored.get(name.removesuffix(".weight"))
            slot.load(given[name])
        return linear, [linear(x[1]), linear(x[7]), linear(x[7][2:3])]

    (alone, expected), found = make(), in_ranks(size, make)
    for linear, results in found:
        assert isinstance(linear.weight, ShardedWeight)
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
        assert linear.weight.nbytes < alone.weight.nbytes
    assert sum(linear.weight.outputs == sum(parts) for linear, _ in found) == size
    assert [one.weight.last for one, _ in found[:-1]] == [other.weight.first for other, _ in found[1:]]


def test_a_matrix_that_panels_do_not_take_stays_whole() -> None:
    """Its product is torch's, and who knows how torch sums."""
    for inputs, divided in ((INPUTS, True), (INPUTS + 1, False)):
        linear = Linear(options(torch.bfloat16, ranks=gathers(2)[0]), [Matrix("a", 100)], inputs)
        assert isinstance(linear.weight, ShardedWeight) is divided


def test_nobody_waits_for_one_that_is_gone() -> None:
    """A rank that failed says so; those at the barrier, and those that come later, are told."""

    def work(ranks: Any) -> None:
        if ranks.rank == 1:
            ranks.break_off("it fell over")
            return
        for _ in range(2):
            with pytest.raises(RuntimeError, match="gone"):
                ranks.meet()

    in_ranks(3, work)

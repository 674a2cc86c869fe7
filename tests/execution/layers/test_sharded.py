"""Weights that are spread over ranks: the same bits as in one process, in every form, wherever a matrix is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.layer_options import fill, options
from support.panels import use_panels
from support.rank_threads import gathers, in_ranks
from support.stored_matrices import FORMS, RandomMatrix

pytest.importorskip("numba")

from asyncengine.execution.device import shared_gather
from asyncengine.execution.layers.embedding import Embedding, LMHead
from asyncengine.execution.layers.experts import ExpertsConfig as Config
from asyncengine.execution.layers.linear import Linear, Part
from asyncengine.execution.layers.places import Place
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.layers.sharded import ShardedWeight, cut_rows, even_cuts, share_of
from asyncengine.execution.layers.sparse_mlp import MoEConfig, SparseMLP
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
        linear = Linear(own, [Part(str(at), outputs) for at, outputs in enumerate(parts)], INPUTS, bias=True)
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


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        (True, {}), (False, {}), (False, {"transposed": True}), (True, {"bits": 8}), (False, {"bits": 4}),
        (True, {"forms": ["Q4_K", "Q4_K", "Q6_K"]}), (True, {"forms": ["Q4_0", "", "Q4_0"]}),
        (False, {"forms": ["w8a8"]}), (True, {"forms": ["awq"] * 3, "ordered": True}),
    ],
)  # fmt: skip
def test_a_rank_makes_its_own_heads_alone(named: bool, settings: Any) -> None:
    """Two of four groups of heads, of 24 queries and 8 keys and values or of four times that, in one matrix or three;
    and adapters' factors for those."""
    forms = settings.get("forms", [])
    rows = [24, 8, 8] if "bits" in settings or (forms and all(forms)) else [96, 32, 32]
    sizes = [4 * each for each in rows] if named else [4 * sum(rows)]
    stored, given = matrices(sizes, settings)
    x, b = numbers(5, INPUTS), numbers(sum(sizes), 8)

    def make(ranks: Any = None) -> tuple[Linear, torch.Tensor]:
        turned, parts = settings.get("transposed", False), [Part(str(at), size) for at, size in enumerate(sizes)]
        own = options(bits=settings.get("bits"), forms=stored, ranks=ranks)
        share = share_of(ranks, even_cuts(ranks, 4), rows, rows[0])
        linear = Linear(own, parts, INPUTS, bias=True, transposed=turned, share=share)
        for name, slot in linear.slots():
            tensor = given[name]
            slot.load(tensor.T.contiguous() if turned and name.endswith("weight") else tensor)
        return linear, linear(x)

    (alone, expected), found = make(), in_ranks(2, make)
    for rank, (linear, result) in enumerate(found):
        share = share_of(gathers(2)[rank], [0, 2, 4], rows, rows[0])
        assert share is not None
        assert linear.local
        assert torch.equal(result, share.columns(expected))
        assert linear.weight.nbytes < 0.7 * alone.weight.nbytes  # and what fills up panels
        place = Place(INPUTS, linear.parts, kept=linear.kept_outputs())
        factors = [place.kept_rows(part, each) for part, each in enumerate(b.split(sizes))]
        assert torch.equal(torch.cat(factors).T, share.columns(b.T))
        assert place.widths == tuple(len(each) for each in factors)


def test_a_matrix_that_panels_do_not_take_stays_whole() -> None:
    """Its product is torch's, and who knows how torch sums."""
    for inputs, divided in ((INPUTS, True), (INPUTS + 1, False)):
        linear = Linear(options(torch.bfloat16, ranks=gathers(2)[0]), [Part("a", 100)], inputs)
        assert isinstance(linear.weight, ShardedWeight) is divided


def test_a_long_result_goes_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has more rows than the shared memory holds."""
    monkeypatch.setattr(shared_gather, "_PLACE", 4096)
    x, weight = numbers(37, INPUTS), numbers(128, INPUTS)

    def make(ranks: Any = None) -> torch.Tensor:
        linear = Linear(options(ranks=ranks), [Part("a", 128)], INPUTS)
        fill(linear, {"a.weight": weight})
        return linear(x)

    expected = make()
    assert all(torch.equal(each, expected) for each in in_ranks(2, make))
    with pytest.raises(ValueError, match="larger than the shared memory"):
        gathers(2)[0].rows_at_once(4097)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [96, 97])
def test_embeddings_and_logits(tokens: int, tied: bool, bits: int | None) -> None:
    """Rows of a table from whichever rank has them; logits in rank 0."""
    table, other, ids = numbers(tokens, INPUTS), numbers(tokens, INPUTS) * 2, torch.tensor([0, 95, 3, 64, 63, 3])
    x = numbers(3, INPUTS)

    def make(ranks: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        own = options(bits=bits, ranks=ranks)
        head = LMHead(own, "head", tokens, INPUTS, tied="table" if tied else None)
        embedding = Embedding(own, "table", tokens, INPUTS, head=head if tied else None)
        for part in (head, embedding):
            for name, slot in part.slots():
                slot.load(table if name == "table.weight" else other)
        return embedding(ids), head(x)

    rows, logits = make()
    found = in_ranks(2, make)
    assert all(torch.equal(each, rows) for each, _ in found)
    assert torch.equal(found[0][1], logits)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_mixtures_give_the_same_bits(bits: int | None, size: int) -> None:
    """Each rank has some experts; a row's sum goes over those it chose in the order in which it chose them."""
    config = MoEConfig(RouterConfig(5, 3, "mlp.gate.weight"), Config(5, 64))
    x = {rows: numbers(rows, 128) for rows in (1, 9)}

    def make(ranks: Any = None) -> tuple[int, list[torch.Tensor]]:
        mixture = SparseMLP(options(bits=bits, ranks=ranks), config, "", 128)
        for place, (_, slot) in enumerate(mixture.slots()):
            slot.load(numbers(*slot.shape) * (1 + place % 3))
        return mixture.experts.nbytes, [mixture(x[1], None), mixture(x[9], None), mixture(x[9][4:5], None)]

    size_alone, expected = make()
    found = in_ranks(size, make)
    for nbytes, results in found:
        assert nbytes < 0.7 * size_alone
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert sum(nbytes for nbytes, _ in found) == size_alone


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

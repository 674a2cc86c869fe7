"""The rule of near ties, and that nothing else passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tools.gpucheck.compare import Ask, Tally, compare
from tools.gpucheck.reference import Gap
from tools.gpucheck.report import CheckFailed

RIGHT = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
ASKS = [Ask((1,), 6), Ask((2, 3), 6, "a0")]


class Model:
    """A model that continues each of `RIGHT`; `wrong`: (request, place) -> another token there."""

    def __init__(self, wrong: dict[tuple[int, int], int] | None = None) -> None:
        self.wrong = wrong or {}
        self.asked: list[tuple[int, ...]] = []

    async def __call__(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self.answer(ask) for ask in asks]

    def answer(self, ask: Ask) -> list[int]:
        self.asked.append(ask.prompt)
        index = next(n for n, one in enumerate(ASKS) if ask.prompt[: len(one.prompt)] == one.prompt)
        assert ask.adapter == ASKS[index].adapter
        at = len(ask.prompt) - len(ASKS[index].prompt)
        output = list(RIGHT[index][at : at + ask.want])
        for (request, place), token in self.wrong.items():
            if request == index and place >= at:
                output[place - at :] = [token] + [99] * (len(output) - (place - at) - 1)  # nothing is right after it
                break
        return output


def judge(gap: float, rounding: float = 1.0) -> Any:
    return lambda tokens, one, other, adapter: Gap(gap, rounding)


async def tally(model: Any, judging: Any, asks: Sequence[Ask] = ASKS, expected: Any = RIGHT) -> Tally:
    return await compare(model, asks, expected, judging)


async def test_equal_outputs_pass() -> None:
    assert (await tally(Model(), None)).verdict() == "12 tokens the same"


async def test_a_wrong_token_fails() -> None:
    found = await tally(Model({(1, 3): 7}), judge(gap=9.0))
    assert found.wrong == ["request 1 with adapter a0, token 3: 7 instead of 23, and no near tie"]
    with pytest.raises(CheckFailed, match="1 outputs differ; request 1"):
        found.verdict()


async def test_a_near_tie_passes_and_the_rest_is_compared_all_the_same() -> None:
    found = await tally(Model({(0, 1): 7}), judge(gap=2.0))
    assert (found.ties, found.wrong) == (1, [])
    assert found.verdict() == "11 of 12 tokens the same, 1 near ties of at most 2.0 roundings"
    model = Model({(0, 1): 7, (0, 4): 8})
    told: list[tuple[list[int], int, int, str | None]] = []

    def only_the_first(tokens: Sequence[int], one: int, other: int, adapter: str | None) -> Gap:
        told.append((list(tokens), one, other, adapter))
        return Gap(1.0 if one == 11 else 5.0, 1.0)

    found = await tally(model, only_the_first)
    assert found.wrong == ["request 0, token 4: 8 instead of 14, and no near tie"]
    assert told == [([1, 10], 11, 7, None), ([1, 10, 11, 12, 13], 14, 8, None)]
    assert (1, 10, 11) in model.asked, "it goes on from what was expected"


async def test_no_tie_is_near_where_exact_is_asked() -> None:
    assert (await tally(Model({(0, 5): 7}), None)).wrong


async def test_too_many_ties_tell_nothing() -> None:
    found = await tally(Model({(0, 1): 7, (1, 2): 7}), judge(gap=0.0, rounding=0.0))
    assert not found.wrong
    with pytest.raises(CheckFailed, match="2 of 12 tokens are near ties"):
        found.verdict()


async def test_lengths_count() -> None:
    async def short(asks: Sequence[Ask]) -> list[list[int]]:
        return [output[:-1] for output in RIGHT]

    assert (await tally(short, judge(0.0))).wrong == [f"request {n} has 5 tokens, not 6" for n in (0, 1)]


async def test_a_constrained_output_is_compared_up_to_its_first_tie() -> None:
    asks = [replace(ASKS[0], grammar="pattern"), ASKS[1]]
    model = Model({(0, 1): 7})
    found = await tally(model, judge(1.0), asks)
    assert (found.ties, found.wrong) == (1, [])
    assert model.asked == [(1,), (2, 3)]


@pytest.mark.parametrize(("gap", "near"), [(0.0, True), (3.0, True), (3.1, False)])
def test_rounding_decides(gap: float, near: bool) -> None:
    assert Gap(gap, 1.0).near_tie is near
    assert Gap(0.1 * gap, 0.1).near_tie is near or gap == 3.0

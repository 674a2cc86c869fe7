"""Are two engines' greedy outputs the same, but for tokens that rounding alone may swap?

Every token is compared: after a near tie the tested engine goes on from what was expected, not from what it chose.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .reference import Gap

MOST_TIES = 0.15
"""Largest share of near ties among all tokens. More than this and the comparison shows nothing."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy request of `want` tokens; one with a grammar may end earlier."""

    prompt: tuple[int, ...]
    want: int
    adapter: str | None = None
    grammar: Any = None


Generate = Callable[[Sequence[Ask]], Awaitable[list[list[int]]]]
"""All at once; outputs in order."""
Judge = Callable[[Sequence[int], int, int, "str | None"], Gap]
"""(tokens so far, one choice, the other, adapter): how far the two lie apart."""


@dataclass(slots=True)
class Tally:
    """Counts of a comparison."""

    tokens: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def verdict(self) -> None:
        """Raises `AssertionError` for a wrong token, or where near ties are too many."""
        assert not self.wrong, f"{len(self.wrong)} outputs differ; {self.wrong[0]}"
        assert self.ties <= MOST_TIES * self.tokens, f"{self.ties} of {self.tokens} are near ties: nothing is shown"


async def compare(
    generate: Generate, asks: Sequence[Ask], expected: Sequence[Sequence[int]], judge: Judge | None
) -> Tally:
    """Run `asks` and hold the outputs against `expected`. `judge` None: every token must be the same."""
    tally = Tally(tokens=sum(len(tokens) for tokens in expected))
    done = [0] * len(asks)
    pending = list(range(len(asks)))
    while pending:
        outputs = await generate([_after(asks[index], expected[index][: done[index]]) for index in pending])
        following = []
        for index, output in zip(pending, outputs, strict=True):
            rest = expected[index][done[index] :]
            at = _first_difference(output, rest)
            if at is None:
                continue
            if at >= min(len(output), len(rest)):
                tally.wrong.append(
                    f"request {index} has {done[index] + len(output)} tokens, not {len(expected[index])}"
                )
                continue
            ask, before, chosen = asks[index], [*expected[index][: done[index] + at]], output[at]
            gap = judge([*ask.prompt, *before], rest[at], chosen, ask.adapter) if judge else None
            if gap is None or not gap.near_tie:
                request = f"request {index}{f' with adapter {ask.adapter}' if ask.adapter else ''}"
                tally.wrong.append(f"{request}, token {len(before)}: {chosen} instead of {rest[at]}, and no near tie")
                continue
            tally.ties += 1
            done[index] += at + 1
            if done[index] < len(expected[index]) and asks[index].grammar is None:  # a grammar knows no middle
                following.append(index)
        pending = following
    return tally


def _after(ask: Ask, tokens: Sequence[int]) -> Ask:
    return replace(ask, prompt=(*ask.prompt, *tokens), want=ask.want - len(tokens)) if tokens else ask


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))

"""Would the random lives notice? Each test plants one bug of `planted_bugs.toml`, and they must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support.long import LONG
from worlds.adapter_fuzz import AdapterLife
from worlds.grammar_fuzz import GrammarLife
from worlds.image_fuzz import ImageLife
from worlds.plants import FOUND, Bug, bugs, live
from worlds.schedule_fuzz import Life
from worlds.speculation_fuzz import speculative_grammar_life, speculative_life
from worlds.update_fuzz import UpdateLife

from asyncengine.kvcache.states import StateGroup
from asyncengine.testing.fake_runner import FakeStates


class Lives(NamedTuple):
    """Lives in which a kind of bugs is looked for."""

    make: Callable[[int], Any]
    """A life, by its seed."""
    count: int
    first: tuple[int, ...] = ()
    """Seeds of lives that show what others seldom do: they are lived first, to be quick."""
    said: str | None = None
    """A pattern of the error's text."""
    lenient: bool = False
    """Neither books nor the fake device look at states: the tokens alone must tell."""


def with_states(kind: type[Life]) -> Callable[[int], Life]:
    return lambda seed: kind(seed, depth=2, states=True)


def with_adapters(seed: int, watched: bool = False) -> AdapterLife:
    life = AdapterLife(seed, depth=2)
    life.watched = watched
    return life


STATES = (33, 9, 14)
LIVES: dict[str, Lives] = {
    "plain": Lives(lambda seed: Life(seed, depth=2), 60),
    "vectors": Lives(lambda seed: Life(seed, vectors=1.0), 12, said="was not computed, and counts"),
    "windows": Lives(lambda seed: Life(seed, 2, windows=True), 12),
    "mixed": Lives(lambda seed: Life(seed, 2, mixed=True), 12),
    "states": Lives(with_states(Life), 40, STATES),
    "tokens of states": Lives(with_states(Life), 40, STATES, said="wrong tokens", lenient=True),
    "sums of states": Lives(with_states(Life), 20, STATES, said="state slot"),
    "grammars": Lives(lambda seed: GrammarLife(seed, depth=2 + seed % 2), 40, (13, 7, 4)),
    "grammars and states": Lives(with_states(GrammarLife), 40, STATES),
    "tokens of grammars and states": Lives(with_states(GrammarLife), 40, STATES, lenient=True),
    "guesses": Lives(speculative_life, 12),
    "guesses behind guesses": Lives(lambda seed: speculative_life(seed, depth=2), 12),
    "guesses and grammars": Lives(speculative_grammar_life, 8),
    "adapters": Lives(with_adapters, 60, (24, 29, 16)),
    "watched adapters": Lives(lambda seed: with_adapters(seed, watched=True), 60, (24, 29, 16)),
    # as the long form does: it has to find them, too
    "pictures": Lives(lambda seed: ImageLife(seed, books_every=8), 60, (46, 24, 18, 2)),
    "updates": Lives(lambda seed: UpdateLife(seed, states=seed % 4 == 3), 12),
}
HALVED = ("tokens of states", "grammars", "adapters")
"""Kinds of which the short form of the random lives finds all bugs but those seldom met: half of them suffice here."""


def chosen() -> list[Any]:
    return [
        pytest.param(LIVES[kind], bug, id=f"{kind}: {bug.name}")
        for kind in LIVES
        for place, bug in enumerate(bugs(kind))
        if LONG or bug.seldom or not (bug.long or (kind in HALVED and place % 2))
    ]


def look_away(patch: pytest.MonkeyPatch) -> None:
    init = FakeStates.__init__

    def careless(self: FakeStates, num_slots: int) -> None:
        init(self, num_slots)
        self.strict = False

    patch.setattr(FakeStates, "__init__", careless)
    patch.setattr(StateGroup, "check", lambda self, working, nodes: None)
    patch.setattr(StateGroup, "check_sums", lambda self, num_working, *, idle: None)
    patch.setattr(Life, "check_retire_rule", lambda self, batch: None)


@pytest.mark.parametrize(("lives", "bug"), chosen())
def test_the_fuzz_finds(lives: Lives, bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    if lives.lenient:
        look_away(monkeypatch)
    with pytest.raises(FOUND, match=lives.said):
        live(lives.make, (*lives.first, *range(lives.count)))


def test_a_picture_that_is_cut_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image would otherwise be encoded for each of its chunks: no wrong answer, and no progress to speak of."""

    def encoded() -> int:
        lives = [ImageLife(seed) for seed in range(5)]
        live(lives.__getitem__, range(5))
        return sum(life.encoded for life in lives)

    before = encoded()
    bugs("cut pictures")[0].plant(monkeypatch)
    assert encoded() > before

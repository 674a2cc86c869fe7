"""Random requests of every kind (contract lines 1-4, 8, 14, 15, 18): nothing is lost or leaked, every token is right.

`ASYNCENGINE_LONG=10` lives ten times as many lives. Whether the fuzz would notice a bug is asked in test_planted_*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from support.long import TIMES
from worlds.grammar_fuzz import GrammarLife
from worlds.image_fuzz import ImageLife
from worlds.schedule_fuzz import Life, Tally
from worlds.speculation_fuzz import speculative_grammar_life, speculative_life
from worlds.update_fuzz import UpdateLife

from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay

MIXED = 2
"""Lives of each rarer kind with window pages."""


class Kind(NamedTuple):
    """A kind of life, how many of them, and what a life contains on average at least."""

    make: Callable[[int], Life]
    lives: int
    least: Mapping[str, float] = MappingProxyType({})
    reasons: tuple[str, ...] = ()
    """Reasons that must each end some requests."""


ENDS = ("stop", "length", "abort", "timeout")
KINDS = {
    "requests": Kind(
        Life, 8, {"requests": 55, "preemptions": 27, "cached_tokens": 110, "depth2": 1 / 6, "copies": 1 / 8}, ENDS
    ),
    "states": Kind(
        partial(Life, states=True), 4,
        {"requests": 60, "preemptions": 20, "state_hits": 15, "state_evictions": 15, "depth2": 1 / 6}, ENDS,
    ),
    "windows in all layers": Kind(
        partial(Life, windows=True), 6,
        {"requests": 50, "windowed": 1 / 2, "beyond_the_pool": 3, "preemptions": 15, "cached_tokens": 150},
    ),
    "windows in some layers": Kind(
        partial(Life, mixed=True), 4, {"requests": 50, "preemptions": 13, "cached_tokens": 150, "depth2": 1 / 6}
    ),
    "vectors": Kind(
        lambda seed: Life(seed, vectors=1.0 if seed % 3 == 0 else 0.6), 6,
        {"vectors": 20, "preemptions": 1, "cached_tokens": 30}, ENDS,
    ),
    "grammars": Kind(
        GrammarLife, 10,
        {"requests": 65, "constrained": 46, "valid": 13, "forced": 34, "preemptions": 28, "cached_tokens": 130,
         "depth2": 1 / 6}, (*ENDS, "error"),
    ),
    "grammars and states": Kind(
        lambda seed: GrammarLife(seed, 2 if seed % 2 else None, states=True), 6,
        {"forced": 30, "preemptions": 14, "state_hits": 10},
    ),
    "grammars and windows": Kind(lambda seed: GrammarLife(seed, 2 if seed % 2 else None, windows=True), 4),
    "grammars and window pages": Kind(lambda seed: GrammarLife(seed, 2 if seed % 2 else None, mixed=True), MIXED),
    "vectors and window pages": Kind(partial(Life, vectors=0.6, mixed=True), MIXED),
    "updates and window pages": Kind(partial(UpdateLife, mixed=True), MIXED),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests(kind: str) -> None:
    """Leavers, preemptions, priorities, deadlines, n > 1 and two steps in flight; states of one slot and more, windows
    of one token and more, and as few window pages as one request needs."""
    made, tally = KINDS[kind], Tally()
    for seed in range(made.lives * TIMES):
        life = made.make(seed)
        life.run()
        life.count(tally)
    found = {name: getattr(tally, name) / (made.lives * TIMES) for name in made.least}
    assert all(found[name] >= least for name, least in made.least.items()), found
    assert min((tally.reasons.get(reason, 0) for reason in made.reasons), default=made.lives) >= made.lives // 6


@pytest.mark.parametrize(("model", "lives", "least"), [("mixed", MIXED, 40), ("states", 12, 40)])
def test_random_requests_with_drafts(model: str, lives: int, least: int) -> None:
    accepted, tally = 0, Tally()
    for seed in range(lives * TIMES):
        life = speculative_life(seed, **{model: True})
        life.run()
        life.count(tally)
        assert life.scheduler.speculation is not None
        accepted += life.scheduler.speculation.accepted
    assert accepted > lives * TIMES * least, accepted
    assert model == "mixed" or tally.state_hits > lives * TIMES * 4, tally.state_hits


def test_random_grammars_with_drafts_and_states() -> None:
    accepted = 0
    for seed in range(6 * TIMES):
        life = speculative_grammar_life(seed, states=True)
        life.run()
        assert life.scheduler.speculation is not None
        accepted += life.scheduler.speculation.accepted
    assert accepted > 6 * TIMES * 10, accepted


# ---------------------------------------------------------------- replay

RECORDED = {
    **{f"requests, seed {seed}": partial(Life, seed) for seed in (3, 29)},
    "states": partial(Life, 11, depth=2, states=True),
    "windows in all layers": partial(Life, 3, depth=2, windows=True),
    "windows in some layers": partial(Life, 3, depth=2, mixed=True),
    "vectors": partial(Life, 8, vectors=0.6),
    "pictures": partial(ImageLife, 3),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_a_saved_recording_replays_to_the_same_outputs(kind: str, tmp_path: Path) -> None:
    life = RECORDED[kind]()
    life.run()
    loaded = Recording.load(life.recording.save(tmp_path / "life.jsonl"))
    assert (loaded.num_states > 0, loaded.num_window_pages > 0) == ("states" in kind, "some layers" in kind)
    model = FakeModel(eos_every=life.executor.model.eos_every, windows=loaded.windows)
    size, own = loaded.config.page_size, loaded.num_window_pages
    executor = FakeExecutor(loaded.num_pages, size, model, loaded.num_states, num_window_pages=own)
    assert replay(loaded, executor) == life.outputs
    assert len(life.outputs) > 50


@pytest.mark.parametrize("make", [Life, GrammarLife])
def test_the_same_seed_lives_the_same_life(make: Callable[[int], Life]) -> None:
    one, two = make(17), make(17)
    one.executor.keep_batches = two.executor.keep_batches = True
    one.run()
    two.run()

    def plan(life: Life) -> list[list[tuple[int, int, int]]]:
        return [[(row.spec.ticket, row.start, row.num_scheduled) for row in b.rows] for b in life.executor.executed]

    assert plan(one) == plan(two)
    assert one.outputs == two.outputs


@pytest.mark.parametrize("make", [Life, GrammarLife])
def test_a_failure_names_its_seed_and_prints_a_replay_file(
    make: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = make(5)
    life.executor.model.eos_every = 0
    monkeypatch.setattr(life.executor.model, "next_token", lambda *args: 5 + len(life.outputs) % 90)
    with pytest.raises(AssertionError) as caught:
        life.run()
    note = "".join(caught.value.__notes__)
    assert "seed 5" in note
    assert Recording.load(note.rsplit("replay file: ", 1)[1]).entries

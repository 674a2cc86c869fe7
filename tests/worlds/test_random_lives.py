"""Random requests of every kind (contract lines 1-4, 8, 14, 15, 18): nothing is lost or leaked, every token is right.

`ASYNCENGINE_LONG=10` lives ten times as many lives. Whether the fuzz would notice a bug is asked in test_planted_bugs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.data import cases_of
from support.long import LONG, TIMES
from support.small_grammars import NAMES, small_grammar
from worlds.grammar_fuzz import GrammarLife
from worlds.image_fuzz import ImageLife
from worlds.schedule_fuzz import Life
from worlds.speculation_fuzz import speculative_grammar_life, speculative_life
from worlds.update_fuzz import UpdateLife

from asyncengine.grammar.matcher import Matcher
from asyncengine.lora.admission import AdapterSlots
from asyncengine.request_spec import RequestSpec
from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay

LIVES = cases_of(__file__)
"""Numbers of lives by their kind, and what one contains on average at least."""
ImageLife = partial(ImageLife, books_every=8 if LONG else 1)
KINDS: dict[str, Callable[[int], Life]] = {
    "requests": Life,
    "states": partial(Life, states=True),
    "windows in all layers": partial(Life, windows=True),
    "windows in some layers": partial(Life, mixed=True),
    "vectors": lambda seed: Life(seed, vectors=1.0 if seed % 3 == 0 else 0.6),
    "vectors and window pages": partial(Life, vectors=0.6, mixed=True),
    "grammars": GrammarLife,
    "grammars and states": lambda seed: GrammarLife(seed, 2 if seed % 2 else None, states=True),
    "grammars and windows": lambda seed: GrammarLife(seed, 2 if seed % 2 else None, windows=True),
    "grammars and window pages": lambda seed: GrammarLife(seed, 2 if seed % 2 else None, mixed=True),
    "updates": lambda seed: UpdateLife(seed, states=seed % 4 == 3),
    "updates and window pages": partial(UpdateLife, mixed=True),
    "pictures": ImageLife,
    "pictures and states": partial(ImageLife, states=True),
    "pictures and window pages": partial(ImageLife, mixed=True),
    "drafts": speculative_life,
    "drafts and states": partial(speculative_life, states=True),
    "drafts and window pages": partial(speculative_life, mixed=True),
    "drafts and grammars": speculative_grammar_life,
    "drafts, grammars and states": partial(speculative_grammar_life, states=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests(kind: str) -> None:
    """Leavers, preemptions, priorities, deadlines, n > 1 and two steps in flight; states of one slot and more, windows
    of one token and more, and as few window pages as one request needs; oracle, adversarial, random, empty, over-long
    and lookup drafters."""
    lives, found = LIVES[kind]["lives"] * TIMES, Counter[str]()
    for seed in range(lives):
        life = KINDS[kind](seed)
        life.run()
        found += life.counts()
    missed = {name: found[name] / lives for name, least in LIVES[kind]["least"].items() if found[name] < least * lives}
    assert not missed, missed


def test_a_request_with_good_guesses_is_not_launched_ahead() -> None:
    """With two steps in flight a token is nearly always on its way, and behind it nothing is guessed."""
    accepted = tokens = 0
    for seed in range(4 * TIMES):
        life = speculative_life(seed, depth=2)
        life.run()
        accepted += life.counts()["accepted"]
        tokens += life.scheduler.counters.generated_tokens
    assert accepted > tokens // 5


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


def test_a_saved_recording_with_grammars_replays_to_the_same_outputs(tmp_path: Path) -> None:
    """Matchers are code; the grammars they are made of again are in the file. The recorded run used its own up: each
    replay gets fresh ones."""
    templates = {small_grammar(name).grammar: small_grammar(name).template for name in NAMES}

    def matcher(asked: RequestSpec) -> Matcher:
        params = asked.params
        return Matcher(templates[params.grammar], asked.max_total - asked.prompt_len, params.on_budget)

    for seed in (3, 28):
        life = GrammarLife(seed, faults=False)
        life.run()
        loaded = Recording.load(life.recording.save(tmp_path / f"{seed}.jsonl"))
        assert life.scheduler.counters.forced_tokens
        for recording, matchers in ((loaded, matcher), (life.recording, None), (life.recording, None)):
            executor = FakeExecutor(recording.num_pages, recording.config.page_size, life.executor.model)
            assert replay(recording, executor, AdapterSlots(life.adapters.max_loras), matchers) == life.outputs
    with pytest.raises(ValueError, match="saved without its matchers"):
        replay(loaded, executor, AdapterSlots(2))


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

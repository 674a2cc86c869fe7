"""The contract under fuzz (lines 1-3, 8, 14): nothing lost, nothing leaked, every token right, replayable."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.schedule_fuzz import Life, Tally

from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay

SEEDS = 180


def test_ten_thousand_random_requests() -> None:
    """Cancels, preemptions, priorities, deadlines, n > 1, two steps in flight: 10,000 requests, each token checked."""
    tally = Tally()
    for seed in range(SEEDS):
        life = Life(seed)
        life.run()
        life.count(tally)
    assert tally.requests >= 10_000
    # and it was worth it:
    assert tally.preemptions >= 5_000
    assert tally.cached_tokens >= 20_000
    assert tally.depth2 >= SEEDS // 6
    assert {"stop", "length", "abort", "timeout"} <= set(tally.reasons)
    assert min(tally.reasons.values()) >= 50


def test_a_saved_recording_replays_to_the_same_outputs(tmp_path: Path) -> None:
    for seed in (3, 11, 29):
        life = Life(seed)
        life.run()
        loaded = Recording.load(life.recording.save(tmp_path / f"{seed}.jsonl"))
        model = FakeModel(eos_every=life.executor.model.eos_every)
        outputs = replay(loaded, FakeExecutor(loaded.num_pages, loaded.config.page_size, model))
        assert outputs == life.outputs
        assert len(outputs) > 50


def test_the_same_seed_lives_the_same_life() -> None:
    one, two = Life(17), Life(17)
    one.executor.keep_batches = two.executor.keep_batches = True
    one.run()
    two.run()

    def plan(life: Life) -> list[list[tuple[int, int, int]]]:
        return [[(row.spec.ticket, row.start, row.num_scheduled) for row in b.rows] for b in life.executor.executed]

    assert plan(one) == plan(two)


def test_a_failure_prints_a_replay_file(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(5)
    monkeypatch.setattr(life.executor.model, "oracle", lambda *args: [96] * 40)
    with pytest.raises(AssertionError) as caught:
        life.run()
    note = "".join(caught.value.__notes__)
    assert "replay file: " in note
    assert Recording.load(note.rsplit("replay file: ", 1)[1]).entries

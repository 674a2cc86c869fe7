"""Requests for vectors among others, under fuzz: every vector right, nothing lost, nothing leaked, replayable.

ASYNCENGINE_VECTOR_LIVES=2000 lives that many lives instead of the suite's few.
"""

from __future__ import annotations

import os
from pathlib import Path

from fuzz.schedule_fuzz import Life, Tally

from asyncengine.scheduler.admission import Admission
from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay

LIVES = int(os.environ.get("ASYNCENGINE_VECTOR_LIVES", "60"))


def test_random_texts_among_random_requests() -> None:
    tally, vectors = Tally(), 0
    for seed in range(LIVES):
        life = Life(seed, vectors=1.0 if seed % 3 == 0 else 0.6)
        life.run()
        life.count(tally)
        vectors += len(life.vectors)
    assert vectors >= 20 * LIVES
    assert tally.preemptions >= LIVES
    assert tally.cached_tokens >= 30 * LIVES
    assert min(tally.reasons.get(reason, 0) for reason in ("stop", "length", "abort", "timeout")) >= LIVES // 6


def test_a_saved_recording_with_texts_replays_to_the_same_outputs(tmp_path: Path) -> None:
    life = Life(8, vectors=0.6)
    life.run()
    assert len(life.vectors) > 5
    loaded = Recording.load(life.recording.save(tmp_path / "recording.jsonl"))
    model = FakeModel(eos_every=life.executor.model.eos_every)
    assert replay(loaded, FakeExecutor(loaded.num_pages, loaded.config.page_size, model)) == life.outputs


def test_the_fuzz_finds_what_is_taken_from_the_cache_and_counts(monkeypatch) -> None:
    """A planted bug: a text of which all positions are pooled starts from cached pages."""
    monkeypatch.setattr(Admission, "_match_limit", lambda self, request: len(request.tokens) - 1)
    found = 0
    for seed in range(12):
        try:
            Life(seed, vectors=1.0).run()
        except AssertionError as error:
            found += "was not computed, and counts" in str(error)
    assert found

"""Speculation is invisible (contract line 16), under fuzz: `ASYNCENGINE_LONG=34` for 20,000 requests."""

from __future__ import annotations

from support.long import TIMES
from worlds.schedule_fuzz import Tally
from worlds.speculation_fuzz import speculative_grammar_life, speculative_life

SEEDS = 8 * TIMES


def test_drafts_change_nothing() -> None:
    """Oracle, adversarial, random, empty, over-long and lookup drafters; leavers, preemption, n > 1, depth 1 and 2."""
    tally = Tally()
    drafted = accepted = steps = behind_prompts = 0
    for seed in range(SEEDS):
        life = speculative_life(seed)
        life.executor.keep_batches = True
        life.run()
        rows = [row for batch in life.executor.executed for row in batch.rows if row.drafts]
        behind_prompts += sum(row.start < len(row.spec.prompt) for row in rows)
        life.count(tally)
        assert life.scheduler.roster.drafts is not None
        counters = life.scheduler.roster.drafts.counters
        drafted, accepted = drafted + counters.drafted, accepted + counters.accepted
        steps += life.scheduler.counters.steps
        assert not life.scheduler.roster.drafts.requests
    assert tally.requests >= 50 * SEEDS
    # and it was worth it:
    assert accepted > 60 * SEEDS
    assert drafted - accepted > 40 * SEEDS
    assert tally.preemptions > 10 * SEEDS
    assert behind_prompts > SEEDS


def test_a_request_with_good_guesses_is_not_launched_ahead() -> None:
    """With two steps in flight a token is nearly always on its way, and behind it nothing is guessed."""
    accepted = tokens = 0
    for seed in range(SEEDS // 2):
        life = speculative_life(seed, depth=2)
        life.run()
        assert life.scheduler.speculation is not None
        accepted += life.scheduler.speculation.accepted
        tokens += life.scheduler.counters.generated_tokens
    assert accepted > tokens // 5


def test_drafts_change_nothing_of_what_grammars_write() -> None:
    """Each token and each ending is foretold, budgets from the least one up."""
    tally = Tally()
    accepted = refused = 0
    for seed in range(SEEDS // 2):
        life = speculative_grammar_life(seed)
        life.run()
        life.count(tally)
        assert life.scheduler.roster.drafts is not None
        counters = life.scheduler.roster.drafts.counters
        accepted, refused = accepted + counters.accepted, refused + counters.drafted - counters.accepted
    assert tally.valid > 5 * SEEDS
    assert accepted > 10 * SEEDS
    assert refused > 7 * SEEDS
    assert tally.forced > 10 * SEEDS

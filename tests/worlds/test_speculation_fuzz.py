"""Speculation is invisible (contract line 16), under fuzz: `ASYNCENGINE_LONG=34` for 20,000 requests."""

from __future__ import annotations

from support.long import TIMES
from worlds.schedule_fuzz import Tally
from worlds.speculation_fuzz import check_guesses, life_with_draft_model, speculative_grammar_life, speculative_life

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


def test_a_draft_model_that_knows_better_is_never_wrong() -> None:
    """It guesses from pages of its own, under the same numbers: were anything in them stale or missing, it would be
    wrong some time. Beside the other drafters, leavers, preemption, shared prefixes, n > 1, depth 1 and 2."""
    made = 0
    for seed in range(SEEDS):
        life = life_with_draft_model(seed)
        life.run()
        made += check_guesses(life)
    assert made > 50 * SEEDS


def test_a_draft_model_that_errs_changes_nothing() -> None:
    made = right = 0
    for seed in range(SEEDS):
        life = life_with_draft_model(seed, every=3)
        life.run()
        assert life.scheduler.speculation is not None
        counts = life.scheduler.speculation.by_model
        made, right = made + counts[0], right + counts[1]
    assert right > 30 * SEEDS
    assert made - right > 10 * SEEDS


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

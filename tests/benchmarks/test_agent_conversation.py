"""An agent's replayed conversation: every turn finds what was said before it, whatever changes around it."""

from __future__ import annotations

from pathlib import Path

from asyncengine import AsyncEngine
from benchmarks.agent_conversation import make_model, replay, requests


async def test_all_that_is_said_again_is_cached(tmp_path: Path) -> None:
    model = make_model(tmp_path, context=16384)
    async with await AsyncEngine.from_pretrained(model, show_progress=False, num_threads=1) as engine:
        done = await replay(engine, requests(12, rules=20, lines=6))
        computed = engine.stats().computed_tokens
    repeated = sum(turn.repeated for turn in done)
    assert repeated > 10 * done[0].prompt
    assert sum(min(turn.cached, turn.repeated) for turn in done) >= 0.99 * repeated
    assert all(turn.repeated - turn.cached < 16 for turn in done), "pages are whole"
    assert computed < done[-1].prompt + 12 * (16 + 4), "the newest words, and a page's rest in each turn"

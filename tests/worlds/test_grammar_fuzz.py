"""Constrained requests, recorded (contract line 14); how they are scheduled and left, test_random_lives.py and
test_world.py have."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_grammars import NAMES, small_grammar
from worlds.grammar_fuzz import GrammarLife

from asyncengine.grammar.matcher import Matcher
from asyncengine.lora.admission import AdapterSlots
from asyncengine.request_spec import RequestSpec
from asyncengine.testing import FakeExecutor, Recording, replay


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

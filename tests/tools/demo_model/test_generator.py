"""The held-out side of the generator shares no value with training, and what it teaches is right."""

from __future__ import annotations

import json
import random

import pytest

from tools.demo_model.conversations import MAKERS, make
from tools.demo_model.words import Words, in_held_out


@pytest.mark.parametrize("draw", [Words.name, Words.place, Words.foreign, Words.code, Words.full_name])
def test_values_are_disjoint(draw: object) -> None:
    assert callable(draw)
    seen = {draw(Words(random.Random(1))) for _ in range(300)}
    held = {draw(Words(random.Random(1), held_out=True)) for _ in range(300)}
    assert not seen & held


def test_integers_are_disjoint_beyond_one_digit() -> None:
    train, held = Words(random.Random(1)), Words(random.Random(1), held_out=True)
    assert not any(in_held_out(str(abs(n))) for n in (train.signed() for _ in range(500)) if abs(n) > 9)
    assert all(in_held_out(str(abs(n))) for n in (held.signed() for _ in range(500)) if abs(n) > 9)


@pytest.mark.parametrize("skill", MAKERS)
@pytest.mark.parametrize("held_out", [False, True])
def test_the_training_answer_is_a_success(skill: str, held_out: bool) -> None:
    for seed in range(60):
        item = make(skill, seed, held_out)
        last = item.messages[-1]
        assert last["role"] == "assistant"
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in last.get("tool_calls", ())]
        text = last["content"] or "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        assert item.expected.met_by(text), (text, item.expected)

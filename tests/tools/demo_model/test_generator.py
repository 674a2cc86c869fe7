"""The generator must be deterministic, and its held-out side must share no value with training."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from tools.demo_model.conversations import MAKERS, make, stream
from tools.demo_model.dialogue import Expected, contains
from tools.demo_model.words import Words, in_held_out


def test_same_seed_same_conversations() -> None:
    first = list(itertools.islice(stream(5), 50))
    assert first == list(itertools.islice(stream(5), 50))
    assert first != list(itertools.islice(stream(6), 50))


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


def test_the_last_phrasing_is_held_out() -> None:
    phrases = ("a", "b", "c", "d", "e")
    assert {Words(random.Random(n)).phrase(phrases) for n in range(200)} == set("abcd")
    assert {Words(random.Random(n), held_out=True).phrase(phrases) for n in range(200)} == set("abcd")
    assert {Words(random.Random(n), new_phrasings=True).phrase(phrases) for n in range(200)} == {"e"}


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


def test_success_is_strict() -> None:
    assert not contains("He is 130 years old.", "13")
    assert contains("He is 13.", "13")
    assert not Expected("json", {"a": 1}).met_by('{"a": true}')
    assert not Expected("json", {"a": None}).met_by('{"a": "null"}')
    assert not Expected("text", ["x"]).met_by("<tool_call> x")
    assert not Expected("calls", [["f", {}]]).met_by("f")

"""Parameters that a request leaves open are taken from the model's generation_config.json."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from asyncengine.config import EngineConfig
from asyncengine.engine.clock import MonotonicClock
from asyncengine.engine.validation import RequestOptions, RequestValidator
from asyncengine.grammar import Grammar
from asyncengine.info import ModelInfo
from asyncengine.sampling_params import SamplingParams


def resolved(generation_config: dict[str, Any], params: SamplingParams | None, *parts: Any) -> SamplingParams:
    info = ModelInfo("m", 32, 64, (1,), "float32", "cpu", 8, 4, generation_defaults=generation_config)
    return (
        RequestValidator(EngineConfig(), info, MonotonicClock(), *parts or (None,))
        .prepare([2, 3], params, RequestOptions(), 0.0)
        .spec.params
    )


@pytest.mark.parametrize(
    ("generation_config", "given", "temperature"),
    [
        ({}, None, 1.0),
        ({"temperature": 0.6}, None, 0.6),
        ({"do_sample": True, "temperature": 0.6}, None, 0.6),
        ({"do_sample": False}, None, 0.0),
        ({"do_sample": False, "temperature": 0.6}, None, 0.0),  # as Hugging Face generate reads it
        ({"do_sample": False}, SamplingParams(top_p=0.9), 0.0),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0.8), 0.8),  # who asks, gets
        ({"temperature": 0.6}, SamplingParams(temperature=0.0), 0.0),
    ],
)
def test_the_temperature(generation_config: dict[str, Any], given: SamplingParams | None, temperature: float) -> None:
    assert resolved(generation_config, given).temperature == temperature


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        (None, ("User:", "###")),
        (SamplingParams(stop="x"), ("x",)),
        (SamplingParams(ignore_eos=True), ()),
        (SamplingParams(grammar=Grammar.regex("a+")), ()),
    ],
)
def test_stop_strings(given: SamplingParams | None, stop: tuple[str, ...]) -> None:
    """The model's own, unless the caller has some, wants none, or a grammar ends the text."""
    own = {"stop_strings": ["User:", "###"]}
    assert resolved(own, given, Mock(), Mock()).stop == stop
    assert resolved(own, None).stop == ()  # without a tokenizer there is no text


@pytest.mark.parametrize(
    ("own", "drawn"),
    [
        ({}, (0.8, 40, 0.95, 0.05)),
        ({"do_sample": True, "repetition_penalty": 1.1}, (0.8, 40, 0.95, 0.05)),  # says nothing of how
        ({"temperature": 0.6}, (0.6, 0, 1.0, 0.0)),
        ({"min_p": 0.1}, (1.0, 0, 1.0, 0.1)),
        ({"do_sample": False}, (0.0, 0, 1.0, 0.0)),
    ],
)
def test_chats_of_a_model_that_says_nothing(own: dict[str, Any], drawn: tuple[float, ...]) -> None:
    """They draw as llama.cpp's do; texts are drawn from the whole distribution."""
    info = ModelInfo("m", 32, 64, (1,), "float32", "cpu", 8, 4, generation_defaults=own)
    validator = RequestValidator(EngineConfig(), info, MonotonicClock(), None)
    options = RequestOptions()
    found = validator.prepare([2, 3], None, options, 0.0, is_chat=True).spec.params
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == drawn
    asked = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert validator.prepare([2, 3], asked, options, 0.0, is_chat=True).spec.params.replace(
        repetition_penalty=None
    ) == asked.replace(repetition_penalty=None)
    if not own:
        text = validator.prepare([2, 3], None, options, 0.0).spec.params
        assert (text.temperature, text.top_k, text.top_p, text.min_p) == (1.0, 0, 1.0, 0.0)


def test_the_rest() -> None:
    own = {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    left_open = resolved(own, None)
    assert (left_open.top_p, left_open.top_k, left_open.repetition_penalty) == (0.8, 20, 1.1)
    given = resolved(own, SamplingParams(top_p=1.0, top_k=0, repetition_penalty=1.0))
    assert (given.top_p, given.top_k, given.repetition_penalty) == (1.0, 0, 1.0)
    neutral = resolved({}, None)
    assert (neutral.top_p, neutral.top_k, neutral.repetition_penalty) == (1.0, 0, 1.0)

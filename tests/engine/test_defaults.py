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


def test_the_rest() -> None:
    own = {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    left_open = resolved(own, None)
    assert (left_open.top_p, left_open.top_k, left_open.repetition_penalty) == (0.8, 20, 1.1)
    given = resolved(own, SamplingParams(top_p=1.0, top_k=0, repetition_penalty=1.0))
    assert (given.top_p, given.top_k, given.repetition_penalty) == (1.0, 0, 1.0)
    neutral = resolved({}, None)
    assert (neutral.top_p, neutral.top_k, neutral.repetition_penalty) == (1.0, 0, 1.0)

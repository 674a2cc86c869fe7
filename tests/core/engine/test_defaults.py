"""Parameters that a request leaves open are taken from the model's generation_config.json."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from support.data import cases_of

from asyncengine.config import EngineConfig
from asyncengine.engine.clock import MonotonicClock
from asyncengine.engine.validation import RequestOptions, RequestValidator
from asyncengine.grammar import Grammar
from asyncengine.info import ModelInfo
from asyncengine.sampling_params import SamplingParams

ROWS: dict[str, Any] = cases_of(__file__)


def resolved(own: dict[str, Any], params: SamplingParams | None, *parts: Any, is_chat: bool = False) -> SamplingParams:
    info = ModelInfo("m", 32, 64, (1,), "float32", "cpu", 8, 4, generation_defaults=own)
    validator = RequestValidator(EngineConfig(), info, MonotonicClock(), *parts or (None,))
    return validator.prepare([2, 3], params, RequestOptions(), 0.0, is_chat=is_chat).spec.params


@pytest.mark.parametrize(
    ("own", "given", "is_chat", "wanted"),
    [row[1:] for row in ROWS["resolved"]],
    ids=[row[0] for row in ROWS["resolved"]],
)
def test_what_is_resolved(
    own: dict[str, Any], given: dict[str, Any] | None, is_chat: bool, wanted: dict[str, Any]
) -> None:
    found = resolved(own, None if given is None else SamplingParams(**given), is_chat=is_chat)
    assert {name: getattr(found, name) for name in wanted} == wanted


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

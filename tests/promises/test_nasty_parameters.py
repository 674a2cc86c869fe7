"""Every parameter with every nasty value: refused at submit by a short typed error, or taken, and then it works.

With warnings as errors, as under pytest's filterwarnings=error: a conversion that overflows on the device thread would
raise there and take everybody's engine along.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_engine import make_engine
from support.worded_model import make_worded_model

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.checks import MAX_BYTES, MAX_COUNT, MAX_SECONDS, as_switch
from asyncengine.errors import EngineError, InvalidParameter
from asyncengine.integrations.http.settings import ServerSettings
from asyncengine.options import ChatRequest, RequestOptions


class Mute:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")


def _deep() -> list[Any]:
    nest: list[Any] = []
    for _ in range(5000):
        nest = [nest]
    return nest


NUMBERS: list[Any] = [
    0, -0.0, 1, -1, 2, 3, 0.5, 7, 1e-8, 1e-45, 5e-324, 1e-300, 1e-3, 1e3, 1e6, 3e38, 1e39, 1e300, float("inf"),
    float("-inf"), float("nan"), 10**400, -(10**400), 10**5000, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63,
    2**64 - 1, 2**64, 1j, Decimal("0.5"), Fraction(1, 3), np.int64(5), np.int8(-1), np.uint64(2**64 - 1),
    np.float32(0.5), np.float16(1), np.float64("nan"), np.float64(1e-300), np.bool_(True), np.array(5), np.array([1]),
    np.array([0.5, 0.5]), torch.tensor(1), torch.tensor([0.5]),
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, "", "0", "hot", "²", "\ud800", "nul\0", "x" * 1_000_000, b"bytes", [], [1], ["x"], [[1]], [None],
    [2**70], [-1], ["\ud800"], [""], (), {}, {"²": 1}, {"1": "x"}, {"1": 1}, {1: 1e39}, {1: float("nan")}, {2**70: 1},
    {"9" * 5000: 1}, {None: 1}, {np.int64(3): np.float32(1)}, {(): 1}, {1, 2}, range(3), object(), object, len, Mute(),
    [Mute()], _deep(),
]  # fmt: skip
NASTY: list[Any] = NUMBERS + OTHERS


PROMPT = [5, 6, 7, 8]
ENDS = {"length", "stop", "timeout", "tool_calls"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_worded_model(tmp_path_factory.mktemp("nasty") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{{ flavour }}")
    return folder


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.from_pretrained(folder, kv_cache_memory="8MiB", max_model_len=64) as engine:
        yield engine


@pytest.fixture
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def check_short(error: EngineError, what: str) -> None:
    assert len(str(error)) < 1500, f"{what}: {str(error)[:200]}"


def check_refusal(error: EngineError, what: str, field: str | None = None) -> None:
    assert isinstance(error, InvalidParameter), f"{what}: {error!r}"
    assert field is None or error.field == field, f"{what}: {error.field}"
    check_short(error, what)


async def outcome(call: Any, what: str) -> str:
    """The way a call ended; fails for anything but a typed refusal or a finished completion."""
    try:
        completion = await call()
    except EngineError as error:
        check_refusal(error, what)
        return "refused"
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {str(error)[:200]}")
    assert completion.finish_reason in ENDS, f"{what}: {completion.finish_reason}: {completion.error}"
    return "taken"


def shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40] if isinstance(value, (str, float)) else ''}"


@pytest.mark.usefixtures("warnings_are_errors")
async def test_sampling_parameters(engine: AsyncEngine) -> None:
    async def calm() -> list[int]:
        return (await engine.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))).token_ids

    before = await calm()
    base: dict[str, Any] = {"max_tokens": 3, "temperature": 0.7, "seed": 1}
    names = [field.name for field in fields(SamplingParams)]
    for name in names:
        taken = 0
        for value in NASTY:
            if name == "logits_processors" and value is len:
                continue  # a function is called, and fails

            async def call(given: dict[str, Any] = {**base, name: value}) -> Any:  # noqa: B006
                return await engine.generate(PROMPT, SamplingParams.from_dict(given))

            taken += await outcome(call, f"{name}={shown(value)}") == "taken"
        assert taken or name in ("on_budget", "logprobs_of"), name
        assert await calm() == before, name


@pytest.mark.usefixtures("warnings_are_errors")
async def test_parameters_that_meet(engine: AsyncEngine) -> None:
    """Extremes that are each allowed, together: nothing may overflow on the way to a token."""
    cases = [
        {"repetition_penalty": penalty, "temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k}
        for penalty in (1e-3, 1e3)
        for temperature in (1e-5, 1e-300, 1e6)
        for top_p, min_p, top_k in ((5e-324, 5e-324, 2**31 - 1), (1, 1, 1), (1e-40, 0, 0), (1 - 1e-16, 1e-40, 0))
    ]
    for case in cases:
        params = SamplingParams(
            **case, max_tokens=3, presence_penalty=-2, frequency_penalty=2, logit_bias={5: 100, 6: -100}, logprobs=True
        )
        completion = await engine.generate(PROMPT, params)
        assert completion.finish_reason in ENDS, (case, completion.error)


@pytest.mark.usefixtures("warnings_are_errors")
@pytest.mark.parametrize("chat", [False, True], ids=["generate", "chat"])
async def test_options_of_a_request(engine: AsyncEngine, chat: bool) -> None:
    names = (
        [field.name for field in fields(ChatRequest)][1:] if chat else [field.name for field in fields(RequestOptions)]
    )
    params = SamplingParams(max_tokens=2, temperature=0.0)
    for name in names:
        for value in NASTY:

            async def call(given: dict[str, Any] = {name: value}) -> Any:  # noqa: B006
                if chat:
                    return await engine.chat([{"role": "user", "content": "hi"}], params, **given)
                return await engine.generate(PROMPT, params, **given)

            await outcome(call, f"{name}={shown(value)}")
    assert engine.alive


@pytest.mark.usefixtures("warnings_are_errors")
async def test_prompts_and_chats(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for value in NASTY:
        message = {"role": "user", "content": value}
        shapes: list[Any] = [value, [value], [message], [{"role": value, "content": "x"}], [{**message, "x": value}]]
        for shape in shapes:
            await outcome(lambda shape=shape: engine.chat(shape, params), f"messages {shown(value)}")
        for prompt in (value, [5, value]):
            await outcome(lambda prompt=prompt: engine.generate(prompt, params), f"prompt {shown(value)}")
        named = ("messages", "add_generation_prompt", "self") if value is None or isinstance(value, str | dict) else ()
        for name in ("flavour", *named, value if isinstance(value, str) else 5):
            chat = [{"role": "user", "content": "hi"}]
            await outcome(
                lambda kwargs={name: value}, chat=chat: engine.chat(chat, params, template_kwargs=kwargs),
                f"template_kwargs {shown(value)}",
            )
    assert engine.alive


def test_settings() -> None:
    """`EngineConfig` takes each value or refuses it by name; what it takes is of plain types."""
    for field in fields(EngineConfig):
        for value in NASTY:
            what = f"{field.name}={shown(value)}"
            try:
                config = EngineConfig.from_dict({field.name: value})
            except InvalidParameter as error:
                check_refusal(error, what, field.name)
            except Exception as error:
                pytest.fail(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            else:
                assert type(getattr(config, field.name)) in (int, float, str, bool, tuple, type(None)), what
                json.dumps(getattr(config, field.name))


@pytest.mark.parametrize("settings", [EngineConfig, ServerSettings, SamplingParams])
def test_a_copy_is_taken_as_it_is(settings: Any) -> None:
    """Every check takes again the value that it made: engines copy their settings."""
    for field in fields(settings):
        for value in [*NASTY, "2GiB", "5m", "-1"]:
            with suppress(InvalidParameter):
                given = settings.from_dict({field.name: value})
                try:
                    assert given.replace() == given
                except InvalidParameter as error:
                    pytest.fail(f"{field.name}={shown(value)}: {error}")


def limits() -> dict[str, dict[str, Any]]:
    """{"none": {field: None} of those that take it and have another default, "least": {field: number}, "most": alike},
    as the fields' own checks have it."""
    numbers: set[Any] = {0, 5e-324, MAX_SECONDS, MAX_COUNT, MAX_BYTES, *(2**power for power in range(63))}
    found: dict[str, dict[str, Any]] = {"none": {}, "least": {}, "most": {}}
    for field in fields(EngineConfig):
        check, optional = EngineConfig.checks().get(field.name, (as_switch, True))
        bounds = (bound for bound in getattr(check, "keywords", {}).values() if isinstance(bound, int))
        taken: list[Any] = [None] if optional else []
        for value in (None, *numbers, *bounds):
            with suppress(InvalidParameter):
                check(field.name, value)
                taken.append(value)
        if None in taken and field.default is not None:
            found["none"][field.name] = None
        if numeric := [value for value in taken if value is not None]:
            found["least"][field.name], found["most"][field.name] = min(numeric), max(numeric)
    return found


OTHER_PROCESSES = {"tensor_parallel", "pipeline_parallel"}
"""tests/execution/parallel has them."""
ENDS_REQUESTS = {"waiting_timeout", "request_timeout", "inter_token_timeout", "step_hard_limit", "max_model_len"}
"""Their least values leave no request the time, or the room, to answer."""
NEED_MEMORY = {"page_size", "kv_cache_memory", "max_lora_rank", "max_loras", "max_model_len"}
"""Extremes that a model or a machine may not have the room for."""


@pytest.mark.parametrize("which", ["none", "least", "most"])
async def test_every_documented_limit_loads(folder: Path, which: str) -> None:
    """All settings at once that the machine has nothing to do with, so that a new one is among them."""
    alone = OTHER_PROCESSES | NEED_MEMORY | (ENDS_REQUESTS if which == "least" else set())
    settings = {name: value for name, value in limits()[which].items() if name not in alone}
    assert {"speculation_memory", "grammar_cache_memory", "image_cache_memory", "adapter_memory"} <= {*settings}
    async with await AsyncEngine.from_pretrained(folder, **{"kv_cache_memory": "8MiB", **settings}) as engine:
        done = await engine.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert len(done.token_ids) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1}, {"page_size": 2**16}, {"max_loras": 4096}, {"max_lora_rank": 2**16}, {"kv_cache_memory": 1},
        {"kv_cache_memory": 2**63 - 1}, {"max_model_len": 2**31 - 1}, {"device": "cpu:99"}, {"device": "gpu"},
        {"device": ""}, {"device": "\0"},
    ],
    ids=str,
)  # fmt: skip
async def test_extreme_settings_load_and_work_or_are_refused(folder: Path, settings: dict[str, Any]) -> None:
    try:
        engine = await AsyncEngine.from_pretrained(folder, **{"kv_cache_memory": "8MiB", **settings})
    except EngineError as error:
        check_short(error, str(settings))
        return
    async with engine:
        done = await engine.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert len(done.token_ids) == 3


@pytest.mark.parametrize("value", [10**400, -1, float("nan"), "soon", True, np.array([1])], ids=shown)
async def test_a_malformed_patience_closes_nothing(value: Any) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidParameter, match="timeout: "):
            await engine.aclose(drain=True, timeout=value)
        assert engine.alive


def test_a_long_unknown_name_is_not_quoted_whole() -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams.from_dict({"x" * 1_000_000: 1})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_new_tokens"])
def test_other_libraries_names_point_to_ours(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{name}: unknown parameter; did you mean 'max_tokens'"):
        SamplingParams.from_dict({name: 5})


def test_numbers_of_any_kind_become_plain() -> None:
    params = SamplingParams(seed=np.int64(5), temperature=np.float32(0.5), logit_bias={np.int64(3): np.float16(1)})
    assert [type(params.seed), type(params.temperature)] == [int, float]
    assert [(type(key), type(value)) for key, value in params.logit_bias.items()] == [(int, float)]

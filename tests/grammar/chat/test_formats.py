"""Every format of the zoo: found in its template, let through by its grammar, read back exactly, however it is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from support.tables import table

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.grammar.chat import TOOL_FORMATS, ChatPlan, ChatPlanner
from asyncengine.grammar.llguidance_backend import with_rules
from asyncengine.text.tokenizer import TextTokenizer

from .families import CASES, FAMILIES, SIGNS, Case
from .models import TURNS, Oracle, tokenizer

START = "<|im_start|>assistant\n"
DROPS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n"
DROPS += "{% endfor %}{% if tools %}SIGN{% endif %}"
"""A template that renders no calls."""
F = table(__file__, "tool")
NOW = {"name": "now.utc"}
FREE = {"name": "free", "parameters": {"type": "object"}}
TOOLS = [F, NOW, FREE]

CALLS = {what: [(name, arguments) for name, arguments in calls] for what, calls in table(__file__, "calls").items()}


@cache
def model(name: str) -> tuple[TextTokenizer, ChatPlanner, Oracle]:
    text = tokenizer(CASES[name].template, (*TURNS, *CASES[name].special))
    return text, ChatPlanner(text), Oracle(text)


def rendered(text: TextTokenizer, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The text that the template writes for an answer with these calls."""
    answer = {
        "role": "assistant",
        "tool_calls": [
            {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    whole = text.render_chat([{"role": "user", "content": "?"}, answer], add_generation_prompt=False)
    return whole[whole.index(START) + len(START) : -len("<|im_end|>\n")]


def fits(case: Case, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    return not (case.one and len(calls) > 1)


def read(plan: ChatPlan, pieces: list[str]) -> tuple[str, list[tuple[str, Any]], list[Any]]:
    """(content, finished calls, broken calls); checks that the deltas are the calls."""
    assert plan.make_parser is not None
    parser = plan.make_parser()
    parts = [*[parser.push(piece) for piece in pieces], parser.finish()]
    streamed: dict[int, str] = {}
    for delta in (delta for part in parts for delta in part.tool_calls):
        streamed[delta.index] = streamed.get(delta.index, "") + delta.arguments
    finished, broken = parser.finished_calls(), parser.finished_calls(complete=False)
    assert sorted(streamed.values()) == sorted(call.arguments for call in [*finished, *broken])
    return "".join(part.text for part in parts), [(c.name, json.loads(c.arguments)) for c in finished], broken


def cuts(text: str, seed: int, every: bool) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    rng = random.Random(seed)
    places = range(1, len(text)) if every else rng.sample(range(1, len(text)), min(5, len(text) - 1))
    yield from ([text[:i], text[i:]] for i in places)


def test_every_format_can_be_told_by_name() -> None:
    known = {form.family for form in TOOL_FORMATS.values()}
    for family in known:
        assert EngineConfig(tool_format=family).tool_format == family
    with pytest.raises(InvalidParameter):
        EngineConfig(tool_format="gpt")
    found = {name.split()[0] for name in CASES} | {family.form for family in FAMILIES.values()}
    assert found | {"jamba", "hunyuan_a13b", "xlam"} == known  # which are read off their templates as "json"


@pytest.mark.parametrize("family", SIGNS)
def test_found_where_the_template_renders_no_calls(family: str) -> None:
    """The calls are put into the content then, as the model writes them."""
    sign, special = SIGNS[family]
    text = tokenizer(DROPS.replace("SIGN", sign), (*TURNS, *special))
    planner = ChatPlanner(text)
    form = planner.tool_format
    assert form is not None
    assert (form.family, form.rendered) == (family, False)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"s": "a\\nb", "n": 3}'}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Look: ", "tool_calls": [call] * 2}]
    shown = text.render_chat(chat, add_generation_prompt=False, rewrite=planner.rewrite)
    answer = shown[shown.index(START) + len(START) : -len("<|im_end|>\n")]
    plan = planner.plan("", tools=TOOLS)
    assert plan.grammar is not None
    assert Oracle(text).refused_at(plan.grammar, answer) is None
    assert read(plan, [answer])[:2] == ("Look:", [("f", {"s": "a\nb", "n": 3})] * 2)
    assert chat[1]["tool_calls"]
    blocks = [{"type": "text", "text": "Look: "}]
    told = [chat[0], {**chat[1], "content": blocks}]
    shown = text.render_chat(told, add_generation_prompt=False, rewrite=planner.rewrite)
    assert shown.endswith(answer.removeprefix("Look: ") + "<|im_end|>\n")
    hermes = ChatPlanner(tokenizer(DROPS), tool_format="hermes")
    assert "Look: <tool_call>" in text.render_chat(chat, rewrite=hermes.rewrite)  # told by name: no less


@pytest.mark.parametrize("name", CASES)
def test_what_the_template_writes_is_let_through_and_read_back(name: str) -> None:
    text, planner, oracle = model(name)
    plans = {choice: planner.plan(START, tools=TOOLS, tool_choice=choice) for choice in ("required", "auto")}
    for what, calls in CALLS.items():
        if not fits(CASES[name], calls):
            continue
        written = rendered(text, calls)
        for choice, plan in plans.items():
            assert plan.grammar is not None
            refused = oracle.refused_at(plan.grammar, written.lstrip("\n"))
            assert refused is None, f"{what}: {choice}: {refused!r} of {written!r}"
        for pieces in cuts(written.lstrip("\n"), 1, every=what == "angle brackets"):
            content, finished, broken = read(plan, pieces)
            assert (content, broken) == ("", []), (what, pieces)
            assert finished == calls, (what, pieces)
        if planner.tool_format is not None and not planner.tool_format.only_whole:
            assert read(plan, [f"So:\n{written}"])[:2] == ("So:", calls)


def test_kimis_calls_keep_the_ids_they_are_written_with() -> None:
    """Its template has nothing else of a call's name."""
    plan = model("kimi_k2 ids")[1].plan(START, tools=TOOLS)
    assert plan.make_parser is not None
    begin, end, call, behind, arguments = CASES["kimi_k2"].special
    calls = "".join(f'{call}functions.{name}{arguments}{{"s": "a"}}{behind}' for name in ("f:3", "now.utc:4", "f:3"))
    for pieces in ([begin + calls + end], list(begin + calls + end)):
        parser = plan.make_parser()
        for piece in pieces:
            parser.push(piece)
        found = [call.id for call in parser.finished_calls()]
        assert found[:2] == ["functions.f:3", "functions.now.utc:4"]
        assert len(set(found)) == 3


@pytest.mark.parametrize("name", CASES)
def test_wrong_calls_are_impossible(name: str) -> None:
    """Every one-character change of a call that still ends is a valid call, or refused."""
    text, planner, oracle = model(name)
    plan = planner.plan(START, tools=TOOLS, tool_choice="required")
    assert plan.grammar is not None
    written = rendered(text, [("f", {"s": "ab", "n": 5})]).lstrip("\n")
    wrong = [written.replace("ab", "ab", 1)[:-1], "text", "", written + "x", written.replace("f", "g", 1)]
    wrong += [rendered(text, [("f", arguments)]).lstrip("\n") for arguments in (
        {}, {"n": 5}, {"s": "a", "n": 21}, {"s": "a", "n": "5"}, {"s": "a", "other": 1}, {"s": "a", "b": 1},
        {"s": "a", "list": "x"}, {"s": "a", "obj": {"x": 1}}, {"s": "a", "pick": "three"}, {"n": 1},
    )]  # fmt: skip
    wrong += [rendered(text, [("now.utc", {"a": 1})]).lstrip("\n"), rendered(text, [("other", {})]).lstrip("\n")]
    for mutant in wrong:
        if mutant == rendered(text, [("f", {"s": "a", "n": 5})]).lstrip("\n"):
            continue  # raw values: a number's text is the number
        assert oracle.refused_at(plan.grammar, mutant) is not None, mutant
    rng = random.Random(name)
    for _ in range(12):
        at = rng.randrange(len(written))
        mutant = written[:at] + rng.choice(["", written[at] * 2, "x", '"', "<", "}"]) + written[at + 1 :]
        if oracle.refused_at(plan.grammar, mutant) is None:
            content, finished, broken = read(plan, [mutant])
            assert (content, broken) == ("", []), mutant
            assert [call for call, _ in finished] == ["f"], mutant
            arguments = finished[0][1]
            assert set(arguments) <= {"s", "n"}, mutant
            assert isinstance(arguments["s"], str), mutant
            assert arguments.get("n", 1) in range(1, 21), mutant


@pytest.mark.parametrize("name", CASES)
def test_arguments_in_json_come_in_any_order(name: str) -> None:
    """The order of a tool's schema is often its names' alphabetical one, and not the one that its users write."""
    text, planner, oracle = model(name)
    plan = planner.plan(START, tools=TOOLS, tool_choice="required")
    assert plan.grammar is not None
    in_json = "%json" in plan.grammar.text and '"key_order":"any"' in plan.grammar.text
    turned = rendered(text, [("f", {"n": 1, "s": "a"})]).lstrip("\n")
    assert (oracle.refused_at(plan.grammar, turned) is None) == in_json


@pytest.mark.parametrize("name", CASES)
def test_a_call_cut_off_is_not_finished(name: str) -> None:
    text, planner, _ = model(name)
    plan = planner.plan(START, tools=TOOLS)
    written = rendered(text, [("f", {"s": "some text", "obj": {"k": "v"}})]).lstrip("\n")
    for size in range(1, len(written)):
        content, finished, broken = read(plan, [written[:size]])
        assert len(finished) + len(broken) <= 1
        assert all(arguments == {"s": "some text", "obj": {"k": "v"}} for _, arguments in finished), written[:size]
        assert not (content and (finished or broken)), written[:size]


VALUES: list[tuple[dict[str, Any], list[Any], list[Any]]] = table(__file__, "values")


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek_v32 text", "pythonic", "gemma4"])
def test_values_match_their_schema(name: str) -> None:
    text, planner, oracle = model(name)
    for schema, right, wrong in VALUES:
        tool = {"name": "f", "parameters": {"properties": {"v": schema}, "required": ["v"]}}
        plan = planner.plan(START, tools=[tool], tool_choice="required")
        assert plan.grammar is not None
        for value in right:
            written = rendered(text, [("f", {"v": value})]).lstrip("\n")
            refused = oracle.refused_at(plan.grammar, written)
            assert refused is None, (schema, value, refused)
            assert read(plan, [written])[1] == [("f", {"v": value})], (schema, value)
        for value in wrong:
            written = rendered(text, [("f", {"v": value})]).lstrip("\n")
            if oracle.refused_at(plan.grammar, written) is None:  # a raw value can be the text of a string
                assert CASES[name].raw, (schema, value)
                assert isinstance(read(plan, [written])[1][0][1]["v"], str), (schema, value)


def test_what_a_format_cannot_be_held_to_is_named() -> None:
    planner = model("pythonic")[1]
    for schema, keyword in (
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"multipleOf": 7}}, "not"),
    ):
        tool = {"name": "f", "parameters": {"properties": {"v": schema}, "required": ["v"]}}
        with pytest.raises(InvalidParameter, match=f"{keyword}.* in tool 'f'"):
            with_rules(planner.plan(START, tools=[tool]).grammar)[0]
        assert with_rules(planner.plan(START, tools=[{**tool, "strict": False}]).grammar)[0]
    with pytest.raises(InvalidParameter, match="a b"):
        with_rules(planner.plan(START, tools=[{"name": "f", "parameters": {"properties": {"a b": {}}}}]).grammar)[0]

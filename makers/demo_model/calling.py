"""Conversations in which tools are offered: calling them, not calling them, and using what they return."""

from __future__ import annotations

import json
from typing import Any

from makers.demo_model import catalog
from makers.demo_model import facts as f
from makers.demo_model import words as lists
from makers.demo_model.catalog import Param, Tool
from makers.demo_model.dialogue import (
    CANNOT,
    NO_TOOL,
    Conversation,
    Expected,
    Message,
    assistant,
    calling,
    result,
    system,
    user,
)
from makers.demo_model.offering import Arguments, draw_arguments, draw_tool, offer, renamed, schema
from makers.demo_model.reading import ask, documents, gather, manner
from makers.demo_model.toolbox import TOOLS
from makers.demo_model.words import Words

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with tools.",
    "Use the tools when they help.",
    "You are an agent. Use tools to answer.",
    "You can call functions to help the user.",
    "Answer the user, and call a tool if needed.",
)
_GENERAL = ("search", "value", "capital", "person", "age", "greet", "sum", "product", "population", "date", "number")
"""Topics whose tools could serve small talk or a question about a text; they are not offered as idle tools."""


def opening(w: Words) -> list[Message]:
    return [system(manner(w, w.phrase(SYSTEMS)))] if w.chance(0.4) else []


def outcome(w: Words, tool: Tool, arguments: Arguments) -> tuple[str, str, list[str]]:
    """The tool's result, the answer for the user, and the strings this answer must contain."""
    kind = w.rng.random()
    if kind < 0.15:
        reason = w.pick(
            (
                "not found",
                "timeout",
                "invalid argument",
                "access denied",
                "no such " + w.word(),
                f"code {w.integer()}",
                f"{w.word()} is missing",
            )
        )
        text = w.pick((f"Error: {reason}", f"Error: {reason}", json.dumps({"error": reason}), f"error: {reason}"))
        return text, f"Sorry, the tool failed: {reason}.", [reason]
    value = str(tool.returns(w))
    if kind < 0.35:
        keys = w.rng.sample(lists.ATTRIBUTES, w.rng.randint(1, 2))
        record: dict[str, Any] = {key: w.pick((Words.word, Words.signed, Words.name, Words.foreign))(w) for key in keys}
        said = " and ".join(f"the {key} is {item}" for key, item in record.items())
        return json.dumps(record, ensure_ascii=False), f.upper(said) + ".", [str(item) for item in record.values()]
    if kind < 0.45:
        text = f"{f.upper(w.text())} {w.pick(('is', 'was', 'has'))} {w.text()}."
        return text, text, [text]
    if kind < 0.55 and not tool.report.startswith("The result"):
        return (
            json.dumps({"result": value}, ensure_ascii=False),
            catalog.fill(tool.report, arguments, value),
            _needed(tool, arguments, value),
        )
    return value, catalog.fill(tool.report, arguments, value), _needed(tool, arguments, value)


def _needed(tool: Tool, arguments: Arguments, value: str) -> list[str]:
    if "{r}" in tool.report:
        return [value]
    return [catalog.fill(f"{{{key}}}", arguments) for key in arguments if f"{{{key}}}" in tool.report]


def called(tool: Tool, arguments: Arguments) -> list[Any]:
    return [tool.name, arguments]


def single_call(w: Words) -> Conversation:
    """One request, one call."""
    tool = draw_tool(w)
    arguments = draw_arguments(w, tool)
    request = catalog.fill(w.phrase(tool.requests), arguments)
    messages = [*opening(w), user(request), calling([(tool.name, arguments)])]
    expected = Expected("calls", [called(tool, arguments)])
    return Conversation("call", messages, expected, offer(w, [tool]), _tags(tool, arguments))


def _tags(tool: Tool, arguments: Arguments) -> list[str]:
    tags = {"integer" for value in arguments.values() if type(value) is int}
    tags |= {"negative" for value in arguments.values() if type(value) is int and value < 0}
    tags |= {"non-ascii" for value in arguments.values() if isinstance(value, str) and not value.isascii()}
    tags |= {
        "name"
        for param in tool.params
        if param.name in ("name", "recipient", "city")
        and param.name in arguments
        and str(arguments[param.name]).isascii()
    }
    return sorted(tags or {"other" if arguments else "no-argument"})


def session(w: Words) -> Conversation:
    """Several requests in one conversation: calls, their results, the answers, and small talk in between."""
    tools = [draw_tool(w) for _ in range(w.rng.randint(1, 2))]
    if len({tool.topic for tool in tools}) < len(tools) or len({tool.name for tool in tools}) < len(tools):
        tools = tools[:1]
    messages = opening(w)
    required: list[str] = []
    for _ in range(w.rng.randint(1, 3)):
        tool = w.pick(tools)
        arguments = draw_arguments(w, tool)
        text, answer, required = outcome(w, tool, arguments)
        messages += [
            user(catalog.fill(w.phrase(tool.requests), arguments)),
            calling([(tool.name, arguments)]),
            result(text),
            assistant(answer),
        ]
    return Conversation("tool_result", messages, Expected("text", required), offer(w, tools, 3))


def two_calls(w: Words) -> Conversation:
    """Two wishes in one request: at once when joined by "and", one after the other when the user says "then"."""
    tool = draw_tool(w)
    second = tool if w.chance(0.5) else draw_tool(w)
    if second is not tool and (second.topic == tool.topic or second.name == tool.name or not second.params):
        second = tool
    pairs = [(tool, draw_arguments(w, tool)), (second, draw_arguments(w, second))]
    asked = [catalog.fill(w.phrase(item.requests), arguments).rstrip(".?") for item, arguments in pairs]
    outcomes = [outcome(w, item, arguments) for item, arguments in pairs]
    calls = [(item.name, arguments) for item, arguments in pairs]
    tools = offer(w, [tool] if second is tool else [tool, second], 3)
    answer = " ".join(item[1] for item in outcomes)
    required = [part for item in outcomes for part in item[2]]
    messages = opening(w)
    if w.chance(0.5):
        messages += [
            user(
                w.pick(("{} And also: {}", "{}. {}.", "{}, and {}.", "Two things: {}. {}.", "{} and {}")).format(*asked)
            ),
            calling(calls),
        ]
        if w.chance(0.4):
            return Conversation(
                "agent", messages, Expected("calls", [list(call) for call in calls]), tools, ["parallel"]
            )
        messages += [result(item[0], index) for index, item in enumerate(outcomes)]
        return Conversation("agent", [*messages, assistant(answer)], Expected("text", required), tools, ["parallel"])
    messages.append(
        user(w.pick(("First: {}. Then: {}.", "{}. Then {}.", "First {}, then {}.", "{} and then {}.")).format(*asked))
    )
    messages += [calling(calls[:1]), result(outcomes[0][0]), calling(calls[1:])]
    if w.chance(0.4):
        return Conversation("agent", messages, Expected("calls", [list(calls[1])]), tools, ["sequential"])
    messages.append(result(outcomes[1][0]))
    return Conversation("agent", [*messages, assistant(answer)], Expected("text", required), tools, ["sequential"])


def retry(w: Words) -> Conversation:
    """A result that asks to try again is followed by the same call."""
    tool = draw_tool(w)
    arguments = draw_arguments(w, tool)
    text, answer, required = outcome(w, tool, arguments)
    call = [(tool.name, arguments)]
    again = w.pick(
        (
            "Error: busy, please try again",
            "Temporary failure, try again.",
            "Error: timeout, try again",
            "Please try again.",
        )
    )
    messages = [
        *opening(w),
        user(catalog.fill(w.phrase(tool.requests), arguments)),
        calling(call),
        result(again),
        calling(call),
    ]
    if w.chance(0.5):
        return Conversation(
            "agent", messages, Expected("calls", [called(tool, arguments)]), offer(w, [tool], 3), ["retry"]
        )
    return Conversation(
        "agent",
        [*messages, result(text), assistant(answer)],
        Expected("text", required),
        offer(w, [tool], 3),
        ["retry"],
    )


def no_fit(w: Words) -> Conversation:
    """A request for a tool that is not offered; sometimes no tool is offered at all."""
    tool = w.pick(TOOLS) if w.chance(0.7) else catalog.invented(w)
    arguments = draw_arguments(w, tool)
    asked = [*opening(w), user(catalog.fill(w.phrase(tool.requests), arguments))]
    tools, answer = None, CANNOT
    if w.chance(0.85):
        answer = NO_TOOL
        others: list[Tool] = []
        while len(others) < w.pick((1, 1, 2, 3)):
            other = draw_tool(w)
            if other.topic not in (tool.topic, "search", "value") and tool.name not in (
                other.name,
                *(item.name for item in others),
            ):
                others.append(other)
        tools = [schema(w, item) for item in others]
    return Conversation("no_fit", [*asked, assistant(answer)], Expected("text", [answer]), tools)


def with_idle_tools(w: Words, inner: Conversation) -> Conversation:
    """A conversation that needs no tool, with tools offered anyway; the answers stay the same."""
    idle = [tool for tool in TOOLS if tool.topic not in _GENERAL]
    tools = [
        schema(w, catalog.invented(w) if w.chance(0.5) else renamed(w, w.pick(idle)))
        for _ in range(w.pick((1, 1, 2, 3)))
    ]
    return Conversation("no_call", inner.messages, inner.expected, tools, [inner.skill])


def retrieval(w: Words) -> Conversation:
    """A question for which a search tool is offered: search with the question, then answer from what was found."""
    groups = gather(w, w.rng.randint(1, 6))
    question, answer, required, _ = ask(w, groups)
    param = Param(
        w.pick(("query", "query", "question", "input", "q", "text")), "string", Words.text, "What to look for."
    )
    name = w.pick(
        ("search", "retrieve", "search_docs", "query_engine", "knowledge_base", "lookup_documents", "find_passages")
    )
    about = w.pick(
        (
            "Search the documents.",
            "Find passages that help to answer.",
            "Look up facts in the knowledge base.",
            "Useful to answer questions.",
            "Retrieve information for a query.",
        )
    )
    tool = Tool(name, about, (param,), (question,), Words.text, topic="search")
    call = [(name, {param.name: question})]
    messages = [*opening(w), user(question), calling(call)]
    tools = offer(w, [tool], 2)
    if w.chance(0.35):
        return Conversation("agent", messages, Expected("calls", [list(call[0])]), tools, ["retrieval"])
    messages += [result(documents(w, groups)), assistant(answer)]
    return Conversation("agent", messages, Expected("text", required), tools, ["retrieval"])

"""Endpoints of decisions: /v1/decisions in OpenAI's form, /v1/systemone in that of `transformers serve`.

OpenAI's form has refusals, for models that decline to answer; decisions here have probabilities alone and decline
nothing. A question that cannot be asked, such as one with more options than the model has labels, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from asyncengine.checks import as_choice, as_text
from asyncengine.errors import ContextLengthExceeded, InvalidParameter
from asyncengine.integrations.http.answer import Answer
from asyncengine.integrations.http.dialects.openai_responses import responses_usage
from asyncengine.integrations.http.dialects.openai_shape import image_part
from asyncengine.integrations.http.fields import Values, objects
from asyncengine.integrations.http.generating import routed
from asyncengine.integrations.http.models import Serving, Target
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.vectors import Result, computing
from asyncengine.outputs import DecisionAnswer

MAX_QUESTIONS = 400
TYPES = {"predicate": "noul", "choice": "choice", "score": "score"}
"""OpenAI's types of questions, and the engine's."""
CONTENT_FIELDS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "input_json": "data"}
"""Types of OpenAI's content parts, and the field that has the content of each."""
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
OUTPUTS = {f"{name}_output": name for name in CALLS}
Choice = str | bool
Choices = list[tuple[Choice, str]]
"""The values of a choice, or the labels of a score, each with the engine's option."""


def routes(serving: Serving) -> list[Route]:
    """The two paths of decisions."""
    answer_systemone = computing(serving, _systemone, "decide", "systemone")

    async def systemone(request: Request) -> Response | Answer:
        """Refuse a malformed request with 422, as transformers does, and one that the model cannot take with 400."""
        try:
            return await answer_systemone(request)
        except InvalidParameter as error:
            takes = isinstance(error, ContextLengthExceeded) or error.field == "assets" or "[" in error.field
            raise Problem(400 if takes else 422, str(error), error.field, "invalid_value") from error

    decide = computing(serving, _decide, "decide", "decisions")
    return routed({"POST /v1/decisions": decide, "POST /v1/systemone": systemone})


async def _systemone(values: Values, target: Target) -> Result:
    body = values["own"]
    assets = body.get("assets")
    if isinstance(assets, dict):  # else the engine says what is wrong with them
        assets = {name: _asset(f"assets[{name!r}]", picture) for name, picture in assets.items()}
    decided = await target.engine.decide(body["state"], body["questions"], assets=assets, adapter=target.adapter)
    answers = {name: answer.details for name, answer in decided.answers.items()}
    usage = {"input_tokens": decided.usage.prompt_tokens, "output_tokens": 0}
    return {"model": target.name, "answers": answers, "usage": usage}, (), decided.usage


async def _decide(values: Values, target: Target) -> Result:
    state = _state(values["own"]["input"])
    questions = objects("questions", values["own"]["questions"])
    if not 0 < len(questions) <= MAX_QUESTIONS:
        raise InvalidParameter("questions", f"must be 1 to {MAX_QUESTIONS} questions", len(questions))
    engine_questions: dict[str, dict[str, Any]] = {}
    options: list[Choices] = []
    for at, (where, question) in enumerate(questions):
        name = f"questions[{at}]" if question.get("name") is None else as_text(f"{where}.name", question["name"])
        if name in engine_questions:
            raise InvalidParameter(f"{where}.name", "is the name of another question", name)
        engine_questions[name], choices = _question(where, question)
        options.append(choices)
    try:
        decided = await target.engine.decide(state, engine_questions, adapter=target.adapter, **values["options"])
    except InvalidParameter as error:
        number = next((at for at, name in enumerate(engine_questions) if repr(name) in str(error)), None)
        if number is None or not error.field.startswith("questions"):
            raise
        raise InvalidParameter(f"questions[{number}]", error.limit) from error
    answers = [
        {"name": question.get("name"), **_answer(answer, choices)}
        for (_, question), answer, choices in zip(questions, decided.answers.values(), options, strict=True)
    ]
    usage = responses_usage(replace(decided.usage, completion_tokens=0))
    return {"model": target.name, "answers": answers, "usage": usage}, (), decided.usage


def _asset(where: str, asset: Any) -> Any:
    """A picture as the engine takes it, of a data URL or {"data_base64": ...}."""
    data = asset.get("data_base64") if isinstance(asset, dict) else asset
    data = as_text(where, data)
    return data if data.startswith("data:") else f"data:;base64,{data}"


# -------------------------------------------------------------------- input


def _state(value: Any) -> Any:
    """The input as the engine takes a state. Raises `InvalidParameter`."""
    if isinstance(value, str):
        return value
    calls: set[tuple[str, str]] = set()
    return [_item(where, item, calls) for where, item in objects("input", value, "a text, or a list of items")]


def _item(where: str, item: Mapping[str, Any], calls: set[tuple[str, str]]) -> dict[str, Any]:
    """A message, a call or an output; `calls` are the types and ids of the calls before it."""
    item_type = as_choice(f"{where}.type", item.get("type") or "message", ["message", *CALLS, *OUTPUTS])
    if item_type == "message":
        role = as_choice(f"{where}.role", item.get("role"), ["user", "developer", "system", "assistant"])
        return {"role": role, "content": _content(f"{where}.content", item.get("content"))}
    call_id = as_text(f"{where}.call_id", item.get("call_id"))
    if item_type in CALLS:
        calls.add((item_type, call_id))
        field = CALLS[item_type]
        texts = {name: as_text(f"{where}.{name}", item.get(name)) for name in ("name", field)}
        return {"type": item_type, "call_id": call_id, **texts}
    if (OUTPUTS[item_type], call_id) not in calls:
        raise InvalidParameter(f"{where}.call_id", "is the id of no call before it", call_id)
    return {"type": item_type, "call_id": call_id, "output": _content(f"{where}.output", item.get("output"))}


def _content(where: str, content: Any) -> Any:
    """A text, or the contents of parts: a list, or the content itself if it is one. Raises `InvalidParameter`."""
    if isinstance(content, str):
        return content
    contents: list[Any] = []
    for name, part in objects(where, content, "a text, or a list of parts"):
        if (picture := image_part(name, part)) is not None:
            contents.append({**picture, "where": name})
            continue
        part_type = as_choice(f"{name}.type", part.get("type"), list(CONTENT_FIELDS))
        field = CONTENT_FIELDS[part_type]
        value = part.get(field)
        if part_type == "input_json" and not isinstance(value, (dict, list)):
            raise InvalidParameter(f"{name}.data", "must be an object, or a list of objects", value)
        contents.append(value if part_type == "input_json" else as_text(f"{name}.{field}", value))
    return contents[0] if len(contents) == 1 else contents


# -------------------------------------------------------------------- questions and answers


def _question(where: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], Choices]:
    """The engine's question, and its options."""
    form = TYPES[as_choice(f"{where}.type", fields.get("type"), list(TYPES))]
    ours: dict[str, Any] = {"type": form, "instructions": _content(f"{where}.instructions", fields.get("instructions"))}
    if form == "noul":
        return ours, []
    listed, key = ("choices", "value") if form == "choice" else ("levels", "label")
    values: list[Choice] = []
    descriptions: list[str | None] = []
    for name, choice in objects(f"{where}.{listed}", fields.get(listed)):
        value, description = choice.get(key), choice.get("description")
        values.append(value if form == "choice" and isinstance(value, bool) else as_text(f"{name}.{key}", value))
        descriptions.append(None if description is None else as_text(f"{name}.description", description))
    if form == "score":
        ours["criteria"] = [
            label if text is None else f"{label}: {text}" for label, text in zip(values, descriptions, strict=True)
        ]
        return ours, [(label, str(level)) for level, label in enumerate(values)]
    options = [_option(value, values) for value in values]
    if len(options) < 2 or len(set(options)) < len(options):
        raise InvalidParameter(f"{where}.choices", "must be two values or more, none of them twice")
    ours["criteria"] = dict(zip(options, descriptions, strict=True))
    return ours, list(zip(values, options, strict=True))


def _option(value: Choice, values: list[Choice]) -> str:
    """The engine's option for a value; that of a boolean differs from those of all texts."""
    if isinstance(value, str):
        return value
    text = "true" if value else "false"
    return f"{text} (boolean)" if text in values else text


def _answer(answer: DecisionAnswer, choices: Choices) -> dict[str, Any]:
    if answer.type == "noul":
        return {"type": "predicate", "probability": answer.value}
    probabilities = answer.probabilities
    head = {"type": answer.type, "confidence": answer.confidence}
    if answer.type == "choice":
        rows = [{"value": value, "probability": probabilities[option]} for value, option in choices]
        best = next(value for value, option in choices if option == answer.choice)
        return {**head, "choice": best, "probabilities": rows}
    levels = [{"value": int(level), "label": label, "probability": probabilities[level]} for label, level in choices]
    return {**head, "score": answer.value, "probabilities": levels}

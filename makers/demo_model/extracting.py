"""Fields of a text as a JSON object, from a field list, a JSON schema, or a schema offered as a tool."""

from __future__ import annotations

import json
from typing import Any

from makers.demo_model import facts as f
from makers.demo_model.dialogue import Conversation, Expected, Message, assistant, calling, system, user
from makers.demo_model.entities import ENTITIES
from makers.demo_model.reading import filler
from makers.demo_model.words import Words

LIST_REQUESTS = (
    "Extract {k} as JSON.\n\nText: {c}",
    "Extract {k} from the text as JSON.\n\n{c}",
    "{c}\n\nExtract {k} as JSON.",
    "Text: {c}\nGive me {k} as a JSON object.",
    "Read the text and return JSON with {k}.\n\n{c}",
    "Return a JSON object with the keys {k}.\n{c}",
    "Extract the following fields from the text and answer in JSON: {k}.\n\nText:\n{c}",
    "Extract {k} as JSON: {c}",
)
SCHEMA_REQUESTS = (
    "Extract the data as JSON that follows this schema:\n{s}\n\nText: {c}",
    "{c}\n\nAnswer with a JSON object that matches this JSON schema:\n{s}",
    "JSON schema:\n{s}\n\nText:\n{c}\n\nExtract the data as JSON.",
    "{c}\n\nHere's a JSON schema to follow:\n{s}\n\nOutput a valid JSON object but do not repeat the schema.",
    "Text: {c}\n\nReturn JSON for the schema {s}",
    "Use this schema: {s}\nExtract from this text: {c}",
)
SCHEMA_SYSTEMS = (
    "Extract data from the user's text. Answer with JSON that follows this schema:\n{s}",
    "You extract information. Respond only with a JSON object matching this schema: {s}",
    "Answer in JSON. Schema:\n{s}",
    "You are a helpful assistant. Reply with a JSON object that conforms to this JSON schema:\n{s}",
    "Your output must be JSON of this form:\n{s}",
)
PLAIN_SYSTEMS = (
    "You extract data and answer with JSON only.",
    "You are a helpful assistant that outputs JSON.",
    "You turn text into JSON.",
    "Respond with valid JSON.",
    "Answer only with JSON.",
)
INTRO = ("", "", "", "This is {n}. ", "Let me tell you about {n}. ", "Here is some news about {n}. ")


def record(w: Words) -> tuple[f.Entity, str, dict[str, Any], dict[str, str]]:
    """A text about one thing, the wanted object (null where the text is silent), and the types of its keys."""
    entity = w.pick(ENTITIES)
    subject = entity.subject(w)
    bare = subject.removeprefix("the book ").removeprefix("the ").removeprefix("order ").removeprefix("server ")
    facts = f.describe(w, entity, w.rng.randint(1, 5), subject)
    if w.chance(0.15):
        facts = [_with_foreign(w, fact) for fact in facts]
    text = f.prose(w, facts)
    if w.chance(0.2):
        text = w.pick(INTRO).replace("{n}", subject) + text
    if w.chance(0.2):
        text = w.pick((f"{text} {filler(w)}", f"{filler(w)} {text}"))
    values: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    if w.chance(0.75):
        values[entity.label], kinds[entity.label] = bare, "string"
    asked = list(facts)
    if w.chance(0.5):
        w.rng.shuffle(asked)
    for fact in asked[: max(1, len(asked) - w.pick((0, 0, 0, 1, 2)))]:
        values[fact.field.key], kinds[fact.field.key] = fact.value, fact.field.kind
    known = {fact.field.key for fact in facts} | set(values)
    silent = [field for field in entity.fields if field.key not in known]
    if silent and w.chance(0.25):
        field = w.pick(silent)
        values[field.key], kinds[field.key] = None, field.kind
        keys = list(values)
        w.rng.shuffle(keys)
        values, kinds = {key: values[key] for key in keys}, {key: kinds[key] for key in keys}
    return entity, text, values, kinds


def _with_foreign(w: Words, fact: f.Fact) -> f.Fact:
    if fact.field.kind == "string" and w.chance(0.5):
        return f.Fact(fact.subject, fact.field, w.foreign(), fact.entity)
    return fact


def listed(w: Words, kinds: dict[str, str]) -> str:
    """The wanted keys as a person lists them."""
    style = w.rng.random()
    names = list(kinds)
    if style < 0.3:
        names = [f"{key} ({kind})" for key, kind in kinds.items()]
    elif style < 0.4:
        names = [f'"{key}"' for key in kinds]
    elif style < 0.5:
        names = [key.replace("_", " ") if "_" not in key else key for key in kinds]
    if len(names) == 1:
        return names[0]
    return w.pick((", ".join(names), f"{', '.join(names[:-1])} and {names[-1]}"))


def json_schema(w: Words, title: str, values: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """A schema as written by hand or as pydantic writes it."""
    titled, described = w.chance(0.4), w.chance(0.3)
    properties: dict[str, Any] = {}
    for key, kind in kinds.items():
        spec: dict[str, Any] = {"type": kind}
        if kind == "array":
            spec = {"type": "array", "items": {"type": "string"}}
        if values[key] is None and w.chance(0.7):
            spec = (
                {"anyOf": [{"type": kind}, {"type": "null"}]}
                if kind != "array" and w.chance(0.6)
                else {"type": [kind, "null"]}
            )
        if described:
            spec["description"] = f"The {key.replace('_', ' ')}."
        if titled:
            spec["title"] = key.replace("_", " ").title()
        properties[key] = spec
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    if w.chance(0.4):
        schema = {"properties": properties, "required": list(properties), "title": title.title(), "type": "object"}
    if w.chance(0.15):
        schema["additionalProperties"] = False
    return schema


def extract(w: Words) -> Conversation:
    """One text, or several texts in turn for the same wish."""
    entity, text, values, kinds = record(w)
    answer = json.dumps(values, ensure_ascii=False)
    messages: list[Message]
    if w.chance(0.45):
        messages = [system(w.phrase(PLAIN_SYSTEMS))] if w.chance(0.3) else []
        messages.append(user(w.phrase(LIST_REQUESTS).replace("{k}", listed(w, kinds)).replace("{c}", text)))
    else:
        written = json.dumps(
            json_schema(w, entity.kind, values, kinds), ensure_ascii=False, indent=2 if w.chance(0.12) else None
        )
        if w.chance(0.5):
            messages = [
                system(w.phrase(SCHEMA_SYSTEMS).replace("{s}", written)),
                user(w.pick(("{c}", "{c}", "Extract: {c}", "Text: {c}")).replace("{c}", text)),
            ]
        else:
            messages = [system(w.phrase(PLAIN_SYSTEMS))] if w.chance(0.3) else []
            messages.append(user(w.phrase(SCHEMA_REQUESTS).replace("{s}", written).replace("{c}", text)))
    messages.append(assistant(answer))
    return Conversation("extract", messages, Expected("json", values))


def structured_tool(w: Words) -> Conversation:
    """The schema offered as a tool, as agent libraries do for structured output."""
    entity, text, values, kinds = record(w)
    values = {key: value for key, value in values.items() if value is not None}
    kinds = {key: kinds[key] for key in values}
    if not values:
        return structured_tool(w)
    name = w.pick(
        (
            entity.kind.title(),
            entity.kind.title(),
            f"{entity.kind.title()}Info",
            f"save_{entity.kind}",
            f"record_{entity.kind}",
        )
    )
    parameters = json_schema(w, entity.kind, values, kinds)
    about = w.pick(
        (
            f"Information about a {entity.kind}.",
            f"Save a {entity.kind}.",
            f"A {entity.kind}.",
            f"Extract a {entity.kind} from the text.",
        )
    )
    tool = {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}
    request = (
        w.pick(
            (
                "{c}",
                "Extract: {c}",
                "Extract the {e}: {c}",
                "Save this {e}: {c}",
                "Call the tool for this text: {c}",
                "{c}\n\nExtract the data.",
                "Extract information about the {e}.\n\n{c}",
            )
        )
        .replace("{e}", entity.kind)
        .replace("{c}", text)
    )
    messages = (
        [
            system(
                w.pick(
                    ("You extract data.", "You are a helpful assistant.", "Use the tool to save what the text says.")
                )
            )
        ]
        if w.chance(0.4)
        else []
    )
    messages += [user(request), calling([(name, values)])]
    return Conversation("structured", messages, Expected("calls", [[name, values]]), [tool])

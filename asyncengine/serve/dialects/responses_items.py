"""Items of OpenAI's Responses API: reading those of a request, and making a chat's messages of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from asyncengine.checks import as_choice, as_text
from asyncengine.errors import InvalidParameter
from asyncengine.serve.dialects.openai_shape import Message, refuse_block, tool_call, tool_message

Item = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
SEALED = "ae1."
"""Start of an `encrypted_content` that was written here."""


def seal(text: str) -> str:
    """A text in a form that clients carry about unread. It is no secret: whoever holds it was shown the text."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(sealed: object) -> str:
    """The text that `seal` was given; an empty one for another server's."""
    try:
        return base64.b64decode(sealed[len(SEALED) :]).decode() if str(sealed).startswith(SEALED) else ""  # type: ignore[index]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def read_input(given: object) -> list[Item]:
    """The items of `input`, with all that is left out of them. Raises `InvalidParameter` naming the faulty part."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidParameter("input", "must be a str or a list of items", given)
    return [_item(f"input[{at}]", item) for at, item in enumerate(given)]


def _item(name: str, given: object) -> Item:
    if not isinstance(given, Mapping):
        raise InvalidParameter(name, "must be an object", given)
    kind = given.get("type") or ("message" if "role" in given else None)
    item = {**given, "type": kind, "status": given.get("status") or "completed"}
    as_text(f"{name}.id", item.setdefault("id", ""))
    match kind:
        case "message":
            role = as_choice(f"{name}.role", item.get("role"), ("user", "assistant", "system", "developer"))
            item["content"] = _parts(f"{name}.content", item.get("content"), role)
        case "function_call":
            for field in ("call_id", "name", "arguments"):
                as_text(f"{name}.{field}", item.get(field))
        case "function_call_output":
            as_text(f"{name}.call_id", item.get("call_id"))
            if not isinstance(item.get("output"), str):
                item["output"] = _parts(f"{name}.output", item.get("output"), "tool")
        case "reasoning":
            item["summary"] = _parts(f"{name}.summary", item.get("summary") or [], "summary")
            item["content"] = _parts(f"{name}.content", item.get("content") or [], "reasoning")
        case "compaction":
            as_text(f"{name}.encrypted_content", item.get("encrypted_content"))
        case _:
            raise InvalidParameter(f"{name}.type", "cannot be used: messages, function calls and reasoning are", kind)
    return item


def _parts(name: str, given: object, role: str) -> list[Item]:
    if isinstance(given, str):
        kind = "output_text" if role == "assistant" else "input_text"
        return [{"type": kind, "text": given} | ({"annotations": []} if role == "assistant" else {})]
    if not isinstance(given, list):
        raise InvalidParameter(name, "must be a str or a list of parts", given)
    for at, part in enumerate(given):
        if not isinstance(part, Mapping):
            raise InvalidParameter(f"{name}[{at}]", 'must be an object like {"type": "input_text", "text": ...}', part)
        if part.get("type") == "refusal":
            as_text(f"{name}[{at}].refusal", part.get("refusal"))
        elif part.get("type") in TEXT_PARTS:
            as_text(f"{name}[{at}].text", part.get("text"))
        else:
            raise refuse_block(f"{name}[{at}].type", str(part.get("type"))[:100])
    return given


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join([part["refusal"] if part["type"] == "refusal" else part["text"] for part in content])


def messages_of(instructions: str | None, earlier: Sequence[Item], items: Sequence[Item]) -> list[Message]:
    """The chat that items make up. `earlier`: those of the responses that these `items` go on from.

    What the model wrote in one turn (thoughts, text, calls) is one message, as its template wrote it the first time;
    system and developer messages at the head are one, too. Raises `InvalidParameter` for a result without its call.
    """
    made: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}
    for at, item in enumerate((*earlier, *items), -len(earlier)):
        match item["type"]:
            case "message" if item["role"] == "assistant":
                message = _turn_of(made)
                message["content"] += ("\n\n" if message["content"] else "") + _text(item["content"])
            case "message" if item["role"] in ("system", "developer"):
                if made and made[-1]["role"] == "system":
                    made[-1]["content"] += "\n\n" + _text(item["content"])
                else:
                    made.append({"role": "system", "content": _text(item["content"])})
            case "message":
                texts = [
                    {"type": "text", "text": part["text"]} for part in item["content"] if part["type"] != "refusal"
                ]
                made.append({"role": item["role"], "content": texts[0]["text"] if len(texts) == 1 else texts})
            case "function_call":
                names[item["call_id"]] = item["name"]
                call = tool_call(item["call_id"], item["name"], item["arguments"])
                _turn_of(made).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                if item["call_id"] not in names:
                    raise InvalidParameter(
                        f"input[{at}].call_id", "is that of no function_call before", item["call_id"]
                    )
                made.append(tool_message(_text(item["output"]), item["call_id"], names[item["call_id"]]))
            case "reasoning":
                if thought := _text(item["content"]) or unseal(item.get("encrypted_content")):
                    message = _turn_of(made)
                    message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case "compaction":
                made.append({"role": "user", "content": unseal(item["encrypted_content"])})
    return made


def _turn_of(made: list[Message]) -> Message:
    """The model's message that is being put together."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    return made[-1]

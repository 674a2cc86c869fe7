"""Items of OpenAI's Responses API: reading those of a request, and making a chat's messages of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from asyncengine.checks import as_choice, as_text
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import openai_shape
from asyncengine.integrations.http.fields import objects

Item = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
SEALED = "ae1."
"""Start of an `encrypted_content` that was written here."""


def seal(text: str) -> str:
    """A text in a form that clients carry about unread. It is no secret: whoever holds it was shown the text."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(sealed: object) -> str:
    """The text that `seal` was given; an empty one for another server's."""
    if not isinstance(sealed, str) or not sealed.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(SEALED)).decode()
    except (binascii.Error, ValueError):
        return ""


def read_input(given: object) -> list[Item]:
    """The items of `input`, each with its known parts alone and with all of them. Raises `InvalidParameter` naming the
    faulty part."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    listed = objects("input", [] if given is None else given, "a str or a list of items")
    return [_item(name, item) for name, item in listed]


def _item(name: str, given: Mapping[str, Any]) -> Item:
    kind = given.get("type") or ("message" if "role" in given else None)
    item: Item = {field: as_text(f"{name}.{field}", given[field]) for field in ("id", "phase") if given.get(field)}
    item |= {"type": kind, "status": "completed"}
    match kind:
        case "message":
            item["role"] = as_choice(f"{name}.role", given.get("role"), ("user", "assistant", "system", "developer"))
            own = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = _parts(f"{name}.content", given.get("content"), own, item["role"] == "user")
        case "function_call":
            item |= {field: as_text(f"{name}.{field}", given.get(field)) for field in ("call_id", "name", "arguments")}
        case "function_call_output":
            item["call_id"] = as_text(f"{name}.call_id", given.get("call_id"))
            output = given.get("output")
            item["output"] = output if isinstance(output, str) else _parts(f"{name}.output", output, "input_text", True)
        case "reasoning":
            for field in ("summary", "content"):
                item[field] = _parts(f"{name}.{field}", given.get(field) or [], "reasoning_text")
            if not item["content"] and (thought := unseal(given.get("encrypted_content"))):
                item["content"] = [{"type": "reasoning_text", "text": thought}]
        case "compaction":
            sealed = as_text(f"{name}.encrypted_content", given.get("encrypted_content"))
            item["encrypted_content"] = sealed
        case _:
            raise InvalidParameter(f"{name}.type", "cannot be used: messages, function calls and reasoning are", kind)
    return item


def _parts(name: str, given: object, own: str, images: bool = False) -> list[Item]:
    """Parts of a content. `own`: the type of one that is given as a str. `images`: some may be pictures."""
    if isinstance(given, str):
        given = [{"type": own, "text": given}]
    made: list[Item] = []
    for at, part in objects(name, given, "a str or a list of parts"):
        kind = part.get("type")
        if images and kind == "input_image" and (image := openai_shape.image_part(f"{at}.image_url", part)):
            made.append({"type": kind, "image_url": image["image_url"]["url"], "detail": "auto"})
            continue
        if kind not in TEXT_PARTS:
            raise openai_shape.refuse_block(f"{at}.type", str(kind)[:100])
        field = "refusal" if kind == "refusal" else "text"
        made.append({"type": kind, field: as_text(f"{at}.{field}", part.get(field))})
        if kind == "output_text":
            made[-1]["annotations"] = []
    return made


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part.get("text", part.get("refusal", "")) for part in content]


def _content(content: str | Sequence[Mapping[str, Any]]) -> openai_shape.Content:
    """A content of which some parts may be pictures; one that is text alone, as a str where it has one part."""
    if isinstance(content, str):
        return content
    parts = [openai_shape.image_part("input", part) or openai_shape.text_part(_texts([part])[0]) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def messages_of(instructions: str | None, earlier: Sequence[Item], items: Sequence[Item]) -> list[openai_shape.Message]:
    """The chat that items make up. `earlier`: those of the responses that these `items` go on from.

    What the model wrote in one turn (thoughts, text, calls) is one message, as its template wrote it the first time;
    system and developer messages beside one another are one, too. Raises `InvalidParameter` for a result without its
    call.
    """
    made: list[openai_shape.Message] = [{"role": "system", "content": [instructions]}] if instructions else []
    names: dict[str, str] = {}

    def last(role: str) -> openai_shape.Message:
        """The message of that role that is being put together: its texts are joined at the end, all at once."""
        if not made or made[-1]["role"] != role:
            made.append({"role": role, "content": []})
        return made[-1]

    for at, item in enumerate((*earlier, *items), -len(earlier)):
        match item["type"]:
            case "message" if item["role"] == "user":
                made.append({"role": "user", "content": _content(item["content"])})
            case "message":
                role = "assistant" if item["role"] == "assistant" else "system"
                last(role)["content"].append("".join(_texts(item["content"])))
            case "function_call":
                names[item["call_id"]] = item["name"]
                call = openai_shape.with_object(
                    openai_shape.tool_call(item["call_id"], item["name"], item["arguments"])
                )
                last("assistant").setdefault("tool_calls", []).append(call)
            case "function_call_output":
                if item["call_id"] not in names:
                    raise InvalidParameter(f"input[{at}].call_id", "is that of no function_call before it")
                output = _content(item["output"])
                if isinstance(output, list) and all(part["type"] == "text" for part in output):
                    output = "".join(part["text"] for part in output)
                made.append(openai_shape.tool_message(output, item["call_id"], names[item["call_id"]]))
            case "reasoning" if item["content"]:
                last("assistant").setdefault("reasoning_content", []).extend(_texts(item["content"]))
            case "compaction":
                made.append({"role": "user", "content": unseal(item["encrypted_content"])})
    for message in made:
        if message["role"] in ("assistant", "system"):
            message["content"] = "\n\n".join(message["content"])
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return made

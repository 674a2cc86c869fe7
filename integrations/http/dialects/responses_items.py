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
    """A text in a form that clients send back unread. It is not encrypted: the client was shown the text anyway."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(sealed: object) -> str:
    """The text that `seal` was given; an empty one if another server wrote `sealed`."""
    if not isinstance(sealed, str) or not sealed.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(SEALED)).decode()
    except (binascii.Error, ValueError):
        return ""


def read_input(value: object) -> list[Item]:
    """The items of `input`, with the fields that are known and defaults for missing ones. Raises `InvalidParameter`
    naming the faulty field."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    listed = objects("input", [] if value is None else value, "a str or a list of items")
    return [_item(name, item) for name, item in listed]


def _item(name: str, fields: Mapping[str, Any]) -> Item:
    type_ = fields.get("type") or ("message" if "role" in fields else None)
    item: Item = {field: as_text(f"{name}.{field}", fields[field]) for field in ("id", "phase") if fields.get(field)}
    item |= {"type": type_, "status": "completed"}
    match type_:
        case "message":
            item["role"] = as_choice(f"{name}.role", fields.get("role"), ("user", "assistant", "system", "developer"))
            text_type = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = _parts(f"{name}.content", fields.get("content"), text_type, item["role"] == "user")
        case "function_call":
            item |= {field: as_text(f"{name}.{field}", fields.get(field)) for field in ("call_id", "name", "arguments")}
        case "function_call_output":
            item["call_id"] = as_text(f"{name}.call_id", fields.get("call_id"))
            output = fields.get("output")
            item["output"] = output if isinstance(output, str) else _parts(f"{name}.output", output, "input_text", True)
        case "reasoning":
            for field in ("summary", "content"):
                item[field] = _parts(f"{name}.{field}", fields.get(field) or [], "reasoning_text")
            if not item["content"] and (thought := unseal(fields.get("encrypted_content"))):
                item["content"] = [{"type": "reasoning_text", "text": thought}]
        case "compaction":
            sealed = as_text(f"{name}.encrypted_content", fields.get("encrypted_content"))
            item["encrypted_content"] = sealed
        case _:
            raise InvalidParameter(f"{name}.type", "cannot be used: messages, function calls and reasoning are", type_)
    return item


def _parts(name: str, value: object, text_type: str, images: bool = False) -> list[Item]:
    """The parts of a content. `text_type`: the type of a part for a plain str. `images`: whether pictures may occur."""
    if isinstance(value, str):
        value = [{"type": text_type, "text": value}]
    parts: list[Item] = []
    for at, part in objects(name, value, "a str or a list of parts"):
        part_type = part.get("type")
        if images and part_type == "input_image" and (image := openai_shape.image_part(f"{at}.image_url", part)):
            parts.append({"type": part_type, "image_url": image["image_url"]["url"], "detail": "auto"})
            continue
        if part_type not in TEXT_PARTS:
            raise openai_shape.refuse_block(f"{at}.type", str(part_type)[:100])
        field = "refusal" if part_type == "refusal" else "text"
        parts.append({"type": part_type, field: as_text(f"{at}.{field}", part.get(field))})
        if part_type == "output_text":
            parts[-1]["annotations"] = []
    return parts


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part.get("text", part.get("refusal", "")) for part in content]


def _content(content: str | Sequence[Mapping[str, Any]]) -> openai_shape.Content:
    """A content as the engine takes it: a str where it is a single text, else a list of parts."""
    if isinstance(content, str):
        return content
    parts = [openai_shape.image_part("input", part) or openai_shape.text_part(_texts([part])[0]) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def messages_of(instructions: str | None, earlier: Sequence[Item], items: Sequence[Item]) -> list[openai_shape.Message]:
    """The chat that items make up. `earlier`: items of the responses that these `items` continue.

    Consecutive items of the model (thoughts, text, calls) make one message, so that the template writes that turn as it
    was generated; consecutive system and developer messages make one, too. Raises `InvalidParameter` for a result
    without its call.
    """
    messages: list[openai_shape.Message] = [{"role": "system", "content": [instructions]}] if instructions else []
    names: dict[str, str] = {}

    def last(role: str) -> openai_shape.Message:
        """The last message, if it has that role, else a new one. Its texts are joined at the end, all at once."""
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        return messages[-1]

    for at, item in enumerate((*earlier, *items), -len(earlier)):
        match item["type"]:
            case "message" if item["role"] == "user":
                messages.append({"role": "user", "content": _content(item["content"])})
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
                messages.append(openai_shape.tool_message(output, item["call_id"], names[item["call_id"]]))
            case "reasoning" if item["content"]:
                last("assistant").setdefault("reasoning_content", []).extend(_texts(item["content"]))
            case "compaction":
                messages.append({"role": "user", "content": unseal(item["encrypted_content"])})
    for message in messages:
        if message["role"] in ("assistant", "system"):
            message["content"] = "\n\n".join(message["content"])
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages

"""What chat templates are rendered in: jinja2's sandbox with the names and filters that transformers gives templates.

The same text comes out as from transformers' `apply_chat_template` (`tests/text/test_plain_tokenizer.py` compares
them), without importing it. Only jinja2's compiler is needed, and that only once for each template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, utils
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""What an answer's reasoning may be called; the first is what most templates read, gpt-oss' the second."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends in what was rendered; it ends in white space, which templates may take away."""


class _Generation(Extension):
    """`{% generation %}`: around what the model is to learn. Without effect here but that it is a scope."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """`dict`, of which a template can reach nothing but what it is for."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(utils.Namespace):
    """`namespace`, without names that Python itself gives a meaning to."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be one of the values
        own, given = args[0], dict(*args[1:], **values)
        for name in given:
            _check_name(name)
        utils.Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def template_environment() -> ImmutableSandboxedEnvironment:
    """A new one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )  # fmt: skip
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As Python writes it: jinja2's own filter writes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def render(
    template: Any, source: str, chat: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, continued: bool
) -> str:
    """The text of a chat of plain JSON data. `template`: what the environment made of `source`. `continued`: it ends
    where the last message's content does.

    Raises whatever the template raises, and `ValueError` for a last message that cannot be continued.
    """
    messages = [_with_reasoning({key: value for key, value in each.items() if value is not None}) for each in chat]
    if not continued:
        return str(template.render(messages=messages, **variables))
    final = _mark_end(messages[-1], source)
    text = str(template.render(messages=messages, **variables))
    if final.strip() not in text or _TAG.strip() not in text:
        raise ValueError("the last message cannot be continued: the template does not write its content as it is")
    end = text.rindex(_TAG.strip())
    return text[:end] if text[end : end + len(_TAG)] == _TAG else text[:end].rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under the names that templates read it by."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _mark_end(message: dict[str, Any], source: str) -> str:
    """Put the mark behind the content, or behind its last block of text. Returns that text."""
    content = message.get("content")
    if content is None:
        raise ValueError("the last message has no content to continue")
    if "content" not in source:
        raise ValueError("the template reads no content that could be continued")
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    for index in range(len(content) - 1, -1, -1):
        if "text" in content[index]:
            text = str(content[index]["text"])
            block = {**content[index], "text": text + _TAG}
            message["content"] = [*content[:index], block, *content[index + 1 :]]
            return text
    raise ValueError("the last message has no text to continue")

"""Bodies of each dialect without an engine: what becomes of their messages and fields."""

from __future__ import annotations

from typing import Any

import pytest
from support.data import cases_of

from asyncengine.integrations.http.dialects import anthropic_messages, ollama, openai_chat, openai_responses
from asyncengine.integrations.http.fields import Fields

ROWS: dict[str, Any] = cases_of(__file__)
READ: dict[str, Any] = {
    "chat": openai_chat.read, "messages": anthropic_messages.read, "responses": openai_responses.read,
    "ollama": ollama.read_chat,
}  # fmt: skip
BODIES = [(READ[dialect], why, body, made) for dialect, rows in ROWS.items() for why, body, made in rows]


@pytest.mark.parametrize(
    ("read", "body", "made"), [(row[0], *row[2:]) for row in BODIES], ids=[row[1] for row in BODIES]
)
def test_what_becomes_of_a_body(read: Any, body: dict[str, Any], made: dict[str, Any]) -> None:
    fields = Fields(body)
    turn = read(fields)
    assert {name: fields.ignored if name == "ignored" else getattr(turn, name) for name in made} == made

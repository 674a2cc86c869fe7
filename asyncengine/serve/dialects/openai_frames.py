"""Frames of OpenAI's streams: what chats and text completions have in common around each choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncengine.outputs import Usage
from asyncengine.serve.dialects.openai_shape import openai_usage
from asyncengine.serve.problems import Problem
from asyncengine.serve.turn import Answered, Turn


def error(problem: Problem) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    name = kind.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": name, "param": problem.param, "code": problem.code}}


class Frames:
    """The frames of one answer, and the head of one that is sent whole."""

    ping = ": still there\n\n"
    """A comment, which clients pass over: the connection is used."""

    def __init__(self, prefix: str, kind: str, turn: Turn, answered: Answered) -> None:
        """`prefix` of the answer's id; `kind` of object that each frame is."""
        extra = turn.extra
        self._usage, self._ids = bool(extra.get("usage")), bool(extra.get("return_ids"))
        self._answered = answered
        self._id, self._kind = prefix + answered.id, kind
        # A frame is made for every token of every stream: all of it that stays the same is written once.
        self._before = "data: " + json.dumps(self.head(kind), ensure_ascii=False)[:-1] + ', "choices": [{"index": '
        self._after = (', "usage": null' if self._usage else "") + "}\n\n"

    def head(self, kind: str) -> dict[str, Any]:
        """The fields of an object of this kind before its choices."""
        created, model = self._answered.created, self._answered.model
        return {"id": self._id, "object": kind, "created": created, "model": model, "system_fingerprint": None}

    def frame(self, index: int, fields: str, token_ids: Sequence[int] = (), more: str = "") -> str:
        """The frame of a choice with these fields (JSON's, without braces); `more` come behind the choices."""
        ids = f', "token_ids": {list(token_ids)}' if self._ids else ""
        return f"{self._before}{index}, {fields}{ids}}}]{more}{self._after}"

    def end(self, usage: Usage) -> str:
        """The last frames of a stream."""
        last = ""
        if self._usage:
            last = f"data: {json.dumps({**self.head(self._kind), 'choices': [], 'usage': openai_usage(usage)})}\n\n"
        return last + "data: [DONE]\n\n"

    def failed(self, problem: Problem) -> str:
        """The frames of a stream that broke off."""
        return f"data: {json.dumps(error(problem))}\n\ndata: [DONE]\n\n"

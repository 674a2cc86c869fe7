"""A chat engine with given answers, for tests of applications: no model, no torch; the rest is the real engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncengine.assembly.wiring import wire
from asyncengine.async_engine import AsyncEngine
from asyncengine.config import EngineConfig
from asyncengine.demo import MODEL_PATH
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.validation import PreparedRequest
from asyncengine.grammar.chat import ChatPlan, ChatPlanner
from asyncengine.grammar.chat.formats import written_calls
from asyncengine.grammar.chat.schemas import check_tools
from asyncengine.info import ModelInfo
from asyncengine.options import ChatRequest, Prompt, RequestOptions
from asyncengine.sampling_params import SamplingParams, as_params
from asyncengine.step import Row, StepResult, TokenLogprob
from asyncengine.testing.fake_runner import FakeExecutor
from asyncengine.text.plain_tokenizer import read_plain_tokenizer
from asyncengine.text.tokenizer import TextTokenizer

Answer = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""A text, a call {"name": "weather", "arguments": {"city": "Oslo"}}, or several: a text before calls."""
Messages = Sequence[Mapping[str, Any]]
PAGES = 4096


class FakeChat(AsyncEngine):
    """An engine that gives `answers` one after the other, or `answers(messages)`, whatever it is asked.

    All else is as with a hosted `AsyncEngine`: streams, stop strings, limits, deadlines, errors. Tokens are the bundled
    model's. It starts at its first use. No grammar or format is enforced: an answer stands as it was given. A request
    raises `AssertionError` if no answer is left, or for a call of a tool that it does not offer.
    """

    def __init__(self, answers: Sequence[Answer] | Callable[[Messages], Answer], **settings: Any) -> None:
        """`settings`: fields of `EngineConfig`, such as `max_queued_requests`."""
        self.asked: list[Messages] = []
        """Messages of every request so far; a prompt of `generate` is one of a user's."""
        config, remaining = EngineConfig(speculation="off", **settings), iter(() if callable(answers) else answers)

        def answer_to(messages: Messages) -> Answer:
            self.asked.append(messages)
            answer = answers(messages) if callable(answers) else next(remaining, None)
            if answer is None:
                raise AssertionError(f"FakeChat has no answer left for {messages[-1]}")
            return answer

        super().__init__(lambda: _Scripted(config, answer_to), hosted=True)

    @property
    def core(self) -> Frontend:
        if self._core is None:
            self.start_blocking()
        return super().core


class _Reciter(FakeExecutor):
    """Says `outputs`, the token ids of each ticket."""

    def __init__(self, page_size: int) -> None:
        super().__init__(PAGES, page_size)
        self.outputs: dict[int, list[int]] = {}

    def sample(self, index: int, row: Row, result: StepResult) -> None:
        token = self.outputs[row.spec.ticket][row.start + row.num_scheduled - row.spec.prompt_len]
        result.tokens[index] = self.last_token[row.slot] = token
        if row.spec.params.logprobs:
            result.logprobs[index] = [TokenLogprob(token, 0.0)]


class _Scripted(Frontend):
    """Asks for an answer to each request that is submitted, and has the executor say it."""

    def __init__(self, config: EngineConfig, answer_to: Callable[[Messages], Answer]) -> None:
        text, size = TextTokenizer(read_plain_tokenizer(MODEL_PATH, "llama")), config.page_size
        self._executor, self._answer_to, self._text = _Reciter(size), answer_to, text
        facts = ("fake-chat", text.vocab_size, (PAGES - 1) * size, text.end_token_ids, "none", "none", PAGES, size)
        info = ModelInfo(*facts, has_chat_template=True)
        wired = wire(self._executor, info, config, tokenizer=text, planner=ChatPlanner(text))
        super().__init__(wired.loop, wired.validator, text, wired.info, ChatPlanner(text))

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, arrival: float | None = None
    ) -> PreparedRequest:
        prepared = super().prepare(prompt, as_params(params).replace(grammar=None), options, arrival)
        content = prompt if isinstance(prompt, str) else self._text.decode(prepared.spec.prompt_ids)
        return self._scripted(prepared, [{"role": "user", "content": content}], ())

    def prepare_chat(
        self, chat: ChatRequest, params: SamplingParams | None, options: RequestOptions, arrival: float | None = None
    ) -> PreparedRequest:
        prepared = super().prepare_chat(chat, params, options, arrival)
        return self._scripted(prepared, chat.messages, [tool.name for tool in check_tools(chat.tools)])

    def _plan(self, chat: ChatRequest, params: SamplingParams, text: str) -> ChatPlan | None:
        plan = super()._plan(chat, params, text)
        return None if plan is None else replace(plan, grammar=None, thinking=None)

    def _scripted(self, prepared: PreparedRequest, messages: Messages, tools: Sequence[str]) -> PreparedRequest:
        assert self.planner is not None
        assert self.planner.tool_format is not None
        for ticket in prepared.tickets:
            answer = self._answer_to(messages)
            pieces = [answer] if isinstance(answer, (str, Mapping)) else answer
            calls = [(piece["name"], piece["arguments"]) for piece in pieces if not isinstance(piece, str)]
            if unknown := [name for name, _ in calls if name not in tools]:
                raise AssertionError(f"FakeChat was to call {unknown[0]!r}, and the request offers {list(tools)}")
            text = "".join(piece for piece in pieces if isinstance(piece, str))
            text += written_calls(self.planner.tool_format, calls) if calls else ""
            ids = self._text.encode(text, add_special_tokens=False)
            self._executor.outputs[ticket] = [*ids, *self.info.eos_token_ids]
        return prepared

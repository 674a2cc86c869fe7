"""`AsyncEngineDecisions`: LangChain's decision model over an in-process engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from langchain_core.decisions import BaseDecisionModel, ClassifierResponse, Question, State
except ImportError as error:
    raise ImportError("decisions need langchain-core 1.8 or newer: pip install -U langchain-core") from error
from langchain_core.messages import BaseMessage, is_data_content_block
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict

from asyncengine import Decision
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import openai_shape
from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.langchain.messages import PROVIDER, convert_message, usage_metadata
from asyncengine.integrations.vectors import DecisionFields

_MEDIA = {"input_audio", "input_file", "video_url", "audio_url"}
"""Types of OpenAI's media blocks; LangChain knows its own."""


class AsyncEngineDecisions(DecisionFields, BaseDecisionModel):
    """Answers typed questions about a state with probabilities, in chains and middlewares.

    See `DecisionFields` for its fields. Messages anywhere in a state become JSON, that of a user alone its text.
    Pictures go to models that read them; other media and questions for boxes are refused by name. Answers to concurrent
    calls (`abatch`) come from one batch, and each is the same to the bit as alone. Constructing is cheap; the engine is
    that of a `ChatAsyncEngine` of equal settings.

    Example:
        AutoModeMiddleware(tools=[delete_file], classifier=AsyncEngineDecisions(model="Qwen/Qwen3-8B"))
    """

    model_config = ConfigDict(extra="forbid")

    @property
    def _provider(self) -> str:
        return PROVIDER

    def _classify(self, state: State, questions: dict[str, Question]) -> ClassifierResponse:
        with mapped_errors():
            return self._response(self._decide(_state(state), _questions(questions)))

    async def _aclassify(self, state: State, questions: dict[str, Question]) -> ClassifierResponse:
        """The same, awaiting the engine natively."""
        with mapped_errors():
            return self._response(await self._adecide(_state(state), _questions(questions)))

    def _response(self, decision: Decision) -> ClassifierResponse:
        return ClassifierResponse.model_validate(
            {
                "model": self.adapter or self._engines().name,
                "answers": {name: answer.details for name, answer in decision.answers.items()},
                "usage": usage_metadata(decision.usage),
                "request_id": decision.request_id,
            }
        )

    def _traced_config(self, config: RunnableConfig | None) -> RunnableConfig:
        """With the model's name, which the field does not hold where an engine was given."""
        config = super()._traced_config(config)
        config["metadata"]["ls_model_name"] = self.adapter or self._engines().name
        return config


def _state(state: Any) -> Any:
    """The state as JSON data and pictures. Raises `InvalidParameter` for other media."""
    data = _plain(state, "state")
    alone = isinstance(state, BaseMessage) and state.type == "human" and isinstance(data, dict)
    return data["content"] if alone else data


def _questions(questions: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the questions."""
    return {name: _plain(question.model_dump(), f"questions[{name!r}]") for name, question in questions.items()}


def _plain(value: Any, where: str) -> Any:
    """The value with messages as JSON data: a list of several for one that brings results of tools along."""
    if isinstance(value, BaseMessage):
        messages = [_plain(message, where) for message in convert_message(value, where)]
        return messages[0] if len(messages) == 1 else messages
    if isinstance(value, Mapping):
        if (picture := openai_shape.image_part(where, value)) is not None:
            return {"where": where, **picture}
        if value.get("type") in _MEDIA or (is_data_content_block(dict(value)) and value["type"] != "text-plain"):
            raise InvalidParameter(where, f"is of type {value['type']!r}, which is not read: text and pictures are")
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{position}]") for position, item in enumerate(value)]
    return value

"""Fields and methods that the chat model and the text model have in common beyond those of both frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from langchain_core.callbacks import BaseRunManager
from langchain_core.language_models.base import LangSmithParams
from pydantic import Field, SecretStr

from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.fields import OTHER_NAMES, Call, EngineFields
from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.langchain.messages import PROVIDER

MAX_BATCH_THREADS = 256
"""Blocking calls that `batch` keeps waiting at once: as many as an engine runs at once by default."""


class LangChainFields(EngineFields):
    ls_model_type: ClassVar[Literal["chat", "llm"]]
    """The type of model that traces name."""
    streaming: bool = False
    """Produce whole answers through the stream, so that callbacks see tokens in `invoke` as well."""
    max_retries: int | None = None
    """Accepted and ignored: nothing here fails that a retry would mend."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted and ignored: there is no server."""

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """The module name that LangChain's conventions give this package; it stays when files here move."""
        return ["langchain_asyncengine"]

    def to_json(self) -> Any:
        """The record for `dumps`, from which `loads` makes an equal model: all fields that differ from their defaults.

        A model with an engine of its caller's own cannot be written; its record says so when it is loaded.
        """
        if self.engine is not None:
            return self.to_json_not_implemented()  # type: ignore[attr-defined]
        written: Any = super().to_json()  # type: ignore[misc]
        written.get("kwargs", {}).pop("profile", None)  # follows from the other fields
        return written

    @property
    def model_name(self) -> str:
        return self._name()

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that may change an answer: LangChain's caches take it as their key, with a call's keywords on top.

        The base model is not called `model` here: a call's `model=` chooses the adapter, and must not hide the base.
        """
        params = {"model_name": self._engines().name, **self._defaults()}
        if settings := self._settings():
            params["engine_config"] = settings
        if "grammar" in params:  # the repr of a class does not have its fields
            params["grammar"] = Grammar.of(params["grammar"])
        if "stop" in params:  # the base classes put the call's own `stop`, mostly None, under that name
            params["stop_sequences"] = params.pop("stop")
        return params

    def _request(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Call:
        """The request of a call, without `stream`: that is LangChain's switch between `_generate` and `_stream`."""
        return self._call(stop, {name: value for name, value in kwargs.items() if name != "stream"})

    def _in_thread(self, manager: BaseRunManager | None, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keywords of a call, with the thread of its `RunnableConfig` as session where none is named."""
        thread = None if manager is None else manager.metadata.get("thread_id")
        if thread is None or self.session is not None or "session" in self.model_kwargs:
            return kwargs
        return {"session": str(thread), **kwargs}

    def _stream_request(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Call:
        call = self._request(stop, kwargs)
        if call.params.n != 1:
            raise InvalidParameter("n", "must be 1 when streaming", call.params.n)
        return call

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text by the model's own tokenizer. Loads the model."""
        custom: Callable[[str], list[int]] | None = self.custom_get_token_ids  # type: ignore[attr-defined]
        if custom is not None:
            return custom(text)
        with mapped_errors():
            return self._engines().sync().tokenize(text)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """Parameters for tracers. Never raises, as a call with wrong parameters must fail with its own error."""
        values = {**self._defaults(), **{OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}}
        params = LangSmithParams(
            ls_provider=PROVIDER, ls_model_name=self._name(kwargs), ls_model_type=self.ls_model_type
        )
        if isinstance(values.get("temperature"), (int, float)):
            params["ls_temperature"] = values["temperature"]
        if isinstance(values.get("max_tokens"), int):
            params["ls_max_tokens"] = values["max_tokens"]
        stops = stop if stop is not None else values.get("stop")
        if isinstance(stops, (str, list, tuple)) and stops:
            params["ls_stop"] = [stops] if isinstance(stops, str) else list(stops)
        return params

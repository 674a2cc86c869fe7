"""LangChain's conventional module name for `asyncengine.integrations.langchain`."""

from typing import TYPE_CHECKING

from asyncengine.integrations.langchain import (
    AsyncEngineEmbeddings,
    AsyncEngineLLM,
    AsyncEngineReranker,
    ChatAsyncEngine,
    __getattr__,  # noqa: F401 - for AsyncEngineDecisions
)

if TYPE_CHECKING:
    from asyncengine.integrations.langchain import AsyncEngineDecisions

__all__ = ["AsyncEngineDecisions", "AsyncEngineEmbeddings", "AsyncEngineLLM", "AsyncEngineReranker", "ChatAsyncEngine"]

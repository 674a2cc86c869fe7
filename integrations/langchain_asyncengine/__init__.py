"""LangChain's conventional module name for `asyncengine.integrations.langchain`."""

from asyncengine.integrations.langchain import (
    AsyncEngineEmbeddings,
    AsyncEngineLLM,
    AsyncEngineReranker,
    ChatAsyncEngine,
)

__all__ = ["AsyncEngineEmbeddings", "AsyncEngineLLM", "AsyncEngineReranker", "ChatAsyncEngine"]

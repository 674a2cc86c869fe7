"""LangChain's conventional module name for `asyncengine.integrations.langchain`."""

from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine

__all__ = ["AsyncEngineLLM", "ChatAsyncEngine"]

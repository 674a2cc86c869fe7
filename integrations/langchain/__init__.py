"""LangChain: `ChatAsyncEngine` (chat model) and `AsyncEngineLLM` (text completion)."""

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError(
        'the LangChain adapter needs langchain-core; install it with: pip install "asyncengine[langchain]"'
    ) from error

from asyncengine.integrations.langchain.chat_model import ChatAsyncEngine
from asyncengine.integrations.langchain.llm import AsyncEngineLLM

__all__ = ["AsyncEngineLLM", "ChatAsyncEngine"]

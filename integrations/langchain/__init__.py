"""LangChain: `ChatAsyncEngine` (chat model), `AsyncEngineLLM` (text completion), `AsyncEngineEmbeddings`,
`AsyncEngineReranker` (document compressor) and, with langchain-core 1.8 or newer, `AsyncEngineDecisions`."""

from typing import TYPE_CHECKING, Any

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError(
        'the LangChain adapter needs langchain-core; install it with: pip install "asyncengine[langchain]"'
    ) from error

from asyncengine.integrations.langchain.chat_model import ChatAsyncEngine
from asyncengine.integrations.langchain.llm import AsyncEngineLLM
from asyncengine.integrations.langchain.retrieval import AsyncEngineEmbeddings, AsyncEngineReranker

if TYPE_CHECKING:
    from asyncengine.integrations.langchain.decisions import AsyncEngineDecisions


def __getattr__(name: str) -> Any:
    """Import `AsyncEngineDecisions` at its first use: older versions of langchain-core lack its base class."""
    if name != "AsyncEngineDecisions":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asyncengine.integrations.langchain.decisions import AsyncEngineDecisions

    return AsyncEngineDecisions


__all__ = ["AsyncEngineDecisions", "AsyncEngineEmbeddings", "AsyncEngineLLM", "AsyncEngineReranker", "ChatAsyncEngine"]

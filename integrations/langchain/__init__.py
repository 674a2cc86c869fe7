"""LangChain: `ChatAsyncEngine` (chat model), `AsyncEngineLLM` (text completion), `AsyncEngineEmbeddings` and
`AsyncEngineReranker` (document compressor)."""

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError(
        'the LangChain adapter needs langchain-core; install it with: pip install "asyncengine[langchain]"'
    ) from error

from asyncengine.integrations.langchain.chat_model import ChatAsyncEngine
from asyncengine.integrations.langchain.embeddings import AsyncEngineEmbeddings
from asyncengine.integrations.langchain.llm import AsyncEngineLLM
from asyncengine.integrations.langchain.reranker import AsyncEngineReranker

__all__ = ["AsyncEngineEmbeddings", "AsyncEngineLLM", "AsyncEngineReranker", "ChatAsyncEngine"]

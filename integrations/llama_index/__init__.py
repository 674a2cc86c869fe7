"""LlamaIndex: `AsyncEngineLLM`, `AsyncEngineEmbedding` and `AsyncEngineRerank`; selectors, `AsyncEngineRelevance` and
evaluators that decide by probabilities."""

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        'the LlamaIndex adapter needs llama-index-core; install it with: pip install "asyncengine[llama-index]"'
    ) from error

from asyncengine.integrations.llama_index.decisions import (
    AsyncEngineFaithfulnessEvaluator,
    AsyncEngineMultiSelector,
    AsyncEngineRelevance,
    AsyncEngineRelevancyEvaluator,
    AsyncEngineSingleSelector,
)
from asyncengine.integrations.llama_index.llm import AsyncEngineLLM
from asyncengine.integrations.llama_index.retrieval import AsyncEngineEmbedding, AsyncEngineRerank

__all__ = [
    "AsyncEngineEmbedding", "AsyncEngineFaithfulnessEvaluator", "AsyncEngineLLM", "AsyncEngineMultiSelector",
    "AsyncEngineRelevance", "AsyncEngineRelevancyEvaluator", "AsyncEngineRerank", "AsyncEngineSingleSelector",
]  # fmt: skip

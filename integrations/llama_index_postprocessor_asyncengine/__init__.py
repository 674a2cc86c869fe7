"""LlamaIndex's conventional module name (`llama_index.postprocessor.asyncengine`) for the reranker of
`asyncengine.integrations.llama_index`."""

from asyncengine.integrations.llama_index import AsyncEngineRerank

__all__ = ["AsyncEngineRerank"]

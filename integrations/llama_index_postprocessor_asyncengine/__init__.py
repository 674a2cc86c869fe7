"""LlamaIndex's conventional module name (`llama_index.postprocessor.asyncengine`) for the node
postprocessors of `asyncengine.integrations.llama_index`."""

from asyncengine.integrations.llama_index import AsyncEngineRelevance, AsyncEngineRerank

__all__ = ["AsyncEngineRelevance", "AsyncEngineRerank"]

"""LlamaIndex's conventional module name (`llama_index.embeddings.asyncengine`) for the embedding of
`asyncengine.integrations.llama_index`."""

from asyncengine.integrations.llama_index import AsyncEngineEmbedding

__all__ = ["AsyncEngineEmbedding"]

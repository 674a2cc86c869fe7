"""LlamaIndex's conventional module name (`llama_index.llms.asyncengine`) for `asyncengine.integrations.llama_index`."""

from asyncengine.integrations.llama_index import AsyncEngineLLM

__all__ = ["AsyncEngineLLM"]

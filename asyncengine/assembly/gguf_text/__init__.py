"""Tokenizers from the metadata of GGUF files: the vocabulary, the way of cutting, special tokens, chat templates."""

from asyncengine.assembly.gguf_text.build import load_gguf_tokenizer

__all__ = ["load_gguf_tokenizer"]

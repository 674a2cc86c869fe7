"""Tokenizers from the metadata of GGUF files: the vocabulary, the way of cutting, special tokens, chat templates."""

from asyncengine.text.gguf.build import GgufTokenizer, tokenizer_from_gguf
from asyncengine.text.gguf.load import load_gguf_tokenizer

__all__ = ["GgufTokenizer", "load_gguf_tokenizer", "tokenizer_from_gguf"]

"""Texts that a grammar accepts, byte by byte, straight from the library: no engine, no vocabulary."""

from __future__ import annotations

import functools
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import with_rules

from .bytes_tokenizer import END, Bytes


@functools.cache
def tokenizer() -> Any:
    return LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=END + 1, eos_token=[END], slices=[])


@functools.lru_cache(256)
def _compiled(grammar: Grammar) -> Any:
    return LLMatcher(tokenizer(), with_rules(grammar)[0], log_level=0, limits=LLParserLimits(verbose_errors=False))


def matcher(grammar: Grammar) -> Any:
    """A matcher of its own; a grammar is compiled once."""
    return _compiled(grammar).deep_copy()


def complaint(grammar: Grammar) -> str:
    """The reason why it does not compile, ours or the library's; empty if it does."""
    try:
        return str(matcher(grammar).get_error())
    except GrammarError as error:
        return str(error)


def accepts(grammar: Grammar, text: str) -> bool:
    found = matcher(grammar)
    assert not found.is_error(), found.get_error()
    data = list(text.encode())
    return bool(found.try_consume_tokens(data) == len(data) and found.is_accepting())

"""Text around the engine: tokenizers, incremental detokenization, stop strings and chat templates."""

from asyncengine.text.stop_strings import StopAutomaton, StopStringMatcher
from asyncengine.text.streams import Stream
from asyncengine.text.token_table import TokenTable
from asyncengine.text.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["StopAutomaton", "StopStringMatcher", "Stream", "TextTokenizer", "TokenTable", "load_tokenizer"]

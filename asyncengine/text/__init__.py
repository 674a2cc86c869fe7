"""Text around the engine: tokenizers, incremental detokenization, stop strings and chat templates."""

from asyncengine.text.detokenizer import Detokenizer
from asyncengine.text.stop_strings import StopAutomaton, StopStringMatcher
from asyncengine.text.token_table import TokenTable
from asyncengine.text.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["Detokenizer", "StopAutomaton", "StopStringMatcher", "TextTokenizer", "TokenTable", "load_tokenizer"]

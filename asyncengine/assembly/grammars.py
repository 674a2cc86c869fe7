"""The compiler of grammars and the planner of chats, made of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncengine.grammar.settings import GrammarSettings
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.grammar.chat import ChatPlanner
    from asyncengine.grammar.service import GrammarService
    from asyncengine.seams import GrammarCompiler


def make_grammars(
    tokenizer: TextTokenizer | None, ends: Sequence[int], vocab_size: int, config: GrammarSettings
) -> GrammarService | None:
    """Make the compiler of grammars for a model of `vocab_size` tokens, or None where there is no text to constrain.
    `ends`: tokens that end an answer (empty: those that the tokenizer names).

    Takes half a second for a large vocabulary and holds the interpreter lock while it does: part of loading.
    """
    from asyncengine.grammar.llguidance_backend import LlguidanceBackend
    from asyncengine.grammar.service import GrammarService
    from asyncengine.grammar.vocabulary import Vocabulary

    if tokenizer is None or config.grammar_backend == "none":
        return None
    ends = ends or tokenizer.end_token_ids
    if not ends:
        return None
    table = tokenizer.table
    vocabulary = Vocabulary(
        [table.token_bytes(token) for token in range(table.size)], ends, table.special_ids, vocab_size,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )  # fmt: skip
    vocabulary.warm_up()
    return GrammarService(lambda: LlguidanceBackend(vocabulary), config)


def make_planner(
    tokenizer: TextTokenizer | None, grammars: GrammarCompiler | None, config: GrammarSettings
) -> ChatPlanner | None:
    """Make the planner of chats, or None where there is no template for them, or no grammar to hold them to. Renders
    samples of the template: part of loading, too."""
    if tokenizer is None or not tokenizer.has_chat_template or grammars is None:
        return None
    from asyncengine.grammar.chat import ChatPlanner

    return ChatPlanner(tokenizer, config.tool_format)

"""The incremental detokenizer of one request."""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine.text.token_table import TokenTable


class Detokenizer:
    """Turns one output's token ids into text as they come.

    Everything `push` and `finish` return, joined, equals `tokenizer.decode` of all the ids, exactly; nothing emitted is
    ever contradicted later, and no half character is emitted: U+FFFD appears only where the full decoding has it. Text
    that later tokens may still change is held back (see `TokenTable.mode` for which tokenizers hold back what).

    One user at a time; the `table` may be shared by any number of detokenizers and threads.
    """

    __slots__ = ("_stream",)

    def __init__(self, table: TokenTable, skip_special_tokens: bool = True) -> None:
        self._stream = table.stream(skip_special_tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; often "" for a part of a character."""
        return self._stream.push(token_ids)

    def finish(self) -> str:
        """The rest of the text. The detokenizer is spent afterwards."""
        return self._stream.finish()

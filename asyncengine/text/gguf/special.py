"""Tokens that stand for themselves in a text, what is put around a prompt, and what ends an answer."""

from __future__ import annotations

from typing import Any

from asyncengine.text.gguf.metadata import PREFIX, TokenizerHeader, TokenType, broken
from asyncengine.text.gguf.sentencepiece import respelled

END_MARKS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|tool_response>",
    "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "[|endofturn|]",
    "<|end_of_turn|>", "<|flush|>", "<|calls|>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>",
    "<|eos|>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Names that end a turn wherever they are control tokens: a GGUF header has room for three such ids, models have more
(their generation_config.json, which a GGUF does not carry, lists them). From llama.cpp's list and the models' own."""
ENDS_A_MESSAGE_ONLY = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|flush|>", "<|calls|>"}, "<|end|>"))
"""Where a vocabulary has all of the first, the second ends a message inside a turn (gpt-oss, Solar)."""


def vocabulary_of(header: TokenizerHeader) -> dict[str, int]:
    """Token to id, without the fillers by which converters pad a vocabulary to the size of the embedding."""
    return {
        token: index
        for index, (token, kind) in enumerate(zip(respelled(header), header.types, strict=True))
        if kind != TokenType.UNUSED or token != f"[PAD{index}]"
    }


def add_tokens(tokenizer: Any, header: TokenizerHeader, vocabulary: dict[str, int]) -> None:
    """Make control tokens special and user-defined ones whole, under the ids that they have."""
    from tokenizers import AddedToken

    named = {header.ids[name] for name in ("bos", "eos", "unk") if name in header.ids}
    names = respelled(header)
    special, whole = [], []
    for index, kind in enumerate(header.types):
        control = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or index in named
        if not control and kind != TokenType.USER_DEFINED:
            continue
        strip = _takes_spaces_after(header, index)
        if not control:
            whole.append(AddedToken(names[index], normalized=False, special=False, rstrip=strip))
        else:
            special.append(AddedToken(names[index], normalized=False, special=True, rstrip=strip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)
    for token in (*special, *whole):
        if tokenizer.token_to_id(token.content) != vocabulary.get(token.content):
            raise broken(PREFIX + "tokens", f"holds {token.content!r}, which is special but not part of the vocabulary")


def end_ids(header: TokenizerHeader) -> tuple[int, ...]:
    """The ids at which an answer ends: those that the header names, then control tokens known to end a turn."""
    found = [header.ids[name] for name in ("eos", "eot", "eom") if name in header.ids]
    control = {
        token: index
        for index, (token, kind) in enumerate(zip(header.tokens, header.types, strict=True))
        if kind == TokenType.CONTROL
    }
    inner = {mark for others, mark in ENDS_A_MESSAGE_ONLY if others <= control.keys()}
    found += [control[mark] for mark in END_MARKS if mark in control and mark not in inner]
    return tuple(dict.fromkeys(found))


def set_template(tokenizer: Any, header: TokenizerHeader, *, add_bos: bool) -> None:
    """What goes around a prompt where `add_special_tokens` is on; `add_bos` is the family's habit.

    Raises `ModelNotFound` where the header asks for a token that it does not name.
    """
    from tokenizers import processors

    before = _edge(header, "bos", header.add_bos, add_bos)
    after = _edge(header, "eos", header.add_eos, False)
    if header.kind == "gemma4" and "default" in header.chat_templates:
        before = []  # converters set the flag for llama.cpp's sake; the template writes the token itself
    edge = [(header.tokens[index], index) for index in dict.fromkeys((*before, *after))]
    # names stand in for the tokens: the library's notation has no way to write some characters
    names = {index: f"edge{place}" for place, (_, index) in enumerate(edge)}
    single = [*(names[index] for index in before), "$A", *(names[index] for index in after)]
    pair = [*single, *(names[index] for index in before), "$B", *(names[index] for index in after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(names[index], index) for _, index in edge]
    )


def _edge(header: TokenizerHeader, name: str, asked: bool | None, habit: bool) -> list[int]:
    if not (habit if asked is None else asked):
        return []
    if name not in header.ids:
        if asked is None:
            return []
        raise broken(f"{PREFIX}add_{name}_token", f"is set, but there is no {PREFIX}{name}_token_id")
    return [header.ids[name]]


def _takes_spaces_after(header: TokenizerHeader, index: int) -> bool:
    """Phi-3's marks swallow the white space behind them, all but three of them. The header does not say so."""
    if header.architecture != "phi3" or header.kind != "llama":
        return False
    return header.tokens[index] not in ("<unk>", "<s>", "<|endoftext|>")

"""WordPiece from a GGUF header: BERT's way, `tokenizer.ggml.model` "bert". Encoders have it."""

from __future__ import annotations

from typing import Any

from asyncengine.text.gguf.metadata import PREFIX, TokenizerHeader, TokenType, broken
from asyncengine.text.gguf.sentencepiece import SPACE

CONTROL = (TokenType.CONTROL, TokenType.UNKNOWN)
LONGEST_WORD = 100
"""Characters of a word that is looked up; a longer one is unknown (BERT's own limit)."""


def build_wordpiece(header: TokenizerHeader) -> Any:
    """A `tokenizers.Tokenizer` with its special tokens, and the two that go around every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    names = [_as_written(token) for token in header.tokens]
    vocabulary = {name: index for index, name in enumerate(names)}
    if len(vocabulary) != len(names):
        raise broken(PREFIX + "tokens", "holds a token twice, as a word and as a part of one")
    for which in ("unk", "cls", "sep"):
        if which not in header.ids:
            raise broken(PREFIX + "model", f"is 'bert', but the token called {which} is not named")
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab=vocabulary, unk_token=names[header.ids["unk"]], max_input_chars_per_word=LONGEST_WORD,
            continuing_subword_prefix="##",
        )
    )  # fmt: skip
    lowercase = header.lowercase is not False
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=header.strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    control = [names[index] for index, kind in enumerate(header.types) if kind in CONTROL]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in control])
    edge = [("begin", header.ids["cls"]), ("end", header.ids["sep"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["begin", "$A", "end"], pair=["begin", "$A", "end", "$B:1", "end:1"], special_tokens=edge
    )
    return tokenizer


def _as_written(token: str) -> str:
    """A token as vocab.txt has it: converters mark the pieces that begin a word instead of those that go on."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(SPACE) and len(token) > 1 else f"##{token}"

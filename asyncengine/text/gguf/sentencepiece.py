"""BPE over characters with a fallback to bytes: SentencePiece's way, `tokenizer.ggml.model` "llama" and "gemma4"."""

from __future__ import annotations

from typing import Any

from asyncengine.text.gguf.metadata import PREFIX, TokenizerHeader, TokenType, broken

SPACE = "\u2581"
"""What stands for a space in these vocabularies."""
MAX_SPLIT_CHARS = 100_000_000
"""Bound on the characters looked at to find the merges. Gemma's 262,144 tokens take 20 million."""


def build_sentencepiece(header: TokenizerHeader, vocabulary: dict[str, int]) -> Any:
    """A `tokenizers.Tokenizer` without its added tokens, as transformers builds the same model's.

    Llama's (and Mistral's) puts a space before the text, but not after a special token; Phi-3's puts one before every
    stretch of text; Gemma's puts none.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = header.merges or merges_from_scores(vocabulary, _scores(header, vocabulary))
    unknown = header.name_of("unk")
    settings = {"unk_token": unknown} if unknown in vocabulary else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, **settings))
    prefix = header.space_prefix is not False
    if header.is_gemma or header.kind == "gemma4":
        prefix = False
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    elif header.architecture == "phi3" and prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_from_scores(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: every way to make a token of two others, best score first.

    Of equal scores, the longer left part and then the longer right part goes first, so that a run of spaces becomes
    the longest token there is, as SentencePiece makes it; then the token's place in the vocabulary decides. This is
    the order in which transformers derives them: what was converted before it had the rule of lengths differs in runs
    of more spaces than the longest token has.
    """
    found = []
    for place, (token, score) in enumerate(scores.items()):
        ways = []
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                ways.append((-score, -cut, cut - len(token), place, token))
        found += ways
    found.sort()
    return [(token[:-cut], token[-cut:]) for _, cut, _, _, token in found]


def respelled(header: TokenizerHeader) -> list[str]:
    """The tokens as the vocabulary spells them: converters write Gemma's user-defined runs of spaces as spaces."""
    if not header.is_gemma:
        return header.tokens
    return [
        token.replace(" ", SPACE) if kind == TokenType.USER_DEFINED else token
        for token, kind in zip(header.tokens, header.types, strict=True)
    ]


def _scores(header: TokenizerHeader, vocabulary: dict[str, int]) -> dict[str, float]:
    """Each token's score. Converters overwrite those of user-defined tokens, which SentencePiece holds at nought."""
    if not header.scores:
        raise broken(PREFIX + "scores", "is missing, and there are no merges either")
    work = sum(len(token) ** 2 for token in vocabulary)
    if work > MAX_SPLIT_CHARS:
        raise broken(PREFIX + "tokens", f"are too long to find their merges ({work} steps, limit {MAX_SPLIT_CHARS})")
    return {
        token: 0.0 if header.types[index] == TokenType.USER_DEFINED else header.scores[index]
        for token, index in vocabulary.items()
    }

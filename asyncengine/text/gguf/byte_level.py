"""Byte-level BPE from a GGUF header: GPT-2's way, `tokenizer.ggml.model` "gpt2"."""

from __future__ import annotations

from typing import Any

from asyncengine.text.gguf.families import Family, Step
from asyncengine.text.gguf.metadata import TokenizerHeader


def build_byte_level(header: TokenizerHeader, vocabulary: dict[str, int], family: Family) -> Any:
    """A `tokenizers.Tokenizer` without its added tokens. Every token is written in GPT-2's alphabet of bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=header.merges, fuse_unk=False, ignore_merges=family.ignore_merges)
    )
    if family.normalizer:
        tokenizer.normalizer = getattr(normalizers, family.normalizer)()
    tokenizer.pre_tokenizer = _pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(family: Family) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    for step in family.steps:
        match step:
            case Step.WORDS:
                steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
            case Step.DIGIT:
                steps.append(pre_tokenizers.Digits(individual_digits=True))
            case Step.DIGITS:
                steps.append(pre_tokenizers.Digits(individual_digits=False))
            case Step.PUNCTUATION:
                steps.append(pre_tokenizers.Punctuation("contiguous"))
            case pattern:
                steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if Step.WORDS not in family.steps:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)

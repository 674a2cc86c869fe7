"""Random walks through grammars: what a model with random logits would write."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary


def allowed(vocabulary: Vocabulary, matcher: Matcher) -> np.ndarray:
    """Ids the matcher's mask allows."""
    mask = np.zeros(vocabulary.mask_words, dtype=np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocabulary.vocab_size :].any(), "bits beyond the vocabulary"
    return np.flatnonzero(bits)


def walk(
    vocabulary: Vocabulary, matcher: Matcher, budget: int, rng: random.Random, *, jump: bool = True,
    prefer: Collection[int] = (), offers: bool = False,
) -> tuple[list[int], bool]:  # fmt: skip
    """Sample uniformly among what is allowed until the output ends or the budget is spent, or among the allowed ids of
    `prefer`, where there are some, three times of five. `offers`: the model names others where that is asked.

    Returns the tokens and whether the output ended by itself (end of sequence, or nothing may follow).
    """
    tokens: list[int] = []
    while len(tokens) < budget:
        choices = allowed(vocabulary, matcher).tolist()
        assert choices, "a dead end"
        preferred = [token for token in choices if token in prefer]
        others = partial(random.Random(len(tokens)).sample, choices, min(len(choices), 64)) if offers else None
        taken = matcher.accept(rng.choice(preferred if preferred and rng.random() < 0.6 else choices), jump, others)
        tokens += taken
        if matcher.is_terminated():
            return tokens, True
    return tokens, False


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """The text of an output, ends of sequence left out. Raises `UnicodeDecodeError` for half a character."""
    data = b"".join(vocabulary.token_bytes[token] for token in tokens if token not in vocabulary.eos_ids)
    return data.decode()

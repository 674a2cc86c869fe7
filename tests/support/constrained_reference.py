"""Answers that constrained requests must get: a plain loop of model, mask and matcher, without any engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from support.grammar_walks import allowed

from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.testing import FakeModel

Choose = Callable[[list[int], np.ndarray], list[int]]
"""The model: the allowed ids (ascending) to follow the tokens so far, the one it says first."""


def constrained_reference(
    choose: Choose,
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    matcher: Matcher,
    budget: int,
    *,
    jump: bool = True,
    stop_ids: Collection[int] = (),
) -> tuple[list[int], str]:
    """The one right output of a fresh `matcher`, and the reason it ends with."""
    tokens = list(prompt)
    while True:
        first, *others = choose(tokens, allowed(vocabulary, matcher))
        *before, last = matcher.accept(first, jump, partial(list, others))
        for token in before:
            tokens.append(token)
            if token in stop_ids:
                return tokens[len(prompt) :], "stop"
        tokens.append(last)
        output = tokens[len(prompt) :]
        assert len(output) <= budget
        if matcher.is_terminated():
            return output, "stop" if matcher.steered_from is None else "length"
        if last in stop_ids:
            return output, "stop"
        if len(output) == budget:
            return output, "length" if matcher.overrun() is None else "error"


def fake_choice(model: FakeModel, seed: int = 0) -> Choose:
    """The fake runner's choice: the allowed ids from the model's own token upwards, in a circle."""

    def choose(tokens: list[int], ids: np.ndarray) -> list[int]:
        assert len(ids), "a dead end"
        return [int(each) for each in np.roll(ids, -int(np.searchsorted(ids, model.next_token(tokens, seed))))]

    return choose

"""Proposers of drafts: objects that guess what one request writes next, seeing its text grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.acceptance import LONG, NOTHING, Draft, prior
from asyncengine.speculation.earlier_answers import EarlierAnswers, Namespace
from asyncengine.speculation.lookup import OwnText
from asyncengine.speculation.prediction import Prediction


class Proposer(Protocol):
    """A source of guesses for one request. Its guesses change nothing but time."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """A draft of what follows `tokens`, the request's prompt and output so far; up to `limit` tokens are used."""
        ...


MakeProposer = Callable[[RequestSpec, Sequence[int], Namespace], Proposer]
"""(specification, the request's live list of tokens, namespace whose earlier answers it may see) -> its proposer."""


class LookupProposer:
    """Drafts from the caller's prediction, the request's own text and earlier answers of its namespace."""

    def __init__(self, spec: RequestSpec, tokens: Sequence[int], namespace: Namespace, answers: EarlierAnswers) -> None:
        # ids of pictures need more than 8 bytes; whatever they are, nobody is to write them
        prompt = tuple(max(token, -1) for token in spec.prompt) if spec.images else spec.prompt
        self._sources: list[Callable[[Sequence[int], int], Draft]] = [
            OwnText(prompt, tokens).propose, partial(answers.propose, namespace)
        ]  # fmt: skip
        if spec.prediction:
            self._sources.insert(0, Prediction(spec.prediction, len(prompt)).propose)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """The draft whose first token is likeliest right; no further source is asked where one agrees for long."""
        surest = NOTHING
        for propose in self._sources:
            surest = max(surest, propose(tokens, limit), key=prior)
            if surest.agreed >= LONG:
                break
        return surest

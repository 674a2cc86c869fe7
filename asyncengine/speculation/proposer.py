"""Proposers of drafts: objects that guess what one request writes next, seeing its text grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.acceptance import LONG, NOTHING, Draft, Source, is_surer
from asyncengine.speculation.earlier_answers import EarlierAnswers, Namespace
from asyncengine.speculation.lookup import FixedIndex, GrowingIndex, Place, agreement, best_draft, follow
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

    def __init__(
        self, spec: RequestSpec, tokens: Sequence[int], namespace: Namespace, answers: EarlierAnswers | None
    ) -> None:
        # ids of pictures need more than 8 bytes; whatever they are, nobody is to write them
        self._prompt_tokens = tuple(max(token, -1) for token in spec.prompt) if spec.images else spec.prompt
        self._namespace = namespace
        self._answers = answers
        self._prompt: FixedIndex | None = None
        self._output = GrowingIndex(tokens, max(0, len(spec.prompt) - 2))
        self._followed: tuple[Place, int] | None = None
        """The place that was followed last, and the length of the text then."""
        self._prediction = Prediction(spec.prediction, len(spec.prompt)) if spec.prediction else None

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        found = NOTHING if self._prediction is None else self._prediction.propose(tokens, limit)
        if len(tokens) < 2 or (found.tokens and found.agreed >= LONG):
            return found
        own = self._own_text(tokens, limit)
        if is_surer(own, found):
            found = own
        if self._answers is not None and not (found.tokens and found.agreed >= LONG):
            earlier = self._answers.propose(self._namespace, tokens, limit)
            if is_surer(earlier, found):
                found = earlier
        return found

    def _own_text(self, tokens: Sequence[int], limit: int) -> Draft:
        """A draft from prompt and output, where the last two tokens, or else the last one, stood before."""
        if self._prompt is None:  # not before the first draft: a request that ends with its first token needs none
            self._prompt = FixedIndex(self._prompt_tokens)
        self._output.catch_up()
        if self._followed is not None:
            # a copy that is still going on need not be looked up again
            (text, position), length = self._followed
            place = text, position + len(tokens) - length
            if place[1] < len(text) and agreement(tokens, place, LONG) >= LONG:
                return Draft(follow(place, limit), Source.OWN_TEXT, LONG)
        first, second = tokens[-2], tokens[-1]
        texts = (self._prompt, self._output)
        places: list[Place] = [(text.tokens, place) for text in texts for place in text.behind_pair(first, second)]
        if not places:
            places = [(text.tokens, place) for text in texts for place in text.behind(second)]
        found, followed = best_draft(tokens, places, limit)
        self._followed = None if followed is None else (followed, len(tokens))
        return found

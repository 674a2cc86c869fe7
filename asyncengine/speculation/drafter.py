"""Who drafts for a request: a source of guesses that sees its text grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.corrections import Corrections
from asyncengine.speculation.evidence import LONG, USUAL, Evidence
from asyncengine.speculation.lookup import NOTHING, Draft, FixedIndex, GrowingIndex, Match, Place, best_place
from asyncengine.speculation.prediction import Prediction
from asyncengine.speculation.records import Habits, Record
from asyncengine.speculation.store import Namespace, OutputStore

_SUREST, _NAMED = max(USUAL), USUAL[Evidence.NAMED]


class Drafter(Protocol):
    """Guesses for one request. What it guesses changes nothing but time."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """What may follow `tokens`, the request's prompt and output so far; up to `limit` tokens, any number."""
        ...


MakeDrafter = Callable[[RequestSpec, Sequence[int], Namespace], Drafter]
"""(specification, the request's live list of tokens, what must match for others' text to be used)."""


class LookupDrafter:
    """From the request's own text, what its caller predicts, and finished outputs of its namespace."""

    def __init__(
        self,
        spec: RequestSpec,
        tokens: Sequence[int],
        namespace: Namespace,
        store: OutputStore | None,
        habits: Habits | None = None,
    ) -> None:
        """`habits`: of the namespace's earlier records; None: of this request's alone."""
        self._spec = spec
        self._namespace = namespace
        self._store = store
        self._habits = habits or Habits()
        self._prompt: FixedIndex | None = None
        self._record: Record | None = None
        self._output = GrowingIndex(tokens, max(0, len(spec.prompt) - 2))
        self._recent: deque[int] = deque(maxlen=8)
        """Positions in the prompt behind the last places that were followed."""
        self._followed: tuple[Match, int] | None = None
        """The place that was followed last, and the length of the text then."""
        self._lent: tuple[Place, int] | None = None
        """The place in an earlier output that was found last, and the length of the text then."""
        self._corrections = Corrections(len(spec.prompt), None if habits is None else habits.copies)
        predicted = spec.prediction
        self._prediction = Prediction(predicted, len(spec.prompt)) if predicted else None

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        found = NOTHING
        if self._prediction is not None:
            found = self._prediction.propose(tokens, limit)
            if found.evidence is Evidence.FOLLOWED:
                return found
        if len(tokens) < 2:
            return found
        sure = USUAL[found.evidence] if found.tokens else 0.0
        own = self._own(tokens)
        own_sure = 0.0 if own is None else USUAL[own.evidence]
        if self._store is not None and own_sure < _SUREST and sure < _SUREST:
            others = self._others(self._store, tokens)
            if others is not None and USUAL[others.evidence] > own_sure and USUAL[others.evidence] > sure:
                return self._named(self._store.follow(self._namespace, others, tokens, limit), tokens, limit)
        if own is not None and own_sure > sure:
            assert self._record is not None
            found = self._corrections.mend(own.draft(limit), tokens, self._record)
        return found if found.predicted else self._named(found, tokens, limit)

    def _others(self, store: OutputStore, tokens: Sequence[int]) -> Match | None:
        """Where an earlier output goes on as this one may: that of the last time, while it is right."""
        followed: Place | None = None
        if self._lent is not None:
            (text, position), length = self._lent
            followed = text, position + len(tokens) - length
        found = store.match(self._namespace, tokens, followed)
        self._lent = None if found is None else (found.place, len(tokens))
        return found

    def _named(self, draft: Draft, tokens: Sequence[int], limit: int) -> Draft:
        """`draft` up to where a name of a record begins or has ended, and what comes there."""
        assert self._record is not None
        begins = self._habits.begins
        if not begins:
            return draft
        text = (tokens[-2], tokens[-1], *draft.tokens[: limit - 1])
        if begins.keys().isdisjoint(text):
            return draft
        for place, (before, last) in enumerate(pairwise(text)):
            if (last in begins or before in begins) and self._is_open(draft, place):
                names = self._record.following(last, before, len(tokens) + place)
                if names:
                    if draft.tokens[place : place + len(names)] == names:
                        return draft
                    return draft.joined(place, names[: limit - place], Evidence.NAMED)
        return draft

    @staticmethod
    def _is_open(draft: Draft, place: int) -> bool:
        """Does the draft end at `place`, or rest there on less than a name would?"""
        return place >= len(draft.tokens) or USUAL[draft.rests_at(place)] < _NAMED

    def _own(self, tokens: Sequence[int]) -> Match | None:
        """Where in prompt and output the last two tokens, or else the last one, stood before."""
        if self._prompt is None:  # when it is first needed: a request that ends with its first token needs none
            self._prompt = FixedIndex(self._spec.prompt)
            self._record = Record(self._habits, self._prompt)
        assert self._record is not None
        self._record.learn(tokens)
        self._output.catch_up()
        self._corrections.learn(tokens)
        if (copy := self._still_copied(tokens)) is not None:
            return copy
        prompt, output = self._prompt, self._output
        first, second = tokens[-2], tokens[-1]
        places = [(text.tokens, position) for text in (prompt, output) for position in text.behind_pair(first, second)]
        if not places:
            places = [(text.tokens, position) for text in (prompt, output) for position in text.behind(second)]
        found = best_place(tokens, places, self._recent) if places else None
        if found is not None and found.place[0] is prompt.tokens:
            self._recent.append(found.place[1])
        if found is not None and found.evidence is Evidence.TOKEN and found.place[0] is not prompt.tokens:
            found = found._replace(evidence=Evidence.WRITTEN)
        self._followed = None if found is None else (found, len(tokens))
        return found

    def _still_copied(self, tokens: Sequence[int]) -> Match | None:
        """The place that was followed last, if all tokens since, some of them, stand there: nothing is to be looked
        up."""
        if self._followed is None:
            return None
        ((text, position), _, common), length = self._followed
        position += len(tokens) - length
        if len(tokens) < length + LONG or tuple(text[position - LONG : position]) != tuple(tokens[-LONG:]):
            return None
        common -= len(tokens) - length
        found = Match((text, position), Evidence.ALIKE if common > 0 else Evidence.LONG, max(0, common))
        self._followed = found, len(tokens)
        return found if position < len(text) else None

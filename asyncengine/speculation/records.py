"""Records whose fields are named in the prompt: `Give me title, time` becomes `{"title": "...", "time": "..."}`.

No place in the prompt goes on as the answer does, but its names come in the prompt's order, each between the same
tokens. So once a name has ended, what stands behind names is to be expected; and once a value has ended, the next name.
Nothing here knows JSON: which tokens stand around names is learnt from answers, and with it where the names are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from asyncengine.speculation.corrections import Counts
from asyncengine.speculation.lookup import FixedIndex

_BETWEEN = 5
"""Tokens between two names of a list, at most."""
_NAME = 4
"""Tokens of a name, at most."""
_KINDS = 8
_NAMES = 256
"""Names of which it is known what comes behind them."""

_Kind = TypeVar("_Kind", bound=Hashable)


class Tally(Generic[_Kind]):
    """How often something was seen where it was looked for, less how often it was not. Of a few kinds."""

    def __init__(self, told: Callable[[_Kind], None] = lambda kind: None) -> None:
        """`told` whose count has changed."""
        self._counts: dict[_Kind, int] = {}
        self._told = told
        self.usual: _Kind | None = None
        """The most frequent one, the latest of equals."""

    def add(self, kind: _Kind, more: int = 1) -> None:
        counts = self._counts
        known = counts.pop(kind, 0)
        count = min(known + more, _KINDS)
        if count > 0:
            counts[kind] = count  # the latest last
        if len(counts) > _KINDS:
            rarest = min(counts, key=counts.__getitem__)
            del counts[rarest]
            self._told(rarest)
        if self.usual is None or (more < 0 and kind == self.usual):
            self.usual = max(reversed(counts), key=counts.__getitem__, default=None)
        elif count >= counts[self.usual]:
            self.usual = kind
        if count != known:
            self._told(kind)

    def __getitem__(self, kind: _Kind) -> int:
        return self._counts.get(kind, 0)

    def __iter__(self) -> Iterator[_Kind]:
        """The latest first."""
        return reversed(self._counts)


def _keep(table: dict[int, int], key: int, value: int, most: int) -> None:
    """As its latest entry, of `most`."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]


class Habits:
    """What requests of one namespace are like: what stands around names, and where copies end."""

    def __init__(self) -> None:
        self.before: Tally[int] = Tally(self._weigh)
        """In answers."""
        self.behind: Tally[int] = Tally(self._weigh)
        self.between: Tally[tuple[int, ...]] = Tally()
        """From one name to the next, in prompts."""
        self.copies = Counts()
        self.begins: dict[int, None] = {}
        """Tokens that names come behind. Known without a look at the tallies, as it is asked for each token."""
        self.ends: dict[int, None] = {}
        """Tokens that come behind names."""
        self.after: dict[int, int] = {}
        """Of the last token of a name, what came behind it the last time: a number stands in no quotation marks."""
        self.closes: dict[int, int] = {}
        """Of a token that names come behind, what came in its place where there was no further name."""
        self.opens: dict[int, int] = {}
        """The other way round."""
        self.parts: dict[int, int] = {}
        """Of a token that comes behind names, what parted the value behind it from the next name the last time."""

    def note_end(self, name: int, token: int) -> None:
        """`token` came behind a name, of which `name` is the last token."""
        _keep(self.after, name, token, _NAMES)

    def note_instead(self, usual: int, token: int) -> None:
        """At the end of a value `token` came where `usual` came before."""
        if (usual in self.begins) == (token in self.begins) or usual in self.ends or token in self.ends:
            return
        begin, close = (usual, token) if usual in self.begins else (token, usual)
        _keep(self.closes, begin, close, _KINDS)
        _keep(self.opens, close, begin, _KINDS)

    def _weigh(self, token: int) -> None:
        """Is it one that names come behind, or one that comes behind names?"""
        before, behind = self.before[token], self.behind[token]
        for tokens, holds in ((self.begins, before > behind), (self.ends, behind > before)):
            if holds:
                tokens[token] = None
            else:
                tokens.pop(token, None)


class _Step(NamedTuple):
    """From one name of a list to the next."""

    between: int
    """Tokens between them."""
    first: int
    """The place in the prompt behind the one."""
    second: int
    """And behind the other."""


class Record:
    """Of one request: which name came last, and so what comes next."""

    def __init__(self, habits: Habits, prompt: FixedIndex) -> None:
        self._habits = habits
        self._prompt = prompt
        self._begin = self._seen = len(prompt.tokens)
        self._ends: Sequence[int] = ()
        """Places in the prompt behind the last name: several, while it is not known which was meant."""
        self._name: tuple[int, ...] | None = None
        """The name that comes next, () for none; None: it has not been looked for."""
        self._listed = False
        """It is known here what stands between two names of the prompt."""
        self._value: int | None = None
        """The token that came behind the last name, if its value has not ended; else None."""
        self._last: dict[int, int] = {}
        """Token -> where it stood last in the answer."""
        self._guess: tuple[int, int, int] | None = None
        """(place, the token that is to be there, the one before it) of what was last said to follow."""

    def learn(self, tokens: Sequence[int]) -> None:
        """`tokens`: prompt and output so far."""
        if self._guess is not None and self._guess[0] < len(tokens):
            self._check(tokens, *self._guess)
            self._guess = None
        habits, last = self._habits, self._last
        for place in range(self._seen, len(tokens)):
            token = tokens[place]
            if place > self._begin:
                if token in habits.ends:
                    self._value = token
                    self._end_name(tokens, place)
                elif token in habits.begins:
                    if self._value is not None:
                        _keep(habits.parts, self._value, token, _KINDS)
                    self._value = None
                elif token in last and token not in habits.begins and tokens[last[token] - 1] != tokens[place - 1]:
                    self._compare(tokens, last[token], place)
            last[token] = place
        self._seen = len(tokens)

    def _check(self, tokens: Sequence[int], place: int, guess: int, before: int) -> None:
        """Where nothing of the kind came, it is less to be expected."""
        if tokens[place - 1] != before or tokens[place] == guess:
            return
        habits = self._habits
        if before in habits.begins:
            habits.before.add(before, -1)
        elif tokens[place] not in habits.ends:
            habits.behind.add(guess, -1)

    def _compare(self, tokens: Sequence[int], before: int, place: int) -> None:
        """The same token stands at both places, behind others: behind names of one list, in the prompt of which it does
        not stand?"""
        if before <= self._begin:
            return
        text, token = self._prompt.tokens, tokens[place]
        latest = self._prompt.behind(tokens[place - 1])
        for second in latest:
            if text[second] != token:
                break
        else:
            return  # none is there, or it is a copy
        first = self._prompt.behind(tokens[before - 1])
        found = self._step(first, latest, tokens, place)
        if found is not None and token not in (text[found.first], text[found.second]):
            self._habits.before.add(tokens[before - 2])
            self._ends = first
            self._end_name(tokens, place)

    def _step(self, ends: Sequence[int], latest: Sequence[int], tokens: Sequence[int], place: int) -> _Step | None:
        """From one of `ends` to the name before `place`, which may end at one of the `latest`: the shortest."""
        found: _Step | None = None
        for second in latest:
            for first in ends:
                if 1 < second - first <= _BETWEEN + _NAME:
                    between = second - first - self._size(tokens, place, second, second - first - 1)
                    if between <= _BETWEEN and (found is None or (between, first, second) < found):
                        found = _Step(between, first, second)
        return found

    def _size(self, tokens: Sequence[int], place: int, behind: int, most: int) -> int:
        """Tokens of the name before `place`, which ends before `behind` in the prompt."""
        text, size, most = self._prompt.tokens, 1, min(most, _NAME)
        while size < most and tokens[place - 1 - size] == text[behind - 1 - size]:
            size += 1
        return size

    def _end_name(self, tokens: Sequence[int], place: int) -> None:
        """A name ends before `place`, if anything does."""
        self._name = None
        latest = self._prompt.behind(tokens[place - 1])
        found = self._step(self._ends, latest, tokens, place)
        if found is None:
            if self._ends:
                self._habits.behind.add(tokens[place], -1)
            self._ends = latest
            return
        start = place - (found.second - found.first - found.between)
        if start > self._begin:
            self._habits.before.add(tokens[start - 1])
        self._habits.behind.add(tokens[place])
        self._habits.note_end(tokens[place - 1], tokens[place])
        self._listed = True
        self._habits.between.add(tuple(self._prompt.tokens[found.first : found.first + found.between]))
        self._ends = [found.second]

    def following(self, last: int, before: int, place: int) -> tuple[int, ...]:
        """What comes at `place`, behind the token `last`, which stands behind `before`: the next name and what is
        behind names, or this alone, or nothing if neither is known."""
        habits = self._habits
        end = habits.behind.usual
        if end is None:
            return ()
        found: tuple[int, ...] = ()
        if last in habits.begins:
            name = self._following_name()
            found = (*name, habits.after.get(name[-1], end)) if name else ()
        elif before in habits.begins and self._is_name(last):
            found = (habits.after.get(last, end),)
        if found:
            self._guess = place, found[0], last
        return found

    def note_instead(self, usual: int, token: int) -> None:
        """`token` came where `usual` came in the place of a copied one before."""
        self._habits.note_instead(usual, token)

    def corrected(self, token: int) -> int | None:
        """Where `token` came in the place of a copied one before: what does now. None: the copy goes on, for there was
        the end of a name and here is none, or of a value."""
        habits = self._habits
        if token in habits.ends:
            return None if self._value is not None else token
        begins = token in habits.begins
        if not begins and token not in habits.opens:
            return token
        if self._value is None:
            return None if self._listed else token
        parting = habits.parts.get(self._value, habits.opens.get(token, token))
        if self._following_name():
            return parting
        return habits.closes.get(parting, token) if self._listed else token

    def _following_name(self) -> tuple[int, ...]:
        if self._name is None:
            self._name = self._next_name()
        return self._name

    def _next_name(self) -> tuple[int, ...]:
        for end in self._ends:
            between = self._between(end)
            if between:
                start = end + len(between)
                name = tuple(self._prompt.tokens[start : start + _NAME + 1])
                return name[: name.index(between[0], 1)] if between[0] in name[1:] else name[:1]
        return ()

    def _between(self, place: int) -> tuple[int, ...]:
        """What the prompt has at `place`, if it is what stands between names; else nothing."""
        text = self._prompt.tokens
        token = text[place]
        for between in self._habits.between:
            if between[0] == token and tuple(text[place : place + len(between)]) == between:
                return between
        return ()

    def _is_name(self, token: int) -> bool:
        """Does it stand where a name of a list ends?"""
        return any(map(self._between, self._prompt.behind(token)))

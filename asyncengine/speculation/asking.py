"""When a draft model is asked: where its guesses are expected to save more time than they take.

Both are known beforehand: what a pass of it takes and what longer steps take is measured when the engine is built
(`costs`), how often its guesses stand is counted (`trust`). Being behind costs as well: what was written while nobody
asked it has to be computed by it first.

Expectations may be wrong, so each request, and all of a namespace together, have a purse of time that asking may lose:
a hundredth or so of what their steps take, and what asking has saved. Where it is empty nobody asks. So a draft model
that is always wrong loses hardly more than that, whatever was expected of it. To catch up with a long prompt takes more
than a purse holds at first: that is done for a long answer, or where earlier answers have saved as much.

One that is not expected to pay is left alone, for growing stretches, and then tried with a single guess.

Time is that of the table, in steps of one token, times the streams that wait for it. No clock: replays agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.draft_pages import DraftPages
from asyncengine.speculation.trust import Trust
from asyncengine.step import Row

CATCH_UP = 128
"""Positions that a row may be behind and still be guessed for in the same step; one that is further behind only gets
nearer by as many."""

_SHARE, _SHARE_BY_ALL = 0.0125, 0.01
"""Of a step's time, that asking may lose: for one request, and of all in a namespace."""
_FIRST, _FIRST_OF_ALL = 0.75, 0.25
"""In the purse of a new request, and of a namespace of which nothing is known."""
_UNUSED, _UNUSED_BY_ALL = 8.0, 1.0
"""Of the share, at most; a namespace's for each stream."""
_KEPT, _KEPT_BY_ALL = 4.0, 64.0
"""Of what was saved, at most: a good beginning pays for no endless rest."""
_MARGIN = 1.02
"""What asking is to be worth, in time without over time with it: less is as likely a mistake."""
_WAIT, _LONGEST = 8.0, 1024.0
"""Time until a draft model that does not pay is tried again: the first one, and the longest. Each is twice the last."""
_PAUSE, _LONGEST_PAUSE = 4, 64
"""Steps in which it is not weighed again what asking is worth, where it is worth nothing: at least, and at most."""
_SHORTEST = 32
"""Tokens that a text is taken to go on for, at least. One that is longer is taken to double."""


class Asked:
    """What is known of a draft model, as far as one request is concerned, or a whole namespace."""

    __slots__ = ("ask", "idle", "others", "pause", "purse", "saved", "trust", "wait")

    def __init__(self, others: Asked | None = None) -> None:
        """`others`: the namespace's; None: this is a namespace's own."""
        self.others = others
        self.trust: Trust = Trust(None if others is None else others.trust)
        self.purse = _FIRST_OF_ALL if others is None else _FIRST
        """Time that may be lost."""
        self.saved = 0.0
        """By asking, less what it took."""
        self.idle = 0.0
        """Time since it was last asked, or in vain."""
        self.wait = _WAIT if others is None else 0.0
        """Until then it is not tried: a namespace's because it was wrong, a request's because it had no answer."""
        self.ask: Ask | None = None
        """Of a request: what it waits for."""
        self.pause = 0
        """Of a request: steps in which nothing needs to be weighed."""

    def passes(self, time: float, streams: int) -> None:
        """A step of `time` for one of `streams`."""
        alone = self.others is None
        self.idle += time / streams if alone else time
        most = _UNUSED_BY_ALL * streams if alone else _UNUSED
        if self.purse < most:
            self.purse = min(most, self.purse + (_SHARE_BY_ALL if alone else _SHARE) * time)

    def settle(self, saved: float) -> None:
        """Asking has saved that time; less than 0: it took it."""
        most = _KEPT_BY_ALL if self.others is None else _KEPT
        self.purse = min(max(most, self.purse), self.purse + saved)
        self.saved = min(_KEPT_BY_ALL, self.saved + saved)


@dataclass(slots=True)
class Ask:
    """What one request asks for in a step, and what that takes."""

    pages: Sequence[int]
    missing: int
    """The first position that the draft model has to compute."""
    known: int
    """Tokens of the request."""
    extra: float
    """For being behind by more than a token."""
    step: float
    """Of the step without guesses."""
    streams: int
    trial: bool = False
    invested: bool = False
    """`extra` is of what others have saved."""
    each: float = 0.0
    """For a guess: its share of the draft model's pass, and its place in the step."""


class Asker(NamedTuple):
    """A row that a draft model may be asked for."""

    place: int
    asked: Asked
    tokens: Sequence[int]
    pages: Sequence[int]
    prompt: int
    """Of `tokens`, those of the prompt."""
    room: int
    """Tokens that may yet come."""
    limit: int
    """Guesses, at most."""


class Offer(NamedTuple):
    """What asking would be worth."""

    rates: Sequence[float]
    """Of as many guesses as are worth asking for, that each is right if those before it are."""
    ask: Ask
    extra: float = 0.0
    """Of `ask.extra`, what one step has to bring."""


class _Ready(NamedTuple):
    """One for whom it may be asked."""

    one: Asker
    rates: Sequence[float]
    due: bool
    """For a trial."""
    ask: Ask


class Step(NamedTuple):
    """One that is being planned, without guesses."""

    tokens: int
    streams: int
    """Tokens that it samples."""


class Asking:
    """Weighs what a draft model is worth, and keeps the books of what it was. Mirrors what its pages hold."""

    def __init__(self, costs: StepCosts, model_costs: StepCosts, pages: DraftPages | None = None) -> None:
        """`model_costs`: of its passes, in the unit of `costs`. `pages`: as nobody has written into them; None: it is
        never behind."""
        self.costs = costs
        self.model_costs = model_costs
        self._pages = pages

    def sees(self, rows: Iterable[Row]) -> None:
        """A step computes `rows`."""
        if self._pages is not None:
            self._pages.overwritten(rows)

    def rests(self, asked: Asked, step: Step) -> bool:
        """A step of a request passes; is it too early to weigh what asking is worth?"""
        time = self.costs.of(step.tokens)
        asked.passes(time, step.streams)
        if asked.others is not None:
            asked.others.passes(time, step.streams)
        if asked.pause:
            asked.pause -= 1
            return True
        return False

    def offers(self, askers: Sequence[Asker], step: Step) -> dict[int, Offer]:
        """What is worth asking for, by place; or else, where it is time for that, for a trial of one guess each."""
        takes = self._least(len(askers), step)
        if not any(self._has_means(one.asked, takes) for one in askers):
            self._pause(askers, [], takes, step)
            return {}
        each = self._pass(max(1, len(askers)))
        ready: list[_Ready] = []
        for one in askers:
            asked, others = one.asked, one.asked.others
            if asked.idle < asked.wait or others is None:
                continue
            rates, due = asked.trust.rates(one.limit), others.idle >= others.wait
            if due or best_gain(self.costs, rates, step, each)[0] >= _MARGIN:
                ready.append(_Ready(one, rates, due, self._begin(one, step)))
        for trial in (False, True):
            left, found = ready, dict[int, Offer]()
            while left:  # the fewer, the more each has to pay of a pass
                found = self._together(left, step, trial)
                if len(found) == len(left):
                    return found
                left = [one for one in left if one.one.place in found]
        self._pause(askers, ready, takes, step)
        return {}

    def _least(self, most: int, step: Step) -> float:
        """What one guess loses if it is wrong, in the best company, of up to `most`."""
        each = min(map(self._pass, range(1, most + 1)))
        return (each + self.costs.of(step.tokens + 1) - self.costs.of(step.tokens)) * step.streams

    @staticmethod
    def _has_means(asked: Asked, takes: float) -> bool:
        """Could it pay for one wrong guess? Else nothing needs to be weighed."""
        return asked.others is not None and takes <= min(asked.purse, asked.others.purse)

    def _pause(self, askers: Sequence[Asker], ready: Sequence[_Ready], takes: float, step: Step) -> None:
        """Nobody asks, and these will not for a while: until there is as much in their purses as they need, and, of
        those that are not `ready`, until it is time for a trial. Others may earn something or be wrong meanwhile, so
        it is no long while."""
        time, extra = self.costs.of(step.tokens), {one.one.place: one.ask.extra * step.streams for one in ready}
        for one in askers:
            asked, others = one.asked, one.asked.others
            if others is None:
                continue
            behind = extra.get(one.place, 0.0)
            needs = takes if behind <= others.saved else takes + behind
            waits = [(needs - asked.purse) / _SHARE, (takes - others.purse) / _SHARE_BY_ALL]
            if one.place not in extra:
                waits += [asked.wait - asked.idle, (others.wait - others.idle) * step.streams]
            asked.pause = int(min(_LONGEST_PAUSE, max(_PAUSE, max(waits) / time)))

    def _begin(self, one: Asker, step: Step) -> Ask:
        known = len(one.tokens)
        missing = known - 1
        if self._pages is not None:
            missing = min(missing, self._pages.first_missing(one.pages, known))
        whole, rest = divmod(known - missing, CATCH_UP)
        of = self.model_costs.of
        extra = max(0.0, whole * of(CATCH_UP) + of(rest) - of(1))
        return Ask(one.pages, missing, known, extra, self.costs.of(step.tokens), step.streams)

    def _together(self, ready: Sequence[_Ready], step: Step, trial: bool) -> dict[int, Offer]:
        """Those of the `ready` for whom it is worth it if it is asked for all, and who have the means."""
        each, found = self._pass(len(ready)), dict[int, Offer]()
        taken: dict[Asked, float] = {}
        for one, rates, due, ask in ready:
            others = one.asked.others
            assert others is not None
            ahead = min(one.room, max(_SHORTEST, len(one.tokens) - one.prompt))
            gain, count = best_gain(self.costs, rates, step, each, ask.extra / max(1, ahead))
            if gain < _MARGIN:
                count = int(trial and due)
            elif trial:
                count = 0
            spent = taken.get(others, 0.0)
            while count and not self._affordable(one.asked, ask, self._takes(ask, count, each, step), spent, trial):
                count -= 1
            if count:
                taken[others] = spent + self._takes(ask, count, each, step)
                ask.trial = trial
                more = sum(rates[:1]) + 1
                found[one.place] = Offer(rates[:count], ask, 0.0 if trial else ask.extra * more / max(1, ahead))
        return found

    def _pass(self, rows: int) -> float:
        """Of each of `rows` that the draft model computes together."""
        return self.model_costs.of(rows) / rows

    def _takes(self, ask: Ask, count: int, each: float, step: Step) -> float:
        """What `count` guesses lose if all are wrong."""
        return (each * count + self.costs.of(step.tokens + count) - ask.step) * ask.streams

    @staticmethod
    def _affordable(asked: Asked, ask: Ask, takes: float, spent: float, trial: bool) -> bool:
        """Is there as much in both purses, of the namespace's of which others have `spent` some?"""
        others = asked.others
        assert others is not None
        if takes > asked.purse or spent + takes > others.purse:
            return False
        extra = ask.extra * ask.streams
        ask.invested = takes + extra > asked.purse
        return not ask.invested or (not trial and extra <= others.saved)

    def asks(self, asked: Asked, ask: Ask, company: int, place: float) -> None:
        """It is asked, for `company` rows in this step; `place`: what a guess takes in the step."""
        ask.each = self._pass(company) + place
        asked.ask = ask

    def learn(self, asked: Asked, made: int, right: int) -> None:
        """It made so many guesses, of which the first `right` ones stood."""
        ask, others = asked.ask, asked.others
        if ask is None or others is None:
            return
        asked.ask = None
        computed = ask.known + made - 1 if made else min(ask.known, ask.missing + CATCH_UP)
        if self._pages is not None and computed > ask.missing:
            self._pages.written(ask.pages, ask.missing, computed)
        extra = ask.extra if made else min(ask.extra, self.model_costs.of(CATCH_UP))
        (others if ask.invested else asked).settle(-extra * ask.streams)
        if not made:
            if ask.known - ask.missing <= CATCH_UP:  # it knows no text as long as this one, or waits for another row
                asked.idle, asked.wait = 0.0, min(_LONGEST, max(1.0, 2 * asked.wait))
            return
        others.idle = 0.0
        asked.wait = 0.0
        saved = right * ask.step - made * ask.each * ask.streams
        asked.settle(saved)
        others.settle(saved)
        asked.trust.learn(made, right)
        if right:
            others.wait = _WAIT
        elif ask.trial:
            others.wait = min(_LONGEST, 2 * others.wait)


def best_gain(
    costs: StepCosts, rates: Sequence[float], step: Step, each: float = 0.0, behind: float = 0.0
) -> tuple[float, int]:
    """The most that a row's guesses are worth, in time without over time with them, and how many they are then.

    `rates`: how likely each is right, if those before it are. `each`: what making one takes. `behind`: what each token
    that comes of it takes beside, for a draft model to catch up."""
    plain = costs.of(step.tokens) / step.streams
    chance = more = 1.0
    best, count = 1.0, 0
    for number, rate in enumerate(rates, 1):
        chance *= rate
        more += chance
        if chance * plain < each:
            break  # neither this one nor a later one brings what it takes
        took = costs.of(step.tokens + number) + each * number + behind * more
        gain = (step.streams - 1 + more) * plain / took
        if gain > best:
            best, count = gain, number
    return best, count

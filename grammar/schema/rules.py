"""Context-free rules as data: made in any order, rid of what leads nowhere, written as Lark."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from asyncengine.errors import GrammarTooLarge

MAX_RULES, MAX_ALTERNATIVES = 20_000, 200_000
MAX_NESTING = 62
"""Brackets open at once where a schema would let them nest without end. A chat's history takes 64 (`MAX_DEPTH` of
`text/chat_messages.py`), some of which are the call's around the value; pydantic reads 200."""


class Repeat(NamedTuple):
    """A rule several times in a row."""

    rule: str
    least: int
    most: int | None


class Members(NamedTuple):
    """The members of an object in any order, at least one, each once: a bit of the rule's parameter for each."""

    pairs: tuple[str, ...]
    """Rules of declared members, those needed first."""
    needed: int
    free: str | None
    """The rule of an undeclared member, which may come any number of times."""
    strange: bool
    """One of these is needed as well."""
    comma: tuple[str, ...]
    one: str
    """A rule of any one of them."""
    least: int = 1
    most: int | None = None
    """Bounds of the number of members, for an object without undeclared ones."""


MAX_KEYS = 58
"""Bits of a parameter that are left beside those that count open brackets."""
_DEPTH_BITS = 6
MAX_INLINED = 32
"""Symbols of a rule that is written in place of its name."""

Symbol = str | Repeat | Members
"""The name of a rule, Lark text that stands for itself, or a repetition. `Members` are the whole of their rule."""


Checkpoint = Callable[[], None]
"""Called now and then by long work; raises when the work is to be given up."""


def proceed() -> None:
    """The `Checkpoint` of work that nobody gives up."""


_BRACKETS: tuple[list[Symbol], ...] = (['"["'], ['"{"'])


class Rules:
    """Alternatives by rule name. A name that is no rule is Lark text."""

    def __init__(self, checkpoint: Checkpoint = proceed) -> None:
        self.alternatives: dict[str, list[list[Symbol]]] = {}
        self._shared: dict[tuple[tuple[Symbol, ...], ...], str] = {}
        self._terminals: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._deep: dict[str, bool] = {}
        self._size = 0
        """Alternatives of all rules."""
        self._checkpoint = checkpoint

    def add(self, name: str, *alternatives: list[Symbol]) -> str:
        """Raises `GrammarTooLarge` beyond `MAX_RULES` and `MAX_ALTERNATIVES`."""
        self._checkpoint()
        self.alternatives.setdefault(name, []).extend(alternatives)
        self._size += len(alternatives)
        if len(self.alternatives) > MAX_RULES or self._size > MAX_ALTERNATIVES:
            limits = f"{MAX_RULES} rules and {MAX_ALTERNATIVES} alternatives in all of them"
            raise GrammarTooLarge("grammar", f"a schema must not exceed {limits}")
        return name

    def new(self, *alternatives: list[Symbol]) -> str:
        return self.add(f"r{len(self.alternatives)}", *alternatives)

    def shared(self, *alternatives: list[Symbol]) -> str:
        """The same for what gets no further alternatives: one name for the same ones."""
        key = tuple(map(tuple, alternatives))
        if key not in self._shared:
            self._shared[key] = self.new(*alternatives)
        return self._shared[key]

    def terminal(self, text: str) -> str:
        """A name for an expression over patterns; the same one for the same expression."""
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")

    def text(self, text: str) -> str:
        """A name for Lark text, such as `%json {...}`, that is written once however often it is used."""
        return self._texts.setdefault(text, f"t{len(self._texts)}")

    def names(self) -> list[tuple[str, str]]:
        """(text, its name) of all terminals and texts."""
        return [*self._texts.items(), *self._terminals.items()]

    def prune(self) -> None:
        """Drop alternatives that never end in a text, and rules without any. Linear."""
        users: dict[str, list[tuple[str, int]]] = {}
        missing: dict[tuple[str, int], int] = {}
        ready: list[str] = []
        ends: dict[str, bool] = {}
        for name, alternatives in self.alternatives.items():
            for index, symbols in enumerate(alternatives):
                needed = _named(_needed, symbols, self.alternatives)
                missing[name, index] = len(needed)
                for rule in needed:
                    users.setdefault(rule, []).append((name, index))
                if not needed:
                    ready.append(name)
        while ready:
            name = ready.pop()
            if name in ends:
                continue
            ends[name] = True
            for user in users.get(name, ()):
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user[0])
        for name, alternatives in self.alternatives.items() if len(ends) < len(self.alternatives) else ():
            kept = [symbols for index, symbols in enumerate(alternatives) if not missing[name, index]]
            self.alternatives[name] = [[p for s in symbols if (p := _possible(s, ends))] for symbols in kept]

    def inline(self, start: str) -> None:
        """Write rules of one alternative in place of their names where those are but a name or used once, and one rule
        for all with the same alternatives. What the library reads, and what is counted, becomes half as long. After
        `prune`; rules that `start` does not lead to are dropped."""
        known, uses = self.alternatives, {start: 1}
        order: dict[str, list[str]] = {}
        """The rules that each leads to. One comes after those that it mentions, but for those that lead back to it."""
        again = {start: True}
        stack = [(start, iter(mentioned := self._mentioned(start)), mentioned)]
        while stack:
            name, left, mentioned = stack[-1]
            for rule, count in left:
                uses[rule] = (before := uses.get(rule, 0)) + count
                if before and rule not in order:
                    again[rule] = True
                elif not before:
                    stack.append((rule, iter(mentioned := self._mentioned(rule)), mentioned))
                    break
            else:
                order[name] = list(dict.fromkeys(rule for rule, _ in mentioned))
                stack.pop()
        self._deep = _endless(order)
        done: dict[str, list[Symbol]] = {}
        same: dict[tuple[tuple[Symbol, ...], ...], str] = {}
        # llguidance 1.9.1 panics where two rules repeat the same one and pass a parameter on to it
        said = itertools.chain.from_iterable(itertools.chain.from_iterable(known[name]) for name in order)
        repeated = {one.rule for one in said if isinstance(one, Repeat) and one.rule in self._deep}
        for name in order:
            known[name] = found = [_spliced(symbols, done) for symbols in known[name]]
            if name in again or name in repeated:
                continue
            first = same.get(key := tuple(map(tuple, found)), "")
            if first and len(body := done.get(first, [first])) == 1:
                done[name] = body
                continue
            same[key] = name
            if len(found) == 1 and not isinstance(found[0][0] if found[0] else None, Members):
                alias = len(found[0]) == 1 and isinstance(found[0][0], str)
                once = uses[name] == 1 and len(found[0]) <= MAX_INLINED and found[0][:1] not in _BRACKETS
                if alias or once:
                    done[name] = found[0]
        self.alternatives = {
            name: [_spliced(symbols, done) for symbols in known[name]] for name in reversed(order) if name not in done
        }

    def _mentioned(self, name: str) -> list[tuple[str, int]]:
        """The rules in a rule, and for each the times it may be written there in place of its name: once, or not."""
        return [
            (rule, 1 if isinstance(one, str) else MAX_INLINED)
            for one in itertools.chain.from_iterable(self.alternatives[name])
            for rule in ((one,) if isinstance(one, str) else (*_rules(one), *_needed(one)))
            if rule in self.alternatives
        ]

    def lark(self, start: str) -> str:
        """Lark text. After `inline`, and only if `start` has alternatives left."""
        order, deep = self.alternatives, self._deep
        passing = dict.fromkeys(deep, "_")
        passing |= {name: "_" if name in deep else "0" for name in order if self._members(name)}
        lines = [f"start: {start}{'::0' if start in deep else ''}"]
        for name in order:
            if members := self._members(name):
                lines += _in_any_order(name, members, deep)
                continue
            unique = dict.fromkeys(_alternative(symbols, passing) for symbols in self.alternatives[name])
            lines.append(f"{name}{'::_' if name in deep else ''}: {' | '.join(unique)}")
        lines += [f"{name}: {text}" for text, name in self.names()]
        return "\n".join(lines) + "\n"

    def _members(self, name: str) -> Members | None:
        first = self.alternatives[name][0][:1] if self.alternatives[name] else []
        return first[0] if first and isinstance(first[0], Members) else None


def _spliced(symbols: list[Symbol], inlined: Mapping[str, list[Symbol]]) -> list[Symbol]:
    def named(name: str) -> str:
        body = inlined.get(name, ())
        return body[0] if len(body) == 1 and isinstance(body[0], str) else name

    found: list[Symbol] = []
    for one in symbols:
        if isinstance(one, str):
            found += inlined.get(one, (one,))
        elif isinstance(one, Members):
            free = one.free and named(one.free)
            found.append(one._replace(pairs=tuple(map(named, one.pairs)), free=free, one=named(one.one)))
        else:
            found.append(one._replace(rule=named(one.rule)))
    return found


def _endless(leads: Mapping[str, Sequence[str]]) -> dict[str, bool]:
    """The names whose texts may nest without end, given those that each leads to: what is left when rules are taken out
    one by one that lead to none but rules taken out before."""
    users: dict[str, list[str]] = {name: [] for name in leads}
    for name, rules in leads.items():
        for rule in rules:
            users[rule].append(name)
    waiting = {name: len(rules) for name, rules in leads.items()}
    ready = [name for name in leads if not waiting[name]]
    for name in ready:  # grows while it is walked
        for user in users[name]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return dict.fromkeys((name for name in leads if waiting[name]), True)


def _named(mentioned: Callable[[Symbol], tuple[str, ...]], symbols: list[Symbol], known: Container[str]) -> list[str]:
    """Names in `known` that symbols mention, once each."""
    found: list[str] = []
    for one in symbols:
        for name in (one,) if isinstance(one, str) else mentioned(one):
            if name in known and name not in found:
                found.append(name)
    return found


def repeat(rule: str, least: int, most: int | None, taken: int) -> list[Symbol]:
    """`rule` from `least` times on, `most` being the limit of a list that has `taken` already."""
    top = None if most is None else most - taken
    return [] if top is not None and top <= 0 else [Repeat(rule, least, top)]


def _rules(symbol: Symbol) -> tuple[str, ...]:
    """Rules that it mentions."""
    if isinstance(symbol, Members):
        return (*symbol.pairs, *((symbol.free,) if symbol.free else ()))
    return (symbol.rule if isinstance(symbol, Repeat) else symbol,)


def _needed(symbol: Symbol) -> tuple[str, ...]:
    """Rules without which there is no text."""
    if isinstance(symbol, Members):
        return (*symbol.pairs[: symbol.needed], symbol.one, *((symbol.free or "",) if symbol.strange else ()))
    return () if isinstance(symbol, Repeat) and not symbol.least else _rules(symbol)


def _possible(symbol: Symbol, ends: Container[str]) -> Symbol | None:
    """The part of it that is left when only rules in `ends` are possible; None for a repetition that comes no times."""
    if isinstance(symbol, Members):
        free = symbol.free if symbol.free in ends else None
        return symbol._replace(pairs=tuple(pair for pair in symbol.pairs if pair in ends), free=free)
    return None if isinstance(symbol, Repeat) and symbol.rule not in ends else symbol


def _in_any_order(name: str, members: Members, deep: Container[str]) -> list[str]:
    """Two Lark rules: one more member, and what may follow one. Their parameter has how many brackets are open in its
    low bits, which the members get alone, then a bit for each member that was there."""
    first, (pairs, needed, free, strange, comma, _, least, most) = _DEPTH_BITS, members
    alone, all_of_them = f"::bit_and({(1 << first) - 1})", f"[{first}:{first + len(pairs)}]"
    found = [
        f"{pair}{alone if pair in deep else ''} {name}more::set_bit({bit}) %if bit_clear({bit})"
        for bit, pair in enumerate(pairs, first)
    ]
    done = [f"is_ones([{first}:{first + needed}])"] if needed else []
    if free is not None:
        bit = first + len(pairs)
        found.append(f"{free}{alone if free in deep else ''} {name}more::{f'set_bit({bit})' if strange else '_'}")
        done += [f"bit_set({bit})"] if strange else []
    done += [f"bit_count_ge({all_of_them}, {least})"] if least > 1 else []
    end = f'"" %if and({", ".join([*done, "true", "true"][:2])})'
    # llguidance does not look ahead
    more = "true" if free else f"bit_count_lt({all_of_them}, {len(pairs) if most is None else most})"
    return [f"{name}::_: {' | '.join(found)}", f"{name}more::_: {end} | {' '.join(comma)} {name}::_ %if {more}"]


def _alternative(symbols: list[Symbol], passing: Mapping[str, str]) -> str:
    """Rules in `passing` get a parameter: "_" is how many brackets are open, which an opening bracket raises."""
    bracket = symbols[:1] in _BRACKETS
    text = " ".join(_written(symbol, passing, bracket) for symbol in symbols)
    counts = bracket and any(passing.get(_rules(symbol)[0]) == "_" for symbol in symbols)
    return f"{text} %if lt(_, {MAX_NESTING})" if counts else text or '""'


def _written(symbol: Symbol, passing: Mapping[str, str], bracket: bool) -> str:
    if isinstance(symbol, str) and symbol not in passing:
        return symbol
    (rule,) = _rules(symbol)
    passed = passing.get(rule, "")
    rule += f"::{'incr(_)' if bracket and passed == '_' else passed}" if passed else ""
    if not isinstance(symbol, Repeat):
        return rule
    if symbol.most is None:
        return rule + (f"{{{symbol.least},}}" if symbol.least else "*")
    return f"{rule}{{{symbol.least},{symbol.most}}}"

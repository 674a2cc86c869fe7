"""Context-free rules as data: made in any order, rid of what leads nowhere, written as Lark."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

MAX_RULES = 20_000
MAX_NESTING = 62
"""Brackets open at once where a schema would let them nest without end. A chat's history takes 64 (`MAX_DEPTH` of
`text/chat_messages.py`), some of which are the call's around the value; pydantic reads 200."""


class Repeat(NamedTuple):
    """A rule several times in a row."""

    rule: str
    least: int
    most: int | None


Symbol = str | Repeat
"""The name of a rule, Lark text that stands for itself, or a repetition."""


class Rules:
    """Alternatives by rule name. A name that is no rule is Lark text."""

    def __init__(self) -> None:
        self.alternatives: dict[str, list[list[Symbol]]] = {}
        self._shared: dict[tuple[tuple[Symbol, ...], ...], str] = {}
        self._terminals: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def add(self, name: str, *alternatives: list[Symbol]) -> str:
        self.alternatives.setdefault(name, []).extend(alternatives)
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
                needed = dict.fromkeys(rule for rule in map(_needed, symbols) if rule in self.alternatives)
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
        for name, alternatives in self.alternatives.items():
            kept = [symbols for index, symbols in enumerate(alternatives) if not missing[name, index]]
            self.alternatives[name] = [[s for s in symbols if self._possible(s, ends)] for symbols in kept]

    def _possible(self, symbol: Symbol, ends: dict[str, bool]) -> bool:
        """A repetition that may be left out may be impossible."""
        return not isinstance(symbol, Repeat) or symbol.rule in ends

    def lark(self, start: str) -> str:
        """Lark text of what `start` can reach. After `prune`, and only if `start` has alternatives left."""
        seen = {start: True}
        for name in (order := [start]):  # grows while it is walked
            for symbols in self.alternatives[name]:
                for symbol in symbols:
                    rule = symbol.rule if isinstance(symbol, Repeat) else symbol
                    if rule in self.alternatives and rule not in seen:
                        seen[rule] = True
                        order.append(rule)
        deep = self._endless(order)
        lines = [f"start: {start}{'::0' if start in deep else ''}"]
        for name in order:
            unique = dict.fromkeys(_alternative(symbols, deep) for symbols in self.alternatives[name])
            lines.append(f"{name}{'::_' if name in deep else ''}: {' | '.join(unique)}")
        lines += [f"{name}: {text}" for text, name in self.names()]
        return "\n".join(lines) + "\n"

    def _endless(self, names: list[str]) -> dict[str, bool]:
        """The names whose texts may nest without end: what is left when rules are taken out one by one that lead to
        none but rules taken out before."""
        users: dict[str, list[str]] = {name: [] for name in names}
        waiting: dict[str, int] = {}
        for name in names:
            used = dict.fromkeys(_rule(symbol) for symbols in self.alternatives[name] for symbol in symbols)
            leads = [rule for rule in used if rule in users]
            waiting[name] = len(leads)
            for rule in leads:
                users[rule].append(name)
        ready = [name for name in names if not waiting[name]]
        for name in ready:  # grows while it is walked
            for user in users[name]:
                waiting[user] -= 1
                if not waiting[user]:
                    ready.append(user)
        return dict.fromkeys((name for name in names if waiting[name]), True)


def _rule(symbol: Symbol) -> str:
    return symbol.rule if isinstance(symbol, Repeat) else symbol


def _alternative(symbols: list[Symbol], deep: Container[str]) -> str:
    """Rules in `deep` pass on how many brackets are open: their parameter, which an opening bracket raises."""
    bracket = symbols[:1] in (['"["'], ['"{"'])
    passed = "::incr(_)" if bracket else "::_"
    text = " ".join(_written(symbol, passed if _rule(symbol) in deep else "") for symbol in symbols)
    counts = bracket and any(_rule(symbol) in deep for symbol in symbols)
    return f"{text} %if lt(_, {MAX_NESTING})" if counts else text or '""'


def _needed(symbol: Symbol) -> str:
    """The rule without which there is no text; "" for none."""
    if isinstance(symbol, Repeat):
        return symbol.rule if symbol.least else ""
    return symbol


def _written(symbol: Symbol, passed: str) -> str:
    if not isinstance(symbol, Repeat):
        return symbol + passed
    if symbol.most is None:
        return f"{symbol.rule}{passed}" + (f"{{{symbol.least},}}" if symbol.least else "*")
    return f"{symbol.rule}{passed}{{{symbol.least},{symbol.most}}}"

"""Context-free rules as data: made in any order, rid of what leads nowhere, written as Lark."""

from __future__ import annotations

from typing import NamedTuple

MAX_RULES = 20_000


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
        self._terminals: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def add(self, name: str, *alternatives: list[Symbol]) -> str:
        self.alternatives.setdefault(name, []).extend(alternatives)
        return name

    def new(self, *alternatives: list[Symbol]) -> str:
        return self.add(f"r{len(self.alternatives)}", *alternatives)

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
        lines = [f"start: {start}"]
        for name in order:
            unique = dict.fromkeys(" ".join(map(_written, symbols)) or '""' for symbols in self.alternatives[name])
            lines.append(f"{name}: {' | '.join(unique)}")
        lines += [f"{name}: {text}" for text, name in self.names()]
        return "\n".join(lines) + "\n"


def _needed(symbol: Symbol) -> str:
    """The rule without which there is no text; "" for none."""
    if isinstance(symbol, Repeat):
        return symbol.rule if symbol.least else ""
    return symbol


def _written(symbol: Symbol) -> str:
    if not isinstance(symbol, Repeat):
        return symbol
    if symbol.most is None:
        return f"{symbol.rule}*" if not symbol.least else f"{symbol.rule}{{{symbol.least},}}"
    return f"{symbol.rule}{{{symbol.least},{symbol.most}}}"

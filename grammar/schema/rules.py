"""Context-free rules: shapes and names for them, made in any order, rid of what leads nowhere, printed as Lark."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence

from asyncengine.errors import GrammarTooLarge
from asyncengine.grammar.shapes.nodes import Name, Shape, Terminal, Times, Unordered, peeled

MAX_RULES, MAX_ALTERNATIVES = 20_000, 200_000
MAX_NESTING = 62
"""Brackets open at once where a schema would let them nest without end. A chat's history takes 64 (`MAX_DEPTH` of
`text/chat_messages.py`), some of which are the call's around the value; pydantic reads 200."""
MAX_KEYS = 58
"""Bits of a parameter that are left beside those that count open brackets."""
_DEPTH_BITS = 6
MAX_INLINED = 32
"""Symbols of a rule that is written in place of its name."""

Symbols = list[Shape]
"""A sequence of names, terminals and repetitions of these; `Unordered` is the whole of its rule."""
Checkpoint = Callable[[], None]
"""Called now and then by long work; raises when the work is to be given up."""


def proceed() -> None:
    """The `Checkpoint` of work that nobody gives up."""


class Rules:
    """Names with their alternatives, and terminals, each text once."""

    def __init__(self, checkpoint: Checkpoint = proceed) -> None:
        self.names: list[Name] = []
        self._shared: dict[tuple[tuple[Shape, ...], ...], Name] = {}
        self._terminals: dict[tuple[str, str], Terminal] = {}
        self._deep: dict[Name, bool] = {}
        self._size = 0
        """Alternatives of all rules."""
        self._checkpoint = checkpoint

    def add(self, name: Name, *alternatives: Symbols) -> Name:
        """Raises `GrammarTooLarge` beyond `MAX_RULES` and `MAX_ALTERNATIVES`."""
        self._checkpoint()
        name.options += alternatives
        self._size += len(alternatives)
        if len(self.names) > MAX_RULES or self._size > MAX_ALTERNATIVES:
            limits = f"{MAX_RULES} rules and {MAX_ALTERNATIVES} alternatives in all of them"
            raise GrammarTooLarge("grammar", f"a schema must not exceed {limits}")
        return name

    def new(self, *alternatives: Symbols) -> Name:
        self.names.append(name := Name())
        return self.add(name, *alternatives)

    def shared(self, *alternatives: Symbols) -> Name:
        """The same for what gets no further alternatives: one name for the same ones."""
        key = tuple(map(tuple, alternatives))
        if key not in self._shared:
            self._shared[key] = self.new(*alternatives)
        return self._shared[key]

    def terminal(self, text: str, end: str = "") -> Terminal:
        """A literal, a special token, an expression over patterns, or `%json {...}`; the same one for the same text."""
        if (text, end) not in self._terminals:
            self._terminals[text, end] = Terminal(text, end)
        return self._terminals[text, end]

    def prune(self) -> None:
        """Drop alternatives that never end in a text, and rules without any. Linear."""
        users: dict[Shape, list[tuple[Name, int]]] = {}
        missing: dict[tuple[Name, int], int] = {}
        ready: list[Name] = []
        ends: dict[Shape, bool] = {}
        for name in self.names:
            for index, symbols in enumerate(name.options):
                needed = dict.fromkeys(itertools.chain.from_iterable(map(_needed, symbols)))
                rules = [rule for rule in needed if isinstance(rule, Name)]
                missing[name, index] = len(rules)
                for rule in rules:
                    users.setdefault(rule, []).append((name, index))
                if not rules:
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
        for name in self.names if len(ends) < len(self.names) else ():
            kept = [symbols for index, symbols in enumerate(name.options) if not missing[name, index]]
            name.options = [[symbol for symbol in symbols if _possible(symbol, ends)] for symbols in kept]

    def inline(self, start: Name) -> None:
        """Write rules of one alternative in place of their names where those are but a name or used once, and one rule
        for all with the same alternatives. What the library reads, and what is counted, becomes half as long. After
        `prune`; rules that `start` does not lead to are dropped."""
        uses = {start: 1}
        order: dict[Name, list[Name]] = {}
        """The rules that each leads to. One comes after those that it mentions, but for those that lead back to it."""
        again = {start: True}
        stack = [(start, iter(mentioned := _mentioned(start)), mentioned)]
        while stack:
            name, left, mentioned = stack[-1]
            for rule, count in left:
                uses[rule] = (before := uses.get(rule, 0)) + count
                if before and rule not in order:
                    again[rule] = True
                elif not before:
                    stack.append((rule, iter(mentioned := _mentioned(rule)), mentioned))
                    break
            else:
                order[name] = list(dict.fromkeys(rule for rule, _ in mentioned))
                stack.pop()
        self._deep = _endless(order)
        done: dict[Shape, Symbols] = {}
        same: dict[tuple[tuple[object, ...], ...], Name] = {}
        # llguidance 1.9.1 panics where two rules repeat the same one and pass a parameter on to it
        said = itertools.chain.from_iterable(itertools.chain.from_iterable(name.options) for name in order)
        repeated = {one.body for one in said if isinstance(one, Times) and one.body in self._deep}
        for name in order:
            name.options = found = [_spliced(symbols, done) for symbols in name.options]
            if name in again or name in repeated:
                continue
            first = same.get(key := tuple(tuple(map(_key, symbols)) for symbols in found))
            if first is not None and len(body := done.get(first, [first])) == 1:
                done[name] = body
                continue
            same[key] = name
            if len(found) == 1 and not _unordered(name):
                alias = len(found[0]) == 1 and not isinstance(found[0][0], Times)
                once = uses[name] == 1 and len(found[0]) <= MAX_INLINED and not _opens(found[0])
                if alias or once:
                    done[name] = found[0]
        self.names = [name for name in reversed(order) if name not in done]
        for name in self.names:
            name.options = [_spliced(symbols, done) for symbols in name.options]

    def lark(self, start: Name) -> str:
        """Lark text. After `inline`, and only if `start` has alternatives left."""
        return _Printer(self.names, self._deep).text(start)


def _needed(symbol: Shape) -> Sequence[Shape]:
    """The shapes without which there is no text of one."""
    if isinstance(symbol, Unordered):
        return [*(symbol.members[index] for index in symbol.needed), symbol.one]
    return ([symbol.body] if symbol.least else []) if isinstance(symbol, Times) else [symbol]


def _possible(symbol: Shape, ends: Container[Shape]) -> bool:
    """Whether a symbol is left when only names in `ends` are possible; members that are not are taken out."""
    if isinstance(symbol, Unordered):
        free = symbol.free if symbol.free in ends else None
        symbol.put([pair for pair in symbol.pairs if pair in ends], free, symbol.comma)
    return not isinstance(symbol, Times) or not isinstance(symbol.body, Name) or symbol.body in ends


def _mentioned(name: Name) -> list[tuple[Name, int]]:
    """The rules in a rule, and for each the times it may be written there in place of its name: once, or not."""
    found: list[tuple[Name, int]] = []
    for one in itertools.chain.from_iterable(name.options):
        inner = (*one.members, *one.comma) if isinstance(one, Unordered) else ()
        inner = (one.body,) if isinstance(one, Times) else inner
        found += [(rule, MAX_INLINED) for rule in inner if isinstance(rule, Name)]
        if isinstance(one, Name):
            found.append((one, 1))
    return found


def _unordered(name: Name) -> Unordered | None:
    first = name.options[0][:1] if name.options else []
    return first[0] if first and isinstance(first[0], Unordered) else None


def _opens(symbols: Symbols) -> bool:
    """A sequence begins with a bracket, so that its rule counts how many are open."""
    return bool(symbols) and isinstance(symbols[0], Terminal) and symbols[0].text in ('"["', '"{"')


def _key(symbol: Shape) -> object:
    return (symbol.body, symbol.least, symbol.most) if isinstance(symbol, Times) else symbol


def _spliced(symbols: Symbols, inlined: Mapping[Shape, Symbols]) -> Symbols:
    def named(shape: Shape) -> Shape:
        body = inlined.get(shape, ())
        return body[0] if len(body) == 1 and isinstance(body[0], (Name, Terminal)) else shape

    for one in symbols:
        if isinstance(one, Unordered):
            one.put(map(named, one.pairs), one.free and named(one.free), [*map(named, one.comma)])
        elif isinstance(one, Times):
            one.body = named(one.body)
    return [part for one in symbols for part in inlined.get(one, (one,))]


def _endless(leads: Mapping[Name, Sequence[Name]]) -> dict[Name, bool]:
    """The names whose texts may nest without end, given those that each leads to."""
    users: dict[Name, list[Name]] = {name: [] for name in leads}
    for name, rules in leads.items():
        for rule in rules:
            users[rule].append(name)
    ending = peeled(leads, leads, users)
    return dict.fromkeys((name for name in leads if name not in ending), True)


def repeat(rule: Name, least: int, most: int | None, taken: int) -> Symbols:
    """`rule` from `least` times on, `most` being the limit of a list that has `taken` already."""
    top = None if most is None else most - taken
    return [] if top is not None and top <= 0 else [Times(rule, least, top)]


class _Printer:
    """Writes rules as Lark. Those in `deep` get a parameter: how many brackets are open, which one more raises."""

    def __init__(self, rules: Sequence[Name], deep: Container[Shape]) -> None:
        self._rules: dict[Shape, str] = {name: f"r{index}" for index, name in enumerate(rules)}
        self._passing: dict[Shape, str] = {
            name: "_" if name in deep else "0" for name in rules if name in deep or _unordered(name)
        }
        self._deep: Container[Shape] = deep
        self._terminals: dict[Terminal, str] = {}

    def text(self, start: Name) -> str:
        lines = [f"start: {self._rules[start]}{'::0' if start in self._deep else ''}"]
        for name in self._rules:
            assert isinstance(name, Name)
            if (members := _unordered(name)) is not None:
                lines += self._in_any_order(self._rules[name], members)
                continue
            unique = dict.fromkeys(map(self._alternative, name.options))
            lines.append(f"{self._rules[name]}{'::_' if name in self._deep else ''}: {' | '.join(unique)}")
        for terminal, said in self._terminals.items():
            lines.append(f"{said.upper() if terminal.end else said}: {terminal.text}")
            lines += [f"{said}[lazy]: {said.upper()} {terminal.end}"] if terminal.end else []
        return "\n".join(lines) + "\n"

    def _alternative(self, symbols: Symbols) -> str:
        bracket = _opens(symbols)
        text = " ".join(self._written(symbol, bracket) for symbol in symbols)
        counts = bracket and any(self._passing.get(_inner(symbol)) == "_" for symbol in symbols)
        return f"{text} %if lt(_, {MAX_NESTING})" if counts else text or '""'

    def _written(self, symbol: Shape, bracket: bool = False) -> str:
        if isinstance(symbol, Times):
            counts = f"{symbol.least},{'' if symbol.most is None else symbol.most}"
            short = {"0,": "*", "0,1": "?"}.get(counts, f"{{{counts}}}")
            return self._written(symbol.body, bracket) + short
        if isinstance(symbol, Terminal):
            if symbol.text[0] in '"<':  # a literal or a special token itself
                return symbol.text
            kind = "t" if symbol.end or symbol.text[0] == "%" else "T"  # a rule's name begins with a small letter
            return self._terminals.setdefault(symbol, f"{kind}{len(self._terminals)}")
        passed = self._passing.get(symbol, "")
        return self._rules[symbol] + (f"::{'incr(_)' if bracket and passed == '_' else passed}" if passed else "")

    def _in_any_order(self, name: str, members: Unordered) -> list[str]:
        """Two Lark rules: one more member, and what may follow one. Their parameter has how many brackets are open in
        its low bits, which the members get alone, then a bit for each member that was there."""
        first, count, free = _DEPTH_BITS, len(members.pairs), members.free
        all_of_them = f"[{first}:{first + count}]"

        def alone(member: Shape) -> str:
            written = self._written(member)
            return written.replace("::_", f"::bit_and({(1 << first) - 1})") if member in self._deep else written

        found = [
            f"{alone(pair)} {name}more::set_bit({bit}) %if bit_clear({bit})"
            for bit, pair in enumerate(members.pairs, first)
        ]
        strange = free is not None and count in members.needed
        needed = len(members.needed) - strange
        done = [f"is_ones([{first}:{first + needed}])"] if needed else []
        if free is not None:
            found.append(f"{alone(free)} {name}more::{f'set_bit({first + count})' if strange else '_'}")
            done += [f"bit_set({first + count})"] if strange else []
        done += [f"bit_count_ge({all_of_them}, {members.least})"] if members.least > 1 else []
        end = f'"" %if and({", ".join([*done, "true", "true"][:2])})'
        # llguidance does not look ahead
        most = count if members.most is None else members.most
        more = "true" if free else f"bit_count_lt({all_of_them}, {most})"
        comma = " ".join(map(self._written, members.comma))
        return [f"{name}::_: {' | '.join(found)}", f"{name}more::_: {end} | {comma} {name}::_ %if {more}"]


def _inner(symbol: Shape) -> Shape:
    return symbol.body if isinstance(symbol, Times) else symbol

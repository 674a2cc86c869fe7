"""Context-free rules, made in any order, then pruned of unproductive ones, simplified, and printed as Lark."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence

from asyncengine.errors import GrammarTooLarge
from asyncengine.grammar.shapes.nodes import Repeat, Rule, Shape, Terminal, Unordered, acyclic_order

MAX_RULES, MAX_ALTERNATIVES = 20_000, 200_000
MAX_NESTING = 62
"""Brackets open at once where a schema would let them nest without end. A chat's history takes 64 (`MAX_DEPTH` of
`text/chat_messages.py`), some of which are the call's around the value; pydantic reads 200."""
MAX_KEYS = 58
"""Bits of a 64-bit parameter that are left beside those that count open brackets."""
_DEPTH_BITS = 6
MAX_INLINED = 32
"""Most symbols of a rule that replaces its only mention."""

Symbols = list[Shape]
"""The right side of a production: rules, terminals and repetitions of these. `Unordered` is always the only one."""
Checkpoint = Callable[[], None]
"""Called regularly during long work; it raises to give the work up."""


def proceed() -> None:
    """A `Checkpoint` that never raises."""


class Rules:
    """The rules of one grammar, and its terminals, each text once."""

    def __init__(self, checkpoint: Checkpoint = proceed) -> None:
        self.all: list[Rule] = []
        self._shared: dict[tuple[tuple[Shape, ...], ...], Rule] = {}
        self._terminals: dict[tuple[str, str], Terminal] = {}
        self._deep: dict[Rule, bool] = {}
        self._size = 0
        """Alternatives of all rules."""
        self._checkpoint = checkpoint

    def add(self, rule: Rule, *alternatives: Symbols) -> Rule:
        """Add productions to `rule` and return it. Raises `GrammarTooLarge` beyond `MAX_RULES`, `MAX_ALTERNATIVES`."""
        self._checkpoint()
        rule.alternatives += alternatives
        self._size += len(alternatives)
        if len(self.all) > MAX_RULES or self._size > MAX_ALTERNATIVES:
            limits = f"{MAX_RULES} rules and {MAX_ALTERNATIVES} alternatives in all of them"
            raise GrammarTooLarge("grammar", f"a schema must not exceed {limits}")
        return rule

    def new(self, *alternatives: Symbols) -> Rule:
        self.all.append(rule := Rule())
        return self.add(rule, *alternatives)

    def shared(self, *alternatives: Symbols) -> Rule:
        """A rule that gets no further alternatives; one rule for equal ones."""
        key = tuple(map(tuple, alternatives))
        if key not in self._shared:
            self._shared[key] = self.new(*alternatives)
        return self._shared[key]

    def terminal(self, text: str, end: str = "") -> Terminal:
        """The terminal of a literal, a special token, an expression of patterns or `%json {...}`; one for a text."""
        return self._terminals.setdefault((text, end), Terminal(text, end))

    def prune(self) -> None:
        """Drop unproductive alternatives, which derive no text, and rules with no other. Linear (Dowling & Gallier)."""
        parents: dict[Shape, list[tuple[Rule, int]]] = {}
        missing: dict[tuple[Rule, int], int] = {}
        ready: list[Rule] = []
        productive: dict[Shape, bool] = {}
        for rule in self.all:
            for index, symbols in enumerate(rule.alternatives):
                needed = dict.fromkeys(itertools.chain.from_iterable(map(_required, symbols)))
                children = [child for child in needed if isinstance(child, Rule)]
                missing[rule, index] = len(children)
                for child in children:
                    parents.setdefault(child, []).append((rule, index))
                if not children:
                    ready.append(rule)
        while ready:
            rule = ready.pop()
            if rule in productive:
                continue
            productive[rule] = True
            for parent in parents.get(rule, ()):
                missing[parent] -= 1
                if not missing[parent]:
                    ready.append(parent[0])
        for rule in self.all if len(productive) < len(self.all) else ():
            possible = [symbols for index, symbols in enumerate(rule.alternatives) if not missing[rule, index]]
            rule.alternatives = [[symbol for symbol in symbols if _prune(symbol, productive)] for symbols in possible]

    def inline(self, start: Rule) -> None:
        """Replace rules of one alternative by it where it is a single symbol or mentioned once, and rules with equal
        alternatives by one of them. What the library reads, and what is counted, becomes half as long. After `prune`;
        rules that `start` does not lead to are dropped."""
        uses = {start: 1}
        order: dict[Rule, list[Rule]] = {}
        """The rules that each mentions, in postorder of a depth-first walk: behind those, except on cycles."""
        cyclic = {start: True}
        stack = [(start, iter(mentioned := _mentioned(start)), mentioned)]
        while stack:
            rule, remaining, mentioned = stack[-1]
            for other, count in remaining:
                uses[other] = (earlier := uses.get(other, 0)) + count
                if earlier and other not in order:
                    cyclic[other] = True
                elif not earlier:
                    stack.append((other, iter(mentioned := _mentioned(other)), mentioned))
                    break
            else:
                order[rule] = list(dict.fromkeys(other for other, _ in mentioned))
                stack.pop()
        self._deep = _recursive(order)
        inlined: dict[Shape, Symbols] = {}
        by_alternatives: dict[tuple[tuple[object, ...], ...], Rule] = {}
        # llguidance 1.9.1 panics where two rules repeat the same one and pass a parameter on to it
        all_symbols = itertools.chain.from_iterable(itertools.chain.from_iterable(rule.alternatives) for rule in order)
        repeated = {symbol.body for symbol in all_symbols if isinstance(symbol, Repeat) and symbol.body in self._deep}
        for rule in order:
            rule.alternatives = alternatives = [_spliced(symbols, inlined) for symbols in rule.alternatives]
            if rule in cyclic or rule in repeated:
                continue
            first = by_alternatives.get(key := tuple(tuple(map(_key, symbols)) for symbols in alternatives))
            if first is not None and len(body := inlined.get(first, [first])) == 1:
                inlined[rule] = body
                continue
            by_alternatives[key] = rule
            if len(alternatives) == 1 and not _unordered(rule):
                alias = len(alternatives[0]) == 1 and not isinstance(alternatives[0][0], Repeat)
                once = uses[rule] == 1 and len(alternatives[0]) <= MAX_INLINED and not _opens(alternatives[0])
                if alias or once:
                    inlined[rule] = alternatives[0]
        self.all = [rule for rule in reversed(order) if rule not in inlined]
        for rule in self.all:
            rule.alternatives = [_spliced(symbols, inlined) for symbols in rule.alternatives]

    def lark(self, start: Rule) -> str:
        """Lark text. After `inline`, and only if `start` has alternatives left."""
        return _Printer(self.all, self._deep).text(start)


def _required(symbol: Shape) -> Sequence[Shape]:
    """The shapes that must be productive for `symbol` to be."""
    if isinstance(symbol, Unordered):
        return [*(symbol.members[index] for index in symbol.needed), symbol.one]
    return ([symbol.body] if symbol.least else []) if isinstance(symbol, Repeat) else [symbol]


def _prune(symbol: Shape, productive: Container[Shape]) -> bool:
    """Whether a symbol is left when only rules in `productive` are. Other members of an `Unordered` are removed."""
    if isinstance(symbol, Unordered):
        free = symbol.free if symbol.free in productive else None
        symbol.put([pair for pair in symbol.pairs if pair in productive], free, symbol.comma)
    return not isinstance(symbol, Repeat) or not isinstance(symbol.body, Rule) or symbol.body in productive


def _mentioned(rule: Rule) -> list[tuple[Rule, int]]:
    """(mentioned rule, weight) in a rule; the weight of those that must not be inlined makes them count as many."""
    mentions: list[tuple[Rule, int]] = []
    for symbol in itertools.chain.from_iterable(rule.alternatives):
        inner = (*symbol.members, *symbol.comma) if isinstance(symbol, Unordered) else ()
        inner = (symbol.body,) if isinstance(symbol, Repeat) else inner
        mentions += [(inner_rule, MAX_INLINED) for inner_rule in inner if isinstance(inner_rule, Rule)]
        if isinstance(symbol, Rule):
            mentions.append((symbol, 1))
    return mentions


def _unordered(rule: Rule) -> Unordered | None:
    first = rule.alternatives[0][:1] if rule.alternatives else []
    return first[0] if first and isinstance(first[0], Unordered) else None


def _opens(symbols: Symbols) -> bool:
    """Whether a production begins with a bracket, so that it counts one more open."""
    return bool(symbols) and isinstance(symbols[0], Terminal) and symbols[0].text in ('"["', '"{"')


def _key(symbol: Shape) -> object:
    return (symbol.body, symbol.least, symbol.most) if isinstance(symbol, Repeat) else symbol


def _spliced(symbols: Symbols, inlined: Mapping[Shape, Symbols]) -> Symbols:
    def named(shape: Shape) -> Shape:
        body = inlined.get(shape, ())
        return body[0] if len(body) == 1 and isinstance(body[0], (Rule, Terminal)) else shape

    for symbol in symbols:
        if isinstance(symbol, Unordered):
            symbol.put(map(named, symbol.pairs), symbol.free and named(symbol.free), [*map(named, symbol.comma)])
        elif isinstance(symbol, Repeat):
            symbol.body = named(symbol.body)
    return [replaced for symbol in symbols for replaced in inlined.get(symbol, (symbol,))]


def _recursive(mentions: Mapping[Rule, Sequence[Rule]]) -> dict[Rule, bool]:
    """The rules whose texts may nest without end: those that lead into a cycle of `mentions`."""
    parents: dict[Rule, list[Rule]] = {rule: [] for rule in mentions}
    for rule, rules in mentions.items():
        for other in rules:
            parents[other].append(rule)
    acyclic = acyclic_order(mentions, mentions, parents)
    return dict.fromkeys((rule for rule in mentions if rule not in acyclic), True)


def repeat(rule: Rule, least: int, most: int | None, taken: int) -> Symbols:
    """`rule`, `least` times or more, in a list of at most `most` items that has `taken` of them already."""
    top = None if most is None else most - taken
    return [] if top is not None and top <= 0 else [Repeat(rule, least, top)]


class _Printer:
    """Writes rules as Lark. Those in `deep` get a parameter that counts the open brackets."""

    def __init__(self, rules: Sequence[Rule], deep: Container[Shape]) -> None:
        self._rules: dict[Shape, str] = {rule: f"r{index}" for index, rule in enumerate(rules)}
        self._passing: dict[Shape, str] = {
            rule: "_" if rule in deep else "0" for rule in rules if rule in deep or _unordered(rule)
        }
        self._deep: Container[Shape] = deep
        self._terminals: dict[Terminal, str] = {}

    def text(self, start: Rule) -> str:
        lines = [f"start: {self._rules[start]}{'::0' if start in self._deep else ''}"]
        for rule in self._rules:
            assert isinstance(rule, Rule)
            if (members := _unordered(rule)) is not None:
                lines += self._in_any_order(self._rules[rule], members)
                continue
            unique = dict.fromkeys(map(self._alternative, rule.alternatives))
            lines.append(f"{self._rules[rule]}{'::_' if rule in self._deep else ''}: {' | '.join(unique)}")
        for terminal, name in self._terminals.items():
            lines.append(f"{name.upper() if terminal.end else name}: {terminal.text}")
            lines += [f"{name}[lazy]: {name.upper()} {terminal.end}"] if terminal.end else []
        return "\n".join(lines) + "\n"

    def _alternative(self, symbols: Symbols) -> str:
        bracket = _opens(symbols)
        text = " ".join(self._written(symbol, bracket) for symbol in symbols)
        counts = bracket and any(self._passing.get(_inner(symbol)) == "_" for symbol in symbols)
        return f"{text} %if lt(_, {MAX_NESTING})" if counts else text or '""'

    def _written(self, symbol: Shape, bracket: bool = False) -> str:
        if isinstance(symbol, Repeat):
            counts = f"{symbol.least},{'' if symbol.most is None else symbol.most}"
            short = {"0,": "*", "0,1": "?"}.get(counts, f"{{{counts}}}")
            return self._written(symbol.body, bracket) + short
        if isinstance(symbol, Terminal):
            if symbol.text[0] in '"<':  # a literal or a special token itself
                return symbol.text
            prefix = "t" if symbol.end or symbol.text[0] == "%" else "T"  # lazy texts and %json are rules to Lark
            return self._terminals.setdefault(symbol, f"{prefix}{len(self._terminals)}")
        passed = self._passing.get(symbol, "")
        return self._rules[symbol] + (f"::{'incr(_)' if bracket and passed == '_' else passed}" if passed else "")

    def _in_any_order(self, name: str, members: Unordered) -> list[str]:
        """Two Lark rules: one for a member, one for what may follow it. Their parameter counts the open brackets in its
        low bits, which alone are passed on to members, and has a bit for each member that came."""
        offset, count, free = _DEPTH_BITS, len(members.pairs), members.free
        all_of_them = f"[{offset}:{offset + count}]"

        def alone(member: Shape) -> str:
            written = self._written(member)
            return written.replace("::_", f"::bit_and({(1 << offset) - 1})") if member in self._deep else written

        alternatives = [
            f"{alone(pair)} {name}more::set_bit({bit}) %if bit_clear({bit})"
            for bit, pair in enumerate(members.pairs, offset)
        ]
        extra = free is not None and count in members.needed
        needed = len(members.needed) - extra
        conditions = [f"is_ones([{offset}:{offset + needed}])"] if needed else []
        if free is not None:
            alternatives.append(f"{alone(free)} {name}more::{f'set_bit({offset + count})' if extra else '_'}")
            conditions += [f"bit_set({offset + count})"] if extra else []
        conditions += [f"bit_count_ge({all_of_them}, {members.least})"] if members.least > 1 else []
        end = f'"" %if and({", ".join([*conditions, "true", "true"][:2])})'
        # a comma is allowed only where a member can follow: llguidance would notice too late, behind it
        most = count if members.most is None else members.most
        more = "true" if free else f"bit_count_lt({all_of_them}, {most})"
        comma = " ".join(map(self._written, members.comma))
        return [f"{name}::_: {' | '.join(alternatives)}", f"{name}more::_: {end} | {comma} {name}::_ %if {more}"]


def _inner(symbol: Shape) -> Shape:
    return symbol.body if isinstance(symbol, Repeat) else symbol

"""A JSON schema as Lark, whose numbers and nesting llguidance would not hold to.

llguidance 1.9.1 counts in doubles: bounds beyond 2**53 are rounded, exclusive decimal bounds are not kept, and the
least int64 makes it recurse without end. Numbers without bounds and values inside one another have no end with it. Its
JSON compiler takes no pattern for a number, so what surrounds the numbers is written here as well: objects, arrays,
choices, references. Strings stay `%json`.

As in its own compiler, properties come in the order of the schema, undeclared keys after them (they may repeat).
What it refuses is counted by rules here (`contains`, numbers of members), or is a grammar with a parameter (sets).
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from asyncengine.errors import GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.lark import literal, regex
from asyncengine.grammar.regexes import looks_ahead
from asyncengine.grammar.schema import members as demands
from asyncengine.grammar.schema.numbers import FRACTION, KEYWORDS
from asyncengine.grammar.schema.one_of import Branches
from asyncengine.grammar.schema.rules import MAX_KEYS, Checkpoint, Rules, Symbols, proceed, repeat
from asyncengine.grammar.schema.terms import MADE, Alternatives, Conjunction, Entry, Term
from asyncengine.grammar.schemas import escape
from asyncengine.grammar.shapes.nodes import Name, Shape, Terminal, Times, Unordered
from asyncengine.grammar.spec import canonical_json

MAX_PREFIX = 500
"""Items with a schema of their own."""
MAX_STATES = 4096
"""Places in a list or an object times what has been counted there."""
MAX_TOGETHER = 3
"""Patterns of names that may hold together."""
Member = tuple[Name, bool]
"""(rule of one member, or of all undeclared ones; needed)"""


class Builder:
    """The rules of the JSON values valid under one schema. Who inherits writes the same values in another notation."""

    def __init__(self, root: dict[str, Any], options: dict[str, Any], checkpoint: Checkpoint = proceed) -> None:
        """`options`: as llguidance's JSON compiler takes them."""
        self.root = root
        self._any_order = options.get("key_order") == "any"
        self.rules = Rules(checkpoint)
        branches = Branches(root)
        self._alternatives = Alternatives(root, branches.of, branches.is_empty, checkpoint)
        self._known: dict[tuple[str, ...], Name] = {}
        self._todo: list[tuple[Name, Conjunction]] = []
        self._tails: dict[tuple[Name, int, int | None], Name] = {}
        """Lists of undeclared members. A repetition stands in one rule only: llguidance 1.9.1 panics where two pass a
        parameter on to the same."""
        self._empty: list[str] = []
        own = {key: options[key] for key in demands.LEAF_OPTIONS if options.get(key)}
        # without that, llguidance 1.9.1 takes any blanks before some of them
        self._leaf_options = {"whitespace_flexible": False, **own}
        usual = None if options.get("whitespace_flexible") is False else r"[ \t\n\r]+"
        blank = usual if (given := options.get("whitespace_pattern")) is None else given
        text = self.rules.terminal
        self._blank: Symbols = [self.rules.new([Times(text(regex(blank)), 0, 1)])] if blank else []
        around = f"(?:{blank})?" if blank else ""
        self._comma, self._colon = (
            [text(regex(around + options.get(key, usually) + around))]
            for key, usually in (("item_separator", ","), ("key_separator", ":"))
        )

    def build(self) -> tuple[Rules, Name]:
        """The rules, and the name of the one for the whole value.

        Raises `GrammarImpossible` naming the bounds that no number keeps, `GrammarUnsupported` for what cannot be
        written, `GrammarTooLarge`, and `GrammarError` for a malformed schema.
        """
        return self._finished(self.node((Entry("", self.root),)))

    def _finished(self, start: Name) -> tuple[Rules, Name]:
        """Make what is left to be made, and rid the rules of what leads nowhere."""
        while self._todo:
            name, conjunction = self._todo.pop()
            for term in self._alternatives.of(conjunction):
                self._term(name, term)
        self.rules.prune()
        if not start.options:
            detail = f"; there is no {self._empty[0]}" if self._empty else ""
            raise GrammarImpossible("grammar", f"no JSON value is valid under this schema{detail}")
        self.rules.inline(start)
        return self.rules, start

    def _around(self, brackets: str, *inside: Shape) -> Symbols:
        """A list or an object of what is `inside`."""
        first, last = (self.rules.terminal(f'"{bracket}"') for bracket in brackets)
        return [first, *self._blank, *inside, *(self._blank if inside else ()), last]

    def _literal(self, text: str) -> Shape:
        return self.rules.terminal(literal(text))

    def node(self, conjunction: Conjunction) -> Name:
        """The rule of what must satisfy all of `conjunction`."""
        followed = map(self._alternatives.followed, conjunction)
        entries = {entry.pointer: entry for entry in followed if entry.schema is not True}
        key = tuple(entries)
        if key not in self._known:
            self._known[key] = self.rules.new()
            self._todo.append((self._known[key], tuple(entries.values())))
        return self._known[key]

    def _term(self, name: Name, term: Term) -> None:
        if term.entries and not term.having(*_SAYING):
            if not term.loops:
                self.rules.add(name, [self.node(())])
            return
        for kind in term.types:
            if kind in ("null", "boolean"):
                for text in self._constants(term, kind):
                    self.rules.add(name, *self._word(text))
            elif kind == "integer" or (kind == "fraction" and "integer" not in term.types):
                if (number := self._number(term)) is not None:
                    self.rules.add(name, [number])
            elif kind == "string":
                self._string(name, term)
            elif kind == "array":
                self._array(name, term)
            elif kind == "object":
                self._object(name, term)

    def _json(self, schema: dict[str, Any]) -> Terminal:
        return self.rules.terminal("%json " + canonical_json({"x-guidance": self._leaf_options, **schema}))

    def _word(self, text: str) -> list[Symbols]:
        """The spellings of "null", "true" or "false"."""
        return [[self._literal(text)]]

    def _constants(self, term: Term, kind: str) -> list[str]:
        """The texts of "null" or a boolean that are left."""
        if kind not in term.types:
            return []
        if kind == "null":
            return ["null"]
        listed = [entry.schema["enum"] for entry in term.having("enum") if entry.plain]
        wrong = [one for entry in term.having("not") if entry.plain for one in entry.schema["not"].get("enum", ())]
        left = [text for text in ("true", "false") if all(json.loads(text) in values for values in listed)]
        return [text for text in left if not any(json.loads(text) is one for one in wrong)]

    # ---------------------------------------------------------------- scalars

    def _number(self, term: Term) -> Terminal | None:
        """None: there is none."""
        if not {"integer", "fraction"}.intersection(term.types):
            return None
        numbers = term.numbers()
        if numbers.empty:
            self._empty.append(f"{numbers} (at {term.where() or '/'})")
            return None
        patterns = numbers.spelling(term.where())
        if isinstance(patterns, dict):
            return self._json(patterns)
        if "integer" not in term.types and numbers.listed is None:
            patterns = (FRACTION,) if numbers.free else (*patterns, FRACTION)
        return self.rules.terminal(" & ".join(map(regex, patterns)))

    def _string(self, name: Name, term: Term) -> None:
        texts = demands.Texts.of(term)
        low, high = texts.bounds
        if high is not None and low > high:
            return
        apart = texts.without or any(looks_ahead(part.get("pattern", "")) for part in texts.parts)
        several = apart or len(texts.parts) > 1
        if len(self._leaf_options) == 1 and (short := texts.plain) is not None:
            self.rules.add(name, [self.rules.terminal(short)])
        elif several and (listed := texts.listed) is not None:
            if listed:
                self.rules.add(name, [self._json({"type": "string", "enum": listed})])
        elif apart or "Unable to determine" in texts.complaint:  # whether any text is left: in Lark it does not ask
            self.rules.add(name, [self.rules.terminal(texts.terminal([], [], []))])
        elif "Unsatisfiable" not in texts.complaint:
            self.rules.add(name, [self._json(texts.schema)])

    # ---------------------------------------------------------------- arrays

    def _array(self, name: Name, term: Term) -> None:
        entries = term.having(*demands.ARRAY)
        shapes = [demands.items_of(entry) for entry in entries]
        least, most = demands.bounds_of(entries, "minItems", "maxItems")
        width = max((len(prefix) for prefix, _ in shapes), default=0)
        if width > MAX_PREFIX:
            raise GrammarTooLarge("grammar", f"prefixItems must not exceed {MAX_PREFIX}")
        if most is not None and least > most:
            return
        rest = tuple(items for _, items in shapes if items is not None)
        items = [tuple(e for prefix, tail in shapes if (e := demands.at(prefix, tail, i))) for i in range(width)]
        if (most is None or most > 1) and any(entry.schema.get("uniqueItems") is True for entry in entries):
            self._set(name, term, items, rest, least, most)
        elif any("contains" in entry.schema for entry in entries):
            self._containing(name, term, items, rest, least, most)
        else:
            self._list(name, [self.node(item) for item in items], self.node(rest), least, most)

    def _list(self, name: Name, items: list[Name], rest: Name, least: int, most: int | None) -> None:
        items = items or [rest]
        width = len(items)
        if least == 0:
            self.rules.add(name, self._around("[]"))
        if most == 0:
            return
        tail = repeat(self.rules.new([*self._comma, rest]), max(0, least - width), most, width)
        for index in range(width - 1, 0, -1):
            here = self.rules.new()
            if index >= least:
                self.rules.add(here, [])
            if most is None or index < most:
                self.rules.add(here, [*self._comma, items[index], *tail])
            tail = [here]
        self.rules.add(name, self._around("[]", items[0], *tail))

    def _containing(
        self, name: Name, term: Term, items: list[Conjunction], rest: Conjunction, least: int, most: int | None
    ) -> None:
        """A list of which some items are counted: a rule for each place and count, up to where they matter."""
        entry, *others = term.having("contains")
        low, high = demands.count_of(entry, "minContains"), demands.count_of(entry, "maxContains")
        low = 1 if low is None else low
        if others:
            raise GrammarUnsupported("grammar", [("contains", f"{others[0].place}/contains")], "two at once")
        if high is not None and low > high:
            return
        inside = Entry(f"{entry.pointer}/contains", entry.schema["contains"])
        outside = Entry(f"{entry.pointer}/contains{MADE}", {"not": entry.schema["contains"]})
        last, top = max(1, least, len(items), most or 0), low if high is None else high
        if (last + 1) * (top + 1) > MAX_STATES:
            raise GrammarTooLarge("grammar", f"items times those that contains counts must not exceed {MAX_STATES}")
        here = {(place, count): self.rules.new() for place in range(last + 1) for count in range(top + 1)}
        for (place, count), rule in here.items():
            item = items[place] if place < len(items) else rest
            comma = self._comma if place else []
            if place >= max(least, 1) and count >= low:
                self.rules.add(rule, [])
            if most is not None and place >= most:
                continue
            following = min(place + 1, last)
            other = item if high is None else (*item, outside)
            self.rules.add(rule, [*comma, self.node(other), here[following, count]])
            if count < top:
                self.rules.add(rule, [*comma, self.node((*item, inside)), here[following, count + 1]])
        self.rules.add(name, self._around("[]", here[0, 0]))
        if least == low == 0:
            self.rules.add(name, self._around("[]"))

    def _set(
        self, name: Name, term: Term, items: list[Conjunction], rest: Conjunction, least: int, most: int | None
    ) -> None:
        """A list of different values out of few: what are members in any order for an object."""
        place = next(entry.place for entry in term.having("uniqueItems"))
        values = None if items or term.having("contains") else self._values(rest)
        if values is None or len(values) > MAX_KEYS:
            detail = f"only for items that are listed, {MAX_KEYS} at most"
            raise GrammarUnsupported("grammar", [("uniqueItems", f"{place}/uniqueItems")], detail)
        if least == 0:
            self.rules.add(name, self._around("[]"))
        top = min(len(values), len(values) if most is None else most)
        if not values or least > top:
            return
        members = [(self.rules.shared([self._literal(value)]), False) for value in sorted(values, key=len)]
        self._in_any_order(name, members, None, brackets="[]", bounds=(least, top))

    def _values(self, conjunction: Conjunction) -> list[str] | None:
        """All values as they are written, if they are few scalars; else None."""
        found: dict[str, None] = {}
        for term in self._alternatives.of(conjunction):
            for kind in term.types:
                if kind in ("null", "boolean"):
                    texts = self._constants(term, kind)
                elif kind == "string" and (listed := demands.Texts.of(term).listed) is not None:
                    texts = [json.dumps(value, ensure_ascii=False) for value in listed]
                elif kind in ("integer", "fraction") and (numbers := term.numbers()).listed is not None:
                    texts = [text for value, text in numbers.listed if numbers.holds(value)]
                else:
                    return None
                found.update(dict.fromkeys(texts))
        return list(found)

    # ---------------------------------------------------------------- objects

    def _object(self, name: Name, term: Term) -> None:
        entries = term.having(*demands.OBJECT)
        required = dict.fromkeys(key for entry in entries for key in entry.schema.get("required", ()))
        unlisted = [entry.schema["unlisted"] for entry in entries if entry.plain and "unlisted" in entry.schema]
        keys = [*(key for entry in entries for key in entry.schema.get("properties", {})), *required]
        named = self._names(entries)
        for found in (*unlisted, *(texts.listed or () for _, texts in named or ())):
            keys += found
        pairs: dict[str, Name] = {}
        for key in dict.fromkeys(keys):
            value = tuple(child for entry in entries for child in demands.property_of(entry, key))
            if named is None or any(texts.hold(key) for _, texts in named):
                pairs[key] = self._pair(key, value)
            elif key in required:
                return
        least, most = demands.bounds_of(entries, "minProperties", "maxProperties")
        free = self._free(entries, list(dict.fromkeys(keys)), named)
        for wanted in demands.hitting_sets([[*(key for key in pairs if key not in one), None] for one in unlisted]):
            members = [(pair, key in required or key in wanted) for key, pair in pairs.items()]
            self._objects(name, members, free, (max(least, 1) if wanted else least, most), None in wanted)

    def _pair(self, key: str, value: Conjunction) -> Name:
        return self.rules.shared([self._literal(literal(key)), *self._colon, self.node(value)])

    def _objects(
        self, name: Name, members: list[Member], free: Name | None, bounds: tuple[int, int | None], strange: bool
    ) -> None:
        """An object of these members and undeclared ones, with so many in all; `strange`: one undeclared at least."""
        least, most = bounds
        needed = sum(needed for _, needed in members)
        if most is not None and max(least, needed + strange) > most:
            return
        if not least and not needed and not strange:
            self.rules.add(name, self._around("{}"))
        if most is None and least <= max(needed, 1):
            low = int(strange)
            if self._any_order and len(members) + strange <= MAX_KEYS and len(members) + (free is not None) > 1:
                if free is not None or not strange:
                    self._in_any_order(name, members, free, strange)
                return
        elif needed == len(members):
            low, most = max(int(strange), least - needed), None if most is None else most - needed
        else:
            counted = self._counted(members, free, bounds, strange)
            self.rules.add(name, self._around("{}", counted))
            return
        if low and free is None:
            return
        if free is not None and most != 0:
            if (key := (free, low, most)) not in self._tails:
                more = self.rules.new([*self._comma, free])
                self._tails[key] = self.rules.new([free, *repeat(more, max(0, low - 1), most, 1)])
            members = [*members, (self._tails[key], low > 0)]
        if members:
            self.rules.add(name, self._around("{}", self._some(members)))

    def _in_any_order(
        self, name: Name, members: list[Member], free: Name | None, strange: bool = False, brackets: str = "{}",
        bounds: tuple[int, int | None] = (1, None),
    ) -> None:  # fmt: skip
        """At least one of the members, those needed always."""
        pairs = [pair for pair, _ in sorted(members, key=lambda member: not member[1])]
        needed = [*range(sum(needed for _, needed in members)), *([len(pairs)] if strange else [])]
        each: list[Symbols] = [[member] for member in (*pairs, *([free] if free else []))]
        one = self.rules.new(*each)
        least, most = max(1, bounds[0]), bounds[1]
        found = self.rules.new([Unordered(pairs, free, self._comma, needed, one, (least, most))])
        self.rules.add(name, self._around(brackets, found))

    def _counted(self, members: list[Member], free: Name | None, bounds: tuple[int, int | None], strange: bool) -> Name:
        """At least one member, and so many in all: a rule for each place and count, up to where they matter."""
        least, most = bounds
        top = max(1, least) if most is None else most
        if (len(members) + 1) * (top + 1) > MAX_STATES:
            raise GrammarTooLarge(
                "grammar", f"properties times minProperties or maxProperties must not exceed {MAX_STATES}"
            )
        following: list[Name] = []
        for index in range(len(members), -1, -1):
            here = [self.rules.new() for _ in range(top + 1)]
            for count, rule in enumerate(here):
                comma = self._comma if count else []
                full = most is not None and count >= most
                if index < len(members):
                    pair, needed = members[index]
                    if not needed:
                        self.rules.add(rule, [following[count]])
                    if not full:
                        self.rules.add(rule, [*comma, pair, following[min(count + 1, top)]])
                    continue
                low = max(int(strange), least - count)
                if count and not low:
                    self.rules.add(rule, [])
                if free is not None and not full:
                    more = self.rules.new([*self._comma, free])
                    left = None if most is None else most - count
                    self.rules.add(rule, [*comma, free, *repeat(more, max(0, low - 1), left, 1)])
            following = here
        return following[0]

    def _some(self, members: list[Member]) -> Name:
        """At least one of the members, those needed always, in order. Halves, so that rules do not nest deeply."""
        if len(members) == 1:
            return members[0][0]
        half = len(members) // 2
        left, right = members[:half], members[half:]
        one, two = self._some(left), self._some(right)
        follows: Symbols = [*self._comma, two]
        if not any(needed for _, needed in right):
            follows = [self.rules.shared([], follows)]  # no alternative of its own: those that may begin are limited
        more: list[Symbols] = [] if any(needed for _, needed in left) else [[two]]
        return self.rules.shared([one, *follows], *more)

    def _names(self, entries: list[Entry]) -> list[tuple[Term, demands.Texts]] | None:
        """The names that `propertyNames` allow; None if there are none."""
        key = "propertyNames"
        said = [Entry(f"{e.pointer}/{key}", e.schema[key]) for e in entries if key in e.schema]
        terms = self._alternatives.of(said) if said else []
        return [(term, demands.Texts.of(term)) for term in terms if "string" in term.types] if said else None

    def _free(
        self, entries: list[Entry], declared: list[str], named: list[tuple[Term, demands.Texts]] | None
    ) -> Name | None:
        """The rule of one undeclared member."""
        patterns = {
            pattern: demands.written(pattern, "patternProperties", f"{entry.place}/patternProperties/{escape(pattern)}")
            for entry in entries
            for pattern in entry.schema.get("patternProperties", {})
        }
        found = self.rules.new()
        sizes = range(len(patterns) + 1) if len(patterns) <= MAX_TOGETHER else (0, 1)
        for size in sizes:
            for held in itertools.combinations(patterns, size):
                value = tuple(child for entry in entries for child in demands.of_patterns(entry, held))
                if any(child.schema is False for child in value):
                    continue
                others = [text for pattern, text in patterns.items() if pattern not in held]
                for term, texts in [(Term(()), demands.Texts([], [], ""))] if named is None else named:
                    if texts.listed is not None:
                        continue
                    if patterns or declared:
                        key: Shape = self.rules.terminal(
                            texts.terminal([patterns[pattern] for pattern in held], others, declared)
                        )
                    else:
                        key = self.rules.new()
                        self._string(key, term)
                    self.rules.add(found, [key, *self._colon, self.node(value)])
        return found if found.options else None


_SAYING = (*KEYWORDS, *demands.STRING, *demands.ARRAY, *demands.OBJECT, "type")

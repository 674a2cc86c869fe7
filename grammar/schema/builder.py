"""Compiles a JSON schema to context-free rules (`rules`), which are printed as Lark.

llguidance's own JSON compiler (1.9.1) computes in doubles: bounds beyond 2**53 are rounded, exclusive decimal bounds
are not kept, and the least int64 makes it recurse without end. Digits and nesting are unbounded with it. It takes no
pattern for a number, so what surrounds numbers is written here as well: objects, arrays, choices, references. Strings
stay `%json`.

As in its compiler, properties come in the order of the schema, undeclared keys behind them (these may repeat).
Keywords that it refuses are counted by rules here (`contains`, numbers of members), or by a parameter (sets).
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
from asyncengine.grammar.schema.terms import DERIVED, Alternatives, Conjunction, Entry, Term
from asyncengine.grammar.schemas import escape
from asyncengine.grammar.shapes.nodes import Repeat, Rule, Shape, Terminal, Unordered
from asyncengine.grammar.spec import canonical_json

MAX_PREFIX = 500
"""Most items with schemas of their own (`prefixItems`)."""
MAX_STATES = 4096
"""Rules of one list or object that is counted: one for each position and count."""
MAX_TOGETHER = 3
"""With more patterns of names than this, no name may match two: there would be a rule for each subset of them."""
Member = tuple[Rule, bool]
"""(rule of one member, or of all undeclared ones; whether it is required)."""


class Builder:
    """The rules of the JSON values valid under one schema. Subclasses write the same values in another notation."""

    def __init__(self, root: dict[str, Any], options: dict[str, Any], checkpoint: Checkpoint = proceed) -> None:
        """`options`: those of llguidance's JSON compiler, and `key_order`. `checkpoint`: called during long work."""
        self.root = root
        self._any_order = options.get("key_order") == "any"
        self.rules = Rules(checkpoint)
        branches = Branches(root)
        self._alternatives = Alternatives(root, branches.of, branches.is_empty, checkpoint)
        self._known: dict[tuple[str, ...], Rule] = {}
        self._pending: list[tuple[Rule, Conjunction]] = []
        self._tails: dict[tuple[Rule, int, int | None], Rule] = {}
        """Rules of repeated undeclared members by (member, least, most). Each repetition is in one rule only, for
        llguidance 1.9.1 panics where two rules pass a parameter on to the same one."""
        self._empty: list[str] = []
        """Sets of numbers that the schema asks for and that have no member, for the message."""
        leaf_options = {key: options[key] for key in demands.LEAF_OPTIONS if options.get(key)}
        # without it llguidance 1.9.1 allows any blanks before some strings
        self._leaf_options = {"whitespace_flexible": False, **leaf_options}
        default = None if options.get("whitespace_flexible") is False else r"[ \t\n\r]+"
        blank = default if (pattern := options.get("whitespace_pattern")) is None else pattern
        text = self.rules.terminal
        self._blank: Symbols = [self.rules.new([Repeat(text(regex(blank)), 0, 1)])] if blank else []
        around = f"(?:{blank})?" if blank else ""
        self._comma, self._colon = (
            [text(regex(around + options.get(key, usually) + around))]
            for key, usually in (("item_separator", ","), ("key_separator", ":"))
        )

    def build(self) -> tuple[Rules, Rule]:
        """(the rules, the one for the whole value).

        Raises `GrammarImpossible` naming bounds that no number keeps, `GrammarUnsupported` for keywords that cannot be
        enforced, `GrammarTooLarge`, and `GrammarError` for a malformed schema.
        """
        return self._complete(self.node((Entry("", self.root),)))

    def _complete(self, start: Rule) -> tuple[Rules, Rule]:
        """Make the rules that are still pending, then drop those that derive no text."""
        while self._pending:
            rule, conjunction = self._pending.pop()
            for term in self._alternatives.of(conjunction):
                self._term(rule, term)
        self.rules.prune()
        if not start.alternatives:
            detail = f"; there is no {self._empty[0]}" if self._empty else ""
            raise GrammarImpossible("grammar", f"no JSON value is valid under this schema{detail}")
        self.rules.inline(start)
        return self.rules, start

    def _around(self, brackets: str, *inside: Shape) -> Symbols:
        """The symbols of a list or an object around those `inside`."""
        first, last = (self.rules.terminal(f'"{bracket}"') for bracket in brackets)
        return [first, *self._blank, *inside, *(self._blank if inside else ()), last]

    def _literal(self, text: str) -> Shape:
        return self.rules.terminal(literal(text))

    def node(self, conjunction: Conjunction) -> Rule:
        """The rule of the values that satisfy all of `conjunction`; one for the same schemas. It gets its alternatives
        later, by a work list, so that schemas may refer to themselves."""
        followed = map(self._alternatives.followed, conjunction)
        entries = {entry.pointer: entry for entry in followed if entry.schema is not True}
        key = tuple(entries)
        if key not in self._known:
            self._known[key] = self.rules.new()
            self._pending.append((self._known[key], tuple(entries.values())))
        return self._known[key]

    def _term(self, rule: Rule, term: Term) -> None:
        if term.entries and not term.having(*_RESTRICTING):
            if not term.loops:
                self.rules.add(rule, [self.node(())])
            return
        for name in term.types:
            if name in ("null", "boolean"):
                for text in self._constants(term, name):
                    self.rules.add(rule, *self._keyword(text))
            elif name == "integer" or (name == "fraction" and "integer" not in term.types):
                if (number := self._number(term)) is not None:
                    self.rules.add(rule, [number])
            elif name == "string":
                self._string(rule, term)
            elif name == "array":
                self._array(rule, term)
            elif name == "object":
                self._object(rule, term)

    def _json(self, schema: dict[str, Any]) -> Terminal:
        return self.rules.terminal("%json " + canonical_json({"x-guidance": self._leaf_options, **schema}))

    def _keyword(self, text: str) -> list[Symbols]:
        """The spellings of "null", "true" or "false", each an alternative."""
        return [[self._literal(text)]]

    def _constants(self, term: Term, name: str) -> list[str]:
        """The texts among "null", or "true" and "false", that `term` allows."""
        if name not in term.types:
            return []
        if name == "null":
            return ["null"]
        lists = [entry.schema["enum"] for entry in term.having("enum") if entry.plain]
        banned = [value for entry in term.having("not") if entry.plain for value in entry.schema["not"].get("enum", ())]
        allowed = [text for text in ("true", "false") if all(json.loads(text) in values for values in lists)]
        return [text for text in allowed if not any(json.loads(text) is value for value in banned)]

    # ---------------------------------------------------------------- scalars

    def _number(self, term: Term) -> Terminal | None:
        """The terminal of the numbers that `term` allows; None if it allows none."""
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

    def _string(self, rule: Rule, term: Term) -> None:
        texts = demands.Texts.of(term)
        low, high = texts.bounds
        if high is not None and low > high:
            return
        apart = texts.excluded or any(looks_ahead(schema.get("pattern", "")) for schema in texts.schemas)
        several = apart or len(texts.schemas) > 1
        if len(self._leaf_options) == 1 and (short := texts.plain) is not None:
            self.rules.add(rule, [self.rules.terminal(short)])
        elif several and (listed := texts.listed) is not None:
            if listed:
                self.rules.add(rule, [self._json({"type": "string", "enum": listed})])
        elif apart or "Unable to determine" in texts.complaint:
            # its JSON compiler gives up where it cannot tell whether any text is left; its Lark compiler does not ask
            self.rules.add(rule, [self.rules.terminal(texts.terminal([], [], []))])
        elif "Unsatisfiable" not in texts.complaint:
            self.rules.add(rule, [self._json(texts.schema)])

    # ---------------------------------------------------------------- arrays

    def _array(self, rule: Rule, term: Term) -> None:
        entries = term.having(*demands.ARRAY)
        lists = [demands.items_of(entry) for entry in entries]
        least, most = demands.bounds_of(entries, "minItems", "maxItems")
        width = max((len(prefix) for prefix, _ in lists), default=0)
        if width > MAX_PREFIX:
            raise GrammarTooLarge("grammar", f"prefixItems must not exceed {MAX_PREFIX}")
        if most is not None and least > most:
            return
        rest = tuple(items for _, items in lists if items is not None)
        items = [tuple(one for first, tail in lists if (one := demands.nth(first, tail, i))) for i in range(width)]
        if (most is None or most > 1) and any(entry.schema.get("uniqueItems") is True for entry in entries):
            self._set(rule, term, items, rest, least, most)
        elif any("contains" in entry.schema for entry in entries):
            self._containing(rule, term, items, rest, least, most)
        else:
            self._list(rule, [self.node(one) for one in items], self.node(rest), least, most)

    def _list(self, rule: Rule, items: list[Rule], rest: Rule, least: int, most: int | None) -> None:
        items = items or [rest]
        width = len(items)
        if least == 0:
            self.rules.add(rule, self._around("[]"))
        if most == 0:
            return
        tail = repeat(self.rules.new([*self._comma, rest]), max(0, least - width), most, width)
        for index in range(width - 1, 0, -1):
            tail_rule = self.rules.new()
            if index >= least:
                self.rules.add(tail_rule, [])
            if most is None or index < most:
                self.rules.add(tail_rule, [*self._comma, items[index], *tail])
            tail = [tail_rule]
        self.rules.add(rule, self._around("[]", items[0], *tail))

    def _containing(
        self, rule: Rule, term: Term, items: list[Conjunction], rest: Conjunction, least: int, most: int | None
    ) -> None:
        """A list some items of which are counted (`contains`): an automaton with a state for each position and count,
        both up to where they matter."""
        entry, *more = term.having("contains")
        low, high = demands.count_of(entry, "minContains"), demands.count_of(entry, "maxContains")
        low = 1 if low is None else low
        if more:
            raise GrammarUnsupported("grammar", [("contains", f"{more[0].location}/contains")], "two at once")
        if high is not None and low > high:
            return
        counted = Entry(f"{entry.pointer}/contains", entry.schema["contains"])
        uncounted = Entry(f"{entry.pointer}/contains{DERIVED}", {"not": entry.schema["contains"]})
        last_index, max_count = max(1, least, len(items), most or 0), low if high is None else high
        if (last_index + 1) * (max_count + 1) > MAX_STATES:
            raise GrammarTooLarge("grammar", f"items times those that contains counts must not exceed {MAX_STATES}")
        states = {(index, count): self.rules.new() for index in range(last_index + 1) for count in range(max_count + 1)}
        for (index, count), state in states.items():
            item = items[index] if index < len(items) else rest
            comma = self._comma if index else []
            if index >= max(least, 1) and count >= low:
                self.rules.add(state, [])
            if most is not None and index >= most:
                continue
            next_index = min(index + 1, last_index)
            uncounted_item = item if high is None else (*item, uncounted)
            self.rules.add(state, [*comma, self.node(uncounted_item), states[next_index, count]])
            if count < max_count:
                self.rules.add(state, [*comma, self.node((*item, counted)), states[next_index, count + 1]])
        self.rules.add(rule, self._around("[]", states[0, 0]))
        if least == low == 0:
            self.rules.add(rule, self._around("[]"))

    def _set(
        self, rule: Rule, term: Term, items: list[Conjunction], rest: Conjunction, least: int, most: int | None
    ) -> None:
        """A list of distinct values out of few (`uniqueItems`), written as the members of an object in any order."""
        location = next(entry.location for entry in term.having("uniqueItems"))
        values = None if items or term.having("contains") else self._values(rest)
        if values is None or len(values) > MAX_KEYS:
            detail = f"only for items that are listed, {MAX_KEYS} at most"
            raise GrammarUnsupported("grammar", [("uniqueItems", f"{location}/uniqueItems")], detail)
        if least == 0:
            self.rules.add(rule, self._around("[]"))
        largest = min(len(values), len(values) if most is None else most)
        if not values or least > largest:
            return
        members = [(self.rules.shared([self._literal(value)]), False) for value in sorted(values, key=len)]
        self._in_any_order(rule, members, None, brackets="[]", bounds=(least, largest))

    def _values(self, conjunction: Conjunction) -> list[str] | None:
        """The texts of all values, if these are listed scalars; else None."""
        values: dict[str, None] = {}
        for term in self._alternatives.of(conjunction):
            for name in term.types:
                if name in ("null", "boolean"):
                    texts = self._constants(term, name)
                elif name == "string" and (listed := demands.Texts.of(term).listed) is not None:
                    texts = [json.dumps(value, ensure_ascii=False) for value in listed]
                elif name in ("integer", "fraction") and (numbers := term.numbers()).listed is not None:
                    texts = [text for value, text in numbers.listed if numbers.holds(value)]
                else:
                    return None
                values.update(dict.fromkeys(texts))
        return list(values)

    # ---------------------------------------------------------------- objects

    def _object(self, rule: Rule, term: Term) -> None:
        entries = term.having(*demands.OBJECT)
        required = dict.fromkeys(key for entry in entries for key in entry.schema.get("required", ()))
        unlisted = [entry.schema["unlisted"] for entry in entries if entry.plain and "unlisted" in entry.schema]
        keys = [*(key for entry in entries for key in entry.schema.get("properties", {})), *required]
        name_schemas = self._names(entries)
        for listed in (*unlisted, *(texts.listed or () for _, texts in name_schemas or ())):
            keys += listed
        pairs: dict[str, Rule] = {}
        for key in dict.fromkeys(keys):
            conjunction = tuple(child for entry in entries for child in demands.property_of(entry, key))
            if name_schemas is None or any(texts.holds(key) for _, texts in name_schemas):
                pairs[key] = self._pair(key, conjunction)
            elif key in required:
                return
        least, most = demands.bounds_of(entries, "minProperties", "maxProperties")
        free = self._undeclared(entries, list(dict.fromkeys(keys)), name_schemas)
        for chosen in demands.hitting_sets([[*(key for key in pairs if key not in names), None] for names in unlisted]):
            members = [(pair, key in required or key in chosen) for key, pair in pairs.items()]
            self._objects(rule, members, free, (max(least, 1) if chosen else least, most), None in chosen)

    def _pair(self, key: str, value: Conjunction) -> Rule:
        return self.rules.shared([self._literal(literal(key)), *self._colon, self.node(value)])

    def _objects(
        self, rule: Rule, members: list[Member], free: Rule | None, bounds: tuple[int, int | None], extra: bool
    ) -> None:
        """An object of these members and undeclared ones (`free`), the number of all within `bounds`; `extra`: with at
        least one undeclared."""
        least, most = bounds
        needed = sum(needed for _, needed in members)
        if most is not None and max(least, needed + extra) > most:
            return
        if not least and not needed and not extra:
            self.rules.add(rule, self._around("{}"))
        if most is None and least <= max(needed, 1):
            low = int(extra)
            if self._any_order and len(members) + extra <= MAX_KEYS and len(members) + (free is not None) > 1:
                if free is not None or not extra:
                    self._in_any_order(rule, members, free, extra)
                return
        elif needed == len(members):
            low, most = max(int(extra), least - needed), None if most is None else most - needed
        else:
            counted = self._counted(members, free, bounds, extra)
            self.rules.add(rule, self._around("{}", counted))
            return
        if low and free is None:
            return
        if free is not None and most != 0:
            if (key := (free, low, most)) not in self._tails:
                more = self.rules.new([*self._comma, free])
                self._tails[key] = self.rules.new([free, *repeat(more, max(0, low - 1), most, 1)])
            members = [*members, (self._tails[key], low > 0)]
        if members:
            self.rules.add(rule, self._around("{}", self._some(members)))

    def _in_any_order(
        self, rule: Rule, members: list[Member], free: Rule | None, extra: bool = False, brackets: str = "{}",
        bounds: tuple[int, int | None] = (1, None),
    ) -> None:  # fmt: skip
        """At least one of the members, and all required ones, in any order."""
        pairs = [pair for pair, _ in sorted(members, key=lambda member: not member[1])]
        needed = [*range(sum(needed for _, needed in members)), *([len(pairs)] if extra else [])]
        choices: list[Symbols] = [[member] for member in (*pairs, *([free] if free else []))]
        any_member = self.rules.new(*choices)
        least, most = max(1, bounds[0]), bounds[1]
        unordered = self.rules.new([Unordered(pairs, free, self._comma, needed, any_member, (least, most))])
        self.rules.add(rule, self._around(brackets, unordered))

    def _counted(self, members: list[Member], free: Rule | None, bounds: tuple[int, int | None], extra: bool) -> Rule:
        """At least one member, the number of all within `bounds`: a rule for each position and count."""
        least, most = bounds
        max_count = max(1, least) if most is None else most
        if (len(members) + 1) * (max_count + 1) > MAX_STATES:
            raise GrammarTooLarge(
                "grammar", f"properties times minProperties or maxProperties must not exceed {MAX_STATES}"
            )
        next_states: list[Rule] = []
        for index in range(len(members), -1, -1):
            states = [self.rules.new() for _ in range(max_count + 1)]
            for count, state in enumerate(states):
                comma = self._comma if count else []
                full = most is not None and count >= most
                if index < len(members):
                    pair, needed = members[index]
                    if not needed:
                        self.rules.add(state, [next_states[count]])
                    if not full:
                        self.rules.add(state, [*comma, pair, next_states[min(count + 1, max_count)]])
                    continue
                low = max(int(extra), least - count)
                if count and not low:
                    self.rules.add(state, [])
                if free is not None and not full:
                    more = self.rules.new([*self._comma, free])
                    left = None if most is None else most - count
                    self.rules.add(state, [*comma, free, *repeat(more, max(0, low - 1), left, 1)])
            next_states = states
        return next_states[0]

    def _some(self, members: list[Member]) -> Rule:
        """At least one of the members, and all required ones, in order. Split in halves: rules nest logarithmically."""
        if len(members) == 1:
            return members[0][0]
        half = len(members) // 2
        left, right = members[:half], members[half:]
        first, second = self._some(left), self._some(right)
        follows: Symbols = [*self._comma, second]
        if not any(needed for _, needed in right):
            follows = [self.rules.shared([], follows)]  # inlined, too many for the library could begin here
        more: list[Symbols] = [] if any(needed for _, needed in left) else [[second]]
        return self.rules.shared([first, *follows], *more)

    def _names(self, entries: list[Entry]) -> list[tuple[Term, demands.Texts]] | None:
        """The strings that `propertyNames` allow as names; None if no schema has it."""
        key = "propertyNames"
        schemas = [Entry(f"{entry.pointer}/{key}", entry.schema[key]) for entry in entries if key in entry.schema]
        terms = self._alternatives.of(schemas) if schemas else []
        return [(term, demands.Texts.of(term)) for term in terms if "string" in term.types] if schemas else None

    def _undeclared(
        self, entries: list[Entry], declared: list[str], name_schemas: list[tuple[Term, demands.Texts]] | None
    ) -> Rule | None:
        """The rule of one undeclared member, an alternative for each set of patterns that its name may match; None if
        there can be none."""
        keyword = "patternProperties"
        patterns = {
            pattern: demands.written(pattern, keyword, f"{entry.location}/{keyword}/{escape(pattern)}")
            for entry in entries
            for pattern in entry.schema.get(keyword, {})
        }
        rule = self.rules.new()
        sizes = range(len(patterns) + 1) if len(patterns) <= MAX_TOGETHER else (0, 1)
        for size in sizes:
            for matching in itertools.combinations(patterns, size):
                value = tuple(child for entry in entries for child in demands.of_patterns(entry, matching))
                if any(child.schema is False for child in value):
                    continue
                failing = [text for pattern, text in patterns.items() if pattern not in matching]
                for term, texts in [(Term(()), demands.Texts([], [], ""))] if name_schemas is None else name_schemas:
                    if texts.listed is not None:
                        continue
                    if patterns or declared:
                        key: Shape = self.rules.terminal(
                            texts.terminal([patterns[pattern] for pattern in matching], failing, declared)
                        )
                    else:
                        key = self.rules.new()
                        self._string(key, term)
                    self.rules.add(rule, [key, *self._colon, self.node(value)])
        return rule if rule.alternatives else None


# with none of these, and no alternative made of a reference to itself, a term allows any value
_RESTRICTING = (*KEYWORDS, *demands.STRING, *demands.ARRAY, *demands.OBJECT, "type")

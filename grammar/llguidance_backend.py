"""The default backend: llguidance, for every kind of grammar (exact, bounded by fuel, 1 to 7 ms to compile).

Its peculiarities that are handled here, each with a test:

* It never raises: after a limit was hit its mask allows the end of sequence only, which would truncate silently. So
  `is_error()` is checked after every mask and every step.
* Copies of one matcher share a lexer. A limit hit by one breaks all of them and the template, and the others refuse
  every token silently until they are asked for a mask. A broken state heals: it compiles a copy of its own and consumes
  its tokens again, so that another output's limit does not end it. The template is marked and makes no further states;
  for the next one the grammar is compiled again.
* Rollback does not count an end of sequence consumed after the grammar had stopped; ends of sequence are counted here
  and never shown to it.
* `max_tokens=` inside a grammar switches rollback off, and its error texts quote the output; the first is refused, the
  second switched off.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import llguidance

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.closing.closing import CHECKED_AHEAD, Closing, ClosingTables, unrolled
from asyncengine.grammar.closing.costs import CostTable, Speller, token_count
from asyncengine.grammar.complaints import SIGNS, explain, summary
from asyncengine.grammar.json_limits import Limits, end_behind
from asyncengine.grammar.lark import replace_json
from asyncengine.grammar.lower import OPTIONS, fragment, schema_object
from asyncengine.grammar.schema.arguments import ArgumentBuilder
from asyncengine.grammar.schema.builder import Builder
from asyncengine.grammar.schema.rules import Checkpoint, Rules, proceed
from asyncengine.grammar.schema.straight import NotStraight, straight
from asyncengine.grammar.schemas import pointed, unescape
from asyncengine.grammar.shapes.nodes import Rule, Shape, Unmodelled
from asyncengine.grammar.shapes.products import may_be_endless
from asyncengine.grammar.shapes.schemas import shape_of
from asyncengine.grammar.shared_masks import JointFill, Mask, SharedMasks
from asyncengine.grammar.spec import Grammar
from asyncengine.grammar.vocabulary import UNREACHABLE, Vocabulary

Written = tuple[Rules, Rule]
"""(rules, the start rule) of a schema."""
MAX_RETRIES = 64
"""Most unsupported keywords that are left out, one after the other, of a lenient schema."""


def with_rules(grammar: Grammar, checkpoint: Checkpoint = proceed, schema: Any = None) -> tuple[str, list[Written]]:
    """(text for `LLMatcher`, rules of each schema in the grammar, in its order). Raises `GrammarTooLarge` for schemas
    that `check_limits` would have refused, and what `checkpoint` raises."""
    if grammar.kind == "json_schema":
        rules, start = _rules_of(grammar, checkpoint, schema)
        return str(llguidance.LLMatcher.grammar_from_lark(rules.lark(start))), [(rules, start)]
    if grammar.kind == "lark":
        schemas: list[Written] = []
        text = replace_json(grammar.text, partial(_embedded, schemas, checkpoint))
        return str(llguidance.LLMatcher.grammar_from_lark(text)), schemas
    return str(llguidance.LLMatcher.grammar_from_lark(f"start: OUTPUT\nOUTPUT: {fragment(grammar)}\n")), []


def _schema_of(grammar: Grammar) -> dict[str, Any]:
    return schema_object(grammar.text, grammar.unsupported != "error", grammar.formats == "strict")


def _rules_of(grammar: Grammar, checkpoint: Checkpoint, schema: dict[str, Any] | None = None) -> Written:
    options = {**OPTIONS[grammar.whitespace], "key_order": grammar.key_order}
    schema = _schema_of(grammar) if schema is None else schema
    return _rules(schema, options, grammar.unsupported != "error", checkpoint)


def _rules(schema: dict[str, Any], options: dict[str, Any], lenient: bool, checkpoint: Checkpoint) -> Written:
    """The rules of a schema. If `lenient`, unsupported keywords are left out. Raises as `Builder.build`."""
    guidance = schema.pop("x-guidance", None)
    merged = {**options, **(guidance if isinstance(guidance, dict) else {}), "lenient": lenient}
    build = ArgumentBuilder if "members" in merged else Builder
    for retries in range(MAX_RETRIES, -1, -1):
        try:
            return build(schema, merged, checkpoint).build()
        except GrammarUnsupported as error:
            if not retries or not lenient or not sum(_drop(schema, pointer) for _, pointer in error.features):
                raise
    raise AssertionError("it was raised")


def _drop(schema: dict[str, Any], pointer: str) -> bool:
    """Delete the value that `pointer` leads to; False if there is none."""
    around, _, last = pointer.rpartition("/")
    parent = pointed(schema, around)
    if around.endswith("/patternProperties"):  # members with these names must stay allowed
        pointed(schema, around.rpartition("/")[0]).pop("additionalProperties", None)
    return isinstance(parent, dict) and parent.pop(unescape(last), None) is not None


def _embedded(schemas: list[Written], checkpoint: Checkpoint, text: str) -> str:
    """The rule for `%json text` in a Lark grammar; its rules are added to `schemas`."""
    schema = json.loads(text)
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    lenient = isinstance(guidance, dict) and guidance.get("lenient") is True
    tool = guidance.get("tool") if isinstance(guidance, dict) else None
    try:
        rules, start = _rules(schema_object(text, lenient), {}, lenient, checkpoint)
    except GrammarUnsupported as error:
        if tool is None:
            raise
        detail = f"{error.detail}, in tool {tool!r}" if error.detail else f"in tool {tool!r}"
        raise GrammarUnsupported(error.field, error.features, detail) from error
    schemas.append((rules, start))
    return "%lark {\n" + rules.lark(start) + "}"


LONGEST = 400_000
"""Most tokens of the shortest output: more than any text that the limits on grammars allow."""
TEMPLATE_BYTES, COST_BYTES = 600_000, 60_000
"""Memory of a compiled grammar after use, measured over 285 schemas at 150,000 tokens, for llguidance does not tell;
and of its costs, which take 40 bytes more for each byte of its text."""
CHECKED = 8
"""Segments of the cheapest output that the library validates when a grammar is compiled."""
MASKED = 16
"""Bytes of it whose masks are computed then, to find a limit of the library that they hit. It warms its lexer, too."""
REACH = 64
"""A sampled token may be replaced once the tokens left are those of the shortest output plus this many."""
LEAD = 64
"""Costs are computed on another thread this many tokens before they are needed."""
MASK_BYTES = 16 * 2**20
"""Memory of the masks that outputs share: 880 masks of 150,000 tokens."""
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""Appended to a grammar, it keeps the library from searching for forced text. Of several such lines the last counts."""


class LlguidanceBackend:
    """Compiles grammars for one vocabulary. Thread-safe; compiling releases the interpreter lock."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.speller = Speller(vocabulary)
        self._executor: Any = None
        self.masks = SharedMasks(MASK_BYTES)
        self.limits = Limits(vocabulary.token_bytes)

    def compile(self, grammar: Grammar, checkpoint: Checkpoint = proceed) -> LlgTemplate:
        """Blocking, bounded by llguidance's own fuel. Needs a stack of `service.STACK_BYTES` at worst.

        Raises `GrammarUnsupported`, `GrammarTooLarge`, `GrammarImpossible`, `GrammarError`, and what `checkpoint` does.
        """
        try:
            return LlgTemplate(self, grammar, checkpoint)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a Rust panic is no `Exception`, and pyo3 does not export it
                raise
            raise GrammarError("grammar", f"the grammar library panicked: {summary(str(error))}") from None

    def fill_all(self, masks: Mask, states: Mapping[int, LlgState]) -> set[int]:
        """A `JointFill`, on the library's own threads, which are four fifths of the cores."""
        self._executor = self._executor or llguidance.LLExecutor()
        jobs = [(state.matcher, row) for row, state in states.items()]
        self._executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks.strides[0], len(masks))
        filled = {row for row, state in states.items() if not state.matcher.is_error()}
        for row in filled:
            states[row].narrow(masks[row])
        return filled

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._executor = None


class LlgTemplate:
    """One compiled grammar: a matcher over the vocabulary, and the costs of complete outputs. Those of a schema that
    goes `straight` to the library are computed only when an output comes near to its budget."""

    def __init__(self, backend: LlguidanceBackend, grammar: Grammar, checkpoint: Checkpoint = proceed) -> None:
        self.backend = backend
        self.grammar = grammar
        self.masks = backend.masks
        self._spoiled = False
        self._counted: ClosingTables | None = None
        """None if its outputs cannot be parsed, and so not steered to an end."""
        self._counting = threading.Lock()
        self.reach = self.far = UNREACHABLE
        """`reach`: tokens left from which on a sampled one may be replaced (an upper bound until the costs are known).
        `far`: tokens left from which on the costs are to be computed; 0: they are known."""
        schema = _schema_of(grammar) if grammar.kind == "json_schema" else None
        self.is_straight = schema is not None and grammar.key_order == "schema" and self._go_straight(schema)
        if not self.is_straight:
            self.text, schemas = with_rules(grammar, checkpoint, schema)
            self._matcher = self.fresh_matcher()
            self._count(schemas, checkpoint)
        elif self.reach > LONGEST:
            self._count([_rules_of(grammar, checkpoint, schema)], checkpoint)

    def _go_straight(self, schema: dict[str, Any]) -> bool:
        """Have the library compile the schema itself, if it reads it as we do. False if not."""
        try:
            self.text, size = straight(schema, OPTIONS[self.grammar.whitespace], self.backend.speller.single_bytes)
            self._matcher = self.fresh_matcher()
        except (NotStraight, GrammarError, RecursionError):
            return False
        self.reach = size + REACH
        self.far = self.reach + LEAD
        return True

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest output known; 0 if outputs cannot be parsed."""
        self.has_costs(0)
        return self.reach - REACH

    def has_costs(self, left: int, soon: bool = False) -> bool:
        """Whether the grammar's costs are known. They are computed now if an output with `left` tokens left needs them,
        and on a thread of their own if it will `soon`. Nothing is raised, for the output may have begun: `straight`
        ensures that they can be computed, and without them the output would go on unsteered."""
        if left <= self.reach:
            with self._counting, contextlib.suppress(GrammarError):
                if self.far:
                    self._count([_rules_of(self.grammar, proceed)], proceed)
            self.far = 0
        elif self.far and (soon or left <= self.far) and not self._counting.locked():
            threading.Thread(target=self.has_costs, args=(0,), name="asyncengine-grammar-costs", daemon=True).start()
        return not self.far

    def _count(self, schemas: list[Written], checkpoint: Checkpoint) -> None:
        shape: Shape | None = None
        kept: list[Shape] = []
        checkpoint()
        with contextlib.suppress(Unmodelled):
            shape = shape_of(self.grammar, schemas, self.backend.vocabulary, kept)
        checkpoint()
        if self.grammar.kind == "lark" and (shape is None or may_be_endless(shape)):
            self.text += _UNFORCED
            self._matcher = self.fresh_matcher()
        self._counted = None if shape is None else self._priced(shape, kept)
        if self._counted is None:
            (first := self._matcher.deep_copy()).compute_bitmask()
            if first.is_error():  # the grammar has no output at all
                raise self.broken(first)
        self.reach, self.far = REACH + (0 if self._counted is None else token_count(self._counted.cheapest())), 0

    def spoil(self) -> None:
        """A matcher that shares a lexer with this template hit a limit: make no further states."""
        self._spoiled = True

    def broken(self, matcher: Any) -> GrammarError:
        """The error for `matcher`, which hit a limit."""
        return explain(self.grammar, matcher.get_error())

    def _priced(self, shape: Shape, kept: list[Shape]) -> ClosingTables | None:
        """The grammar's tables; None if it is too large for them, or the library rejects the cheapest output. Raises
        `GrammarImpossible` if there is no output."""
        vocabulary = self.backend.vocabulary
        try:
            tables = ClosingTables(shape, CostTable(shape, self.backend.speller, kept), self.grammar.kind == "lark")
        except Unmodelled:
            return None
        if tables.cost >= UNREACHABLE:
            raise GrammarImpossible("grammar", f"{SIGNS['advice']['impossible']} (its outputs have no end)")
        if tables.cost > LONGEST:
            raise GrammarTooLarge("grammar", f"its shortest output must not exceed {LONGEST} tokens", tables.cost)
        ahead = list(itertools.islice(unrolled(itertools.islice(tables.cheapest(), CHECKED)), CHECKED * CHECKED_AHEAD))
        probe = self._matcher.deep_copy()
        accepted = probe.validate_tokens(ahead) == len(ahead)
        plain = itertools.takewhile(lambda token: token not in vocabulary.special_ids, ahead[:MASKED])
        text = b"".join(vocabulary.token_bytes[token] for token in plain)[:MASKED]
        for token in map(vocabulary.by_bytes.get, (text[i : i + 1] for i in range(len(text)))):
            if not probe.compute_ff_bytes():  # a mask is only asked for where text is not forced
                probe.compute_bitmask()
            if probe.is_error() or not accepted or token is None:
                break
            probe.consume_token(token)
        if probe.is_error():  # each output would run into it
            raise self.broken(probe)
        return tables if accepted else None

    @property
    def nbytes(self) -> int:
        costs = COST_BYTES + 40 * len(self.text)  # not computed yet: the usual size
        if not self.far:
            costs = 0 if self._counted is None else self._counted.costs.nbytes
        return TEMPLATE_BYTES + 4 * len(self.text) + costs

    def new_state(self) -> LlgState:
        copy = self._matcher.deep_copy()
        if self._spoiled or copy.is_error():
            raise GrammarError("grammar", "its compiled form is broken")
        return LlgState(self, copy)

    def new_closing(self, tokens: Sequence[int] = ()) -> Closing | None:
        """The closing of an output that consists of `tokens` so far; None if outputs cannot be parsed."""
        self.has_costs(0)
        return None if self._counted is None else Closing(self, self._counted, tokens)

    def new_matcher(self) -> Any:
        """A matcher at the start of the grammar. It shares the template's lexer, unless another matcher has broken
        that: a limit that one output hits must not end others."""
        copy = self._matcher.deep_copy()
        return self.fresh_matcher() if self._spoiled or copy.is_error() else copy

    def fresh_matcher(self) -> Any:
        """A matcher that shares its lexer with no other. Raises what `explain` makes of the library's complaint."""
        tokenizer, limits = self.backend.vocabulary.ll_tokenizer, llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, self.text, log_level=0, limits=limits)
        if matcher.is_error():
            raise self.broken(matcher)
        return matcher


class LlgState:
    """The state of one output in its grammar, over one `LLMatcher`. One thread at a time."""

    def __init__(self, template: LlgTemplate, matcher: Any) -> None:
        self.template = template
        self.matcher = matcher
        self._vocabulary = template.backend.vocabulary
        self.tokens: list[int] = []
        self._ends = 0
        """Ends of sequence consumed."""
        self._text_ends = [b""]
        """The `json_limits` end behind each token, of straight schemas only, computed when it is needed."""

    @property
    def ended(self) -> bool:
        """An end of sequence was consumed."""
        return self._ends > 0

    @property
    def last(self) -> int:
        """The token consumed last; -1 before the first."""
        return self.tokens[-1] if self.tokens else -1

    @property
    def joint_fill(self) -> JointFill | None:
        return None if self._ends else self.template.backend.fill_all

    def fill(self, mask: Mask) -> None:
        """Write every word of `mask`: the tokens that may come next, end-of-sequence ids where the output may end.

        Raises `GrammarError` if a limit of the library was hit.
        """
        if self._ends:
            mask[:] = 0
            for token in self._vocabulary.eos_ids:
                mask.view("uint32")[token // 32] |= 1 << (token % 32)
            return
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.matcher.is_error():
            self._heal()
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._raise_if_broken()
        self.narrow(mask)

    def narrow(self, mask: Mask) -> None:
        """Remove tokens that exceed limits from a mask that the library has computed."""
        if self.template.is_straight:
            self.template.backend.limits.narrow(mask, self._text_end())

    def _text_end(self) -> bytes:
        for token in self.tokens[len(self._text_ends) - 1 :]:
            self._text_ends.append(end_behind(self._text_ends[-1], self._vocabulary.token_bytes[token]) or b"")
        return self._text_ends[-1]

    def consume(self, token: int) -> bool:
        """Move past `token`. False, and nothing changed, if it is not allowed here. Raises as `fill`."""
        if token in self._vocabulary.eos_ids:
            if not (self._ends or self.matcher.is_accepting()):
                return False
            self._ends += 1
            return True
        if self._ends:
            return False
        data = self._vocabulary.token_bytes[token] if self.template.is_straight else b""
        if (data[:1] == b"u" or b"\\u" in data) and end_behind(self._text_end(), data) is None:
            return False
        taken = self.matcher.try_consume_tokens([token])
        if not taken:
            self.matcher.compute_bitmask()  # a broken lexer refuses silently and reports its error with a mask only
            if self.matcher.is_error():
                self._heal()
                taken = self.matcher.try_consume_tokens([token])
                self._raise_if_broken()
        if taken:
            self.tokens.append(token)
        return bool(taken)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` consumed, end-of-sequence included."""
        ends = min(num_tokens, self._ends)
        self._ends -= ends
        count = num_tokens - ends
        if count > len(self.tokens):
            raise ValueError(f"cannot roll back {num_tokens} tokens, only {len(self.tokens) + ends} were consumed")
        if count:
            self.matcher.rollback(count)
            del self.tokens[-count:], self._text_ends[len(self.tokens) + 1 :]

    def forced(self) -> list[int]:
        """Tokens that must come next, as the tokenizer itself would choose them; [] where there is a choice."""
        if self._ends or self.matcher.is_stopped():
            return []
        tokens = [int(token) for token in self.matcher.compute_ff_tokens()]
        return tokens[: self.matcher.validate_tokens(tokens)] if tokens else []

    def is_accepting(self) -> bool:
        return bool(self._ends or self.matcher.is_accepting())

    def is_terminated(self) -> bool:
        return bool(self._ends or (self.matcher.is_stopped() and not self.matcher.is_error()))

    def _heal(self) -> None:
        """A limit that another copy hit may have broken the shared lexer: consume the tokens again with a lexer of our
        own, and raise if that breaks, too."""
        self.template.spoil()
        self.matcher = self.template.fresh_matcher()
        self.matcher.consume_tokens(self.tokens)
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self.matcher.is_error():
            raise self.template.broken(self.matcher)

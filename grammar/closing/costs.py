"""The cost in tokens of the cheapest text of each shape, and these tokens.

The costs of all shapes are one fixpoint, computed cheapest first (Knuth 1977, "A generalization of Dijkstra's
algorithm"): a choice costs as much as its cheapest alternative, a concatenation the sum of its items, so that recursion
needs no bound. A repetition is not unrolled: it costs its count times what the best unit for it does, found once (a
token that holds many characters of the set, or the body's text over and over).

Costs are upper bounds, for a token may reach across shapes. A text that is written out is spelled as a whole, in chunks
of `SPELLED_BYTES` bytes, which mostly takes fewer tokens (`segments`).
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.vocabulary import UNREACHABLE, Vocabulary, cut

SPELLED_BYTES = 512
"""Bytes of a text that are cut into tokens at once: the dynamic programme (`cut`) takes memory for each."""
ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Repetitions of a body that are tried as one unit."""
MAX_UNITS, MAX_PAIRED = 16, 4
"""Alternatives of a repeated body that are tried as units, and how many of them in pairs, too."""
MAX_SHAPES = 100_000
SHAPE_BYTES = 450
"""Memory of a shape, with what the tables here say of it."""
MAX_KEPT = 4096
"""Texts whose tokens are kept."""

Key = TypeVar("Key")
Value = TypeVar("Value")
Segment = tuple[list[int], int]
"""Tokens, and how many times they come in a row."""
Piece = bytes | Segment
"""A text still to be spelled, or a long repetition of which the tokens are known."""

_VISIBLE = (1 << 127) - (1 << 33)
BLANK = b"\xff"
"""Stands for an optional blank in a text to be spelled: no byte of UTF-8 is 0xFF."""


def token_count(segments: Iterable[Segment]) -> int:
    return sum(len(tokens) * times for tokens, times in segments)


class Memo(dict[Key, Value]):
    """A table of results that is emptied when it is full."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


class Unit(NamedTuple):
    """Tokens for `rounds` rounds of a repetition; `fewer[n]`: those for n rounds, n below `rounds`."""

    rounds: int
    tokens: list[int]
    fewer: list[list[int]]


class Speller:
    """Spells texts and repetitions in the fewest tokens, and remembers them. Any number of threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.spellings = Memo[bytes, list[tuple[int, int]]](MAX_KEPT)
        """The results of `cut` by text."""
        self._cost_tables = Memo[nodes.Shape, CostTable](MAX_KEPT)
        self._units = Memo[tuple[tuple[bytes, ...], tuple[int, ...]], Unit | None](MAX_KEPT // 4)

    def cost_table(self, shape: nodes.Shape) -> CostTable:
        """The costs of a shape that occurs in many grammars."""
        if shape not in self._cost_tables:
            self._cost_tables[shape] = CostTable(shape, self)
        return self._cost_tables[shape]

    def tokens(self, text: bytes) -> list[int] | None:
        """The fewest tokens that spell `text` (of some `SPELLED_BYTES` bytes at most); None if none do."""
        spelling, offset, ids = self._spelling(text), 0, list[int]()
        if spelling[0][0] >= UNREACHABLE:
            return None
        while offset < len(spelling) - 1:
            ids.append(spelling[offset][1])
            offset += len(self.vocabulary.token_bytes[ids[-1]])
        return ids

    def cost(self, text: bytes, begin: int = 0) -> int:
        """The fewest tokens for `text` from byte `begin` on."""
        return min(UNREACHABLE, self._spelling(text)[begin][0])

    def farthest(self, text: bytes) -> int:
        """The highest cost of a suffix of `text`, itself excluded."""
        return min(UNREACHABLE, max(self._spelling(text)[1:])[0])

    def _spelling(self, text: bytes) -> list[tuple[int, int]]:
        spelling = self.spellings.get(text)
        if spelling is None:
            cuts = [cut(variant, self.vocabulary) for variant in _with_blanks(text)]
            spelling = self.spellings[text] = min(cuts, key=lambda positions: positions[0][0])
        return spelling

    @functools.cached_property
    def single_bytes(self) -> int:
        """The set of bytes that are tokens by themselves (bit b: byte b)."""
        return sum(1 << byte for byte in range(256) if bytes([byte]) in self.vocabulary.by_bytes)

    def byte_of(self, mask: int) -> bytes | None:
        """A byte of the set `mask` (bit b: byte b) that is a token; None if there is none. Visible ones come first."""
        mask &= self.single_bytes
        for byte in (self.vocabulary.filler, *b"a0AxZ"):
            if mask >> byte & 1:
                return bytes([byte])
        least = mask & _VISIBLE or mask
        return bytes([(least & -least).bit_length() - 1]) if least else None

    def unit(self, texts: Sequence[bytes], sets: Sequence[int]) -> Unit | None:
        """The best unit for a repetition each round of which is any of `texts` or one byte of any of `sets`."""
        key = tuple(texts), tuple(sets)
        if key in self._units:
            return self._units.get(key)
        pairs = [[first, second] for first in texts[:MAX_PAIRED] for second in texts[:MAX_PAIRED] if first != second]
        units = (*map(self._unit, [*([text] for text in texts), *pairs]), *map(self._dense, sets))
        possible = (unit for unit in units if unit is not None)
        best = min(possible, key=lambda unit: (len(unit.tokens) / unit.rounds, unit.rounds), default=None)
        self._units[key] = best
        return best

    def _unit(self, texts: list[bytes]) -> Unit | None:
        """`texts` in turn, each a round, as many times as makes the rounds cheapest."""
        best: tuple[float, int] | None = None
        for rounds in ROUNDS:
            if rounds % len(texts):
                continue
            text = b"".join(texts) * (rounds // len(texts))
            if best is not None and len(text) > SPELLED_BYTES // 2:
                break
            spelled = self.tokens(text)
            if spelled is not None and (best is None or len(spelled) / rounds < best[0]):
                best = len(spelled) / rounds, rounds
        if best is None:
            return None
        repeated = texts * best[1]
        tokens = [self.tokens(b"".join(repeated[:count])) or [] for count in range(best[1] + 1)]
        return Unit(best[1], tokens[-1], tokens[:-1])

    def _dense(self, letters: int) -> Unit | None:
        """The token with the most bytes all of one set, and the fewest tokens for each count below."""
        tokens, letter = self.vocabulary.within(letters), self.byte_of(letters)
        if not tokens or letter is None:
            return None
        tokens = {1: self.vocabulary.by_bytes[letter], **tokens}
        most = max(tokens)
        fewest: list[list[int]] = [[]]
        for count in range(1, most):
            size = min((size for size in tokens if size <= count), key=lambda size: len(fewest[count - size]))
            fewest.append([tokens[size], *fewest[count - size]])
        return Unit(most, [tokens[most]], fewest)


class CostTable:
    """The costs of all shapes in one grammar, for one vocabulary. Any number of threads may share them."""

    def __init__(self, root: nodes.Shape, speller: Speller, kept: Iterable[nodes.Shape] = ()) -> None:
        """`kept`: shapes in it whose costs the speller keeps from one grammar to the next. Raises `Unmodelled` for more
        than `MAX_SHAPES`."""
        self.speller = speller
        self.kept = {shape: speller.cost_table(shape) for shape in kept}
        self.farthest: int | None = None
        """`closing.farthest` of a shape that is kept; None until it is first asked for."""
        self._costs: dict[nodes.Shape, int] = {}
        self._cheapest: dict[nodes.Shape, nodes.Shape] = {}
        """The cheapest alternative of each choice, the cheapest member of an unordered list."""
        self._characters: dict[nodes.Shape, bytes] = {}
        """A character of each set."""
        self._suffixes: dict[nodes.Concat, list[int]] = {}
        self._blanks: dict[nodes.Repeat, bool] = {}
        self.children: dict[nodes.Shape, Sequence[nodes.Shape]] = {}
        self.parents: dict[nodes.Shape, list[nodes.Shape]] = {}
        """The graph of the shapes in both directions, each edge once; shapes that are `kept` have no children here."""
        self._units: dict[nodes.Shape, Unit | None] = {}
        """The units of repetitions by their bodies."""
        self._settle(root)

    def cost(self, shape: nodes.Shape) -> int:
        """Tokens of the cheapest text; `UNREACHABLE` if there is none, or the fixpoint has not come to it."""
        return self._costs.get(shape, UNREACHABLE)

    def rest(self, shape: nodes.Shape, index: Any) -> int:
        """Tokens of the cheapest text behind the dot at `index` of a shape (`recognizer.Frame`)."""
        if isinstance(shape, nodes.Lexeme):
            return 0 if index == 0 else self.cost(shape.body)
        if isinstance(shape, nodes.Literal):
            return self.speller.cost(shape.data, index + 1)
        if isinstance(shape, nodes.Concat):
            return self.suffix(shape, index + 1)
        if isinstance(shape, nodes.Repeat):
            return self.times(shape, shape.least - index)
        if isinstance(shape, nodes.Unordered):
            return min(UNREACHABLE, sum(map(self.cost, shape.left(index))))
        assert isinstance(shape, Words)
        return min(map(self.speller.cost, shape.endings(index)), default=UNREACHABLE)

    @property
    def nbytes(self) -> int:
        """Memory of the shapes and the tables, roughly."""
        return SHAPE_BYTES * len(self._costs)

    def suffix(self, shape: nodes.Concat, begin: int) -> int:
        """The cost of the items from `begin` on."""
        if shape not in self._suffixes:
            costs = [self.cost(item) for item in reversed(shape.items)]
            self._suffixes[shape] = [0, *itertools.accumulate(costs)][::-1]
        return self._suffixes[shape][begin]

    def times(self, shape: nodes.Repeat, count: int) -> int:
        """The cost of the body, `count` times in a row."""
        if count <= 1:
            return self.cost(shape.body) if count == 1 else 0
        unit = self.unit_of(shape)
        if unit is None:
            return min(UNREACHABLE, count * self.cost(shape.body))
        units, rounds = _split(shape, unit, count)
        return units * len(unit.tokens) + len(unit.fewer[rounds])

    # ---------------------------------------------------------------- the texts

    def pieces(self, shape: nodes.Shape, begin: Any = 0) -> Iterator[Piece]:
        """The cheapest text of a shape. `begin`: items of a concatenation, rounds of a repetition or bytes of a literal
        to be left out, or the state of words."""
        stack = [(shape, begin)]
        while stack:
            shape, begin = stack.pop()
            if isinstance(shape, nodes.Literal):
                yield shape.data[begin:]
            elif isinstance(shape, nodes.SpecialToken):
                yield [shape.token], 1
            elif isinstance(shape, nodes.Lexeme):
                stack += [(shape.body, 0)] * (begin == 0)
            elif isinstance(shape, nodes.Concat):
                stack += [(item, 0) for item in reversed(shape.items[begin:])]
            elif isinstance(shape, nodes.Unordered) and (begin or shape.counts):
                stack += [(item, 0) for item in reversed(shape.left(begin))]
            elif isinstance(shape, (nodes.Choice, nodes.Unordered)):
                stack.append((self._cheapest[shape], 0))
            elif isinstance(shape, Words):
                yield min(shape.endings(begin or b""), key=self.speller.cost)
            elif not isinstance(shape, nodes.Repeat):
                yield self._characters[shape]
            elif shape.least == begin == 0 and self._is_blank(shape):
                yield BLANK
            elif shape.least <= begin:
                continue
            elif shape.least - begin == 1 or (unit := self.unit_of(shape)) is None:
                stack += [(shape.body, 0)] * (shape.least - begin)
            else:
                units, rounds = _split(shape, unit, shape.least - begin)
                table = self.speller.vocabulary.token_bytes
                if is_short := units * len(unit.tokens) <= SPELLED_BYTES // 8:
                    yield b"".join(table[token] for token in unit.tokens) * units
                yield b"".join(table[token] for token in unit.fewer[rounds])
                if not is_short:
                    yield unit.tokens, units

    def segments(self, pieces: Iterable[Piece]) -> Iterator[Segment]:
        """The tokens of `pieces`, neighbouring texts spelled as one."""
        text = b""
        for piece in itertools.chain(pieces, ((),)):
            if isinstance(piece, bytes):
                text += piece
            while len(text) >= SPELLED_BYTES or (text and not isinstance(piece, bytes)):
                yield self.speller.tokens(text[:SPELLED_BYTES]) or [], 1
                text = text[SPELLED_BYTES:]
            if piece and not isinstance(piece, bytes):
                yield piece

    def _is_blank(self, shape: nodes.Repeat) -> bool:
        """Whether an optional shape is a blank."""
        if shape not in self._blanks:
            self._blanks[shape] = False  # should its text lead to itself
            self._blanks[shape] = shape.most != 0 and self._short_text(shape.body) == b" "
        return self._blanks[shape]

    def _short_text(self, shape: nodes.Shape) -> bytes | None:
        """The cheapest text of a shape without optional blanks; None if it is long or there is none."""
        text = b""
        if self.cost(shape) >= UNREACHABLE:
            return None
        for piece in self.pieces(shape):
            if not isinstance(piece, bytes) or len(text) + len(piece) > SPELLED_BYTES // 8:
                return None
            text += piece
        return text.replace(BLANK, b"")

    # ---------------------------------------------------------------- the fixpoint

    def _settle(self, root: nodes.Shape) -> None:
        """Settle the cost of every shape in `root` by Knuth's algorithm: a shape leaves the heap when no cheaper one is
        left, so the first settled alternative of a choice is its cheapest."""
        children_of = nodes.reachable(root, MAX_SHAPES, self.kept)
        parents, unsettled, settled = self.parents, dict[nodes.Shape, int](), dict[nodes.Shape, None]()
        heap: list[tuple[int, int, nodes.Shape]] = []
        costs, count = self._costs, itertools.count()
        for table in self.kept.values():
            costs.update(table._costs)
            self._cheapest.update(table._cheapest)
            self._characters.update(table._characters)

        def push(shape: nodes.Shape, cost: int) -> None:
            if cost < UNREACHABLE:
                heapq.heappush(heap, (cost, next(count), shape))

        for shape, children in children_of.items():
            self.children[shape] = distinct = [*dict.fromkeys(children)] if len(children) > 1 else children
            unsettled[shape] = len(distinct)
            for child in distinct:
                parents.setdefault(child, []).append(shape)
            if shape not in self.kept and (not children or isinstance(shape, (nodes.CharSet, nodes.Repeat))):
                push(shape, self._current_cost(shape))
        for child in self.kept:  # of equal alternatives the simplest are the first
            push(child, costs[child])
        while heap:
            cost, _, shape = heapq.heappop(heap)
            if shape in settled:
                continue
            settled[shape] = None
            if isinstance(shape, nodes.Repeat) and shape.least > 1:  # more alternatives of its body are settled by now
                cost = min(cost, self._current_cost(shape))
            costs[shape] = cost
            for parent in parents.get(shape, ()):
                unsettled[parent] -= 1
                if parent in settled or (unsettled[parent] and isinstance(parent, nodes.Concat)):
                    continue
                if not isinstance(parent, (nodes.Choice, nodes.Unordered)) or (
                    isinstance(parent, nodes.Unordered) and parent.counts
                ):
                    push(parent, self._current_cost(parent))
                elif parent not in self._cheapest:
                    self._cheapest[parent] = shape
                    push(parent, cost)
        for shape in children_of:
            costs.setdefault(shape, UNREACHABLE)
            if isinstance(shape, nodes.Repeat) and shape.least > 1:
                self.unit_of(shape)

    def _current_cost(self, shape: nodes.Shape) -> int:
        """The cost by what is settled of its children."""
        if isinstance(shape, nodes.SpecialToken):
            return 1
        if isinstance(shape, nodes.CharSet):
            text = self._character_of(shape)
            return UNREACHABLE if text is None else self.speller.cost(text)
        return self.rest(shape, shape.begin)

    def _character_of(self, shape: nodes.CharSet) -> bytes | None:
        """The cheapest character of a set, as far as one looks: one byte, else the first of several bytes."""
        character = self.speller.byte_of(shape.mask)
        for low, _, tail in shape.tails if character is None else ():
            if (rest := self._short_text(tail)) is not None:
                character = bytes([low]) + rest
                break
        if character is not None:
            self._characters[shape] = character
        return character

    def unit_of(self, shape: nodes.Repeat) -> Unit | None:
        """The best unit for a repetition's rounds; None if its body has no short text."""
        body = shape.body
        if body in self._units:
            return self._units[body]
        items = body.items if isinstance(body, nodes.Choice) else (body,)
        texts = [text for item in items if (text := self._short_text(item))][:MAX_UNITS]
        unit = self.speller.unit(texts, [item.mask for item in items if isinstance(item, nodes.CharSet)])
        if all(item in self._costs for item in items):
            self._units[body] = unit
        return unit


def _with_blanks(text: bytes) -> list[bytes]:
    """The text with optional blanks behind colons, commas, both or none: models write JSON in one of these ways, and
    which one takes the fewest tokens depends on the vocabulary."""
    if BLANK not in text:
        return [text]
    variants = [text, text.replace(b":" + BLANK, b": ")]
    variants += [variant.replace(b"," + BLANK, b", ") for variant in variants]
    return [variant.replace(BLANK, b"") for variant in variants]


def _split(shape: nodes.Repeat, unit: Unit, count: int) -> tuple[int, int]:
    """(units, single rounds) that make `count` rounds; or a few more, where that is as cheap and allowed."""
    units, rounds = divmod(count, unit.rounds)
    may_exceed = shape.most is None or unit.rounds - rounds <= shape.most - shape.least
    return (units + 1, 0) if may_exceed and len(unit.fewer[rounds]) >= len(unit.tokens) else (units, rounds)

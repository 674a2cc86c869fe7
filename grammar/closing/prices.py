"""The cost of the cheapest text of each shape in tokens, and these tokens.

The cost of every shape is found by one fixpoint over all of them, cheapest first (Knuth 1977, "A generalization of
Dijkstra's algorithm"): alternatives cost as much as the cheapest, a sequence the sum of its items, so that recursion
needs no bound. Counts are kept: a repetition costs its count times what the best unit for it does, found once (a token
that holds many letters of the set, or the body's text over and over).

Costs are upper bounds, for a token may reach across parts. A text that is written out is spelled as a whole, piece by
piece of `SHORT` bytes, which mostly takes fewer tokens (`segments`).
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.vocabulary import UNREACHABLE, Vocabulary, cut

SHORT = 512
"""Bytes of a text that are spelled together."""
ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Repetitions of a body that are tried as one unit."""
MAX_UNITS, MAX_PAIRED = 16, 4
"""Alternatives of a body that are tried as units, and of those in pairs."""
MAX_SHAPES = 100_000
SHAPE_BYTES = 450
"""Memory of a shape."""
MAX_KEPT = 4096
"""Texts whose tokens are kept."""

Segment = tuple[list[int], int]
"""Tokens, so many times in a row."""
Piece = bytes | Segment


_VISIBLE = (1 << 127) - (1 << 33)
BLANK = b"\xff"
"""A blank that may be left out, in a text to be spelled."""


class Unit(NamedTuple):
    """A text for some rounds of a repetition, by its tokens; and for fewer rounds, each count by its own."""

    rounds: int
    tokens: list[int]
    fewer: list[list[int]]


class Speller:
    """The fewest tokens of short texts and long repetitions. It keeps them. Any number of threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.spellings: dict[bytes, list[tuple[int, int]]] = {}
        """Texts as `cut` has them."""
        self._parts: dict[nodes.Shape, Prices] = {}
        self._units: dict[tuple[tuple[bytes, ...], tuple[int, ...]], Unit | None] = {}

    def priced(self, part: nodes.Shape) -> Prices:
        """The prices of a part that many grammars have."""
        if part not in self._parts:
            if len(self._parts) >= MAX_KEPT:
                self._parts.clear()
            self._parts[part] = Prices(part, self)
        return self._parts[part]

    def tokens(self, text: bytes) -> list[int] | None:
        """The fewest tokens for `text` (at most some `SHORT` bytes); None if there are none."""
        spelling, at, found = self._spelling(text), 0, list[int]()
        if spelling[0][0] >= UNREACHABLE:
            return None
        while at < len(spelling) - 1:
            found.append(spelling[at][1])
            at += len(self.vocabulary.token_bytes[found[-1]])
        return found

    def cost(self, text: bytes, begin: int = 0) -> int:
        """The fewest tokens for `text` from byte `begin` on."""
        return min(UNREACHABLE, self._spelling(text)[begin][0])

    def dearest(self, text: bytes) -> int:
        """The most that the rest of `text` costs behind any of its bytes."""
        return min(UNREACHABLE, max(self._spelling(text)[1:])[0])

    def _spelling(self, text: bytes) -> list[tuple[int, int]]:
        spelling = self.spellings.get(text)
        if spelling is None:
            if len(self.spellings) >= MAX_KEPT:
                self.spellings.clear()
            cuts = [cut(said, self.vocabulary) for said in _with_blanks(text)]
            spelling = self.spellings[text] = min(cuts, key=lambda found: found[0][0])
        return spelling

    @functools.cached_property
    def letters(self) -> int:
        """The bytes that are tokens by themselves (bit b: byte b)."""
        return sum(1 << byte for byte in range(256) if bytes([byte]) in self.vocabulary.by_bytes)

    def letter(self, mask: int) -> bytes | None:
        """A letter of a set (bit b: byte b) that some token spells."""
        mask &= self.letters
        for byte in (self.vocabulary.filler, *b"a0AxZ"):
            if mask >> byte & 1:
                return bytes([byte])
        least = mask & _VISIBLE or mask
        return bytes([(least & -least).bit_length() - 1]) if least else None

    def unit(self, texts: Sequence[bytes], sets: Sequence[int]) -> Unit | None:
        """The best unit for a repetition whose rounds are any of `texts` or one letter of any of `sets`."""
        key = tuple(texts), tuple(sets)
        if key in self._units:
            return self._units.get(key)
        if len(self._units) >= MAX_KEPT // 4:
            self._units.clear()
        pairs = [[one, two] for one in texts[:MAX_PAIRED] for two in texts[:MAX_PAIRED] if one != two]
        units = (*map(self._unit, [*([text] for text in texts), *pairs]), *map(self._dense, sets))
        found = (unit for unit in units if unit is not None)
        best = min(found, key=lambda unit: (len(unit.tokens) / unit.rounds, unit.rounds), default=None)
        self._units[key] = best
        return best

    def _unit(self, texts: list[bytes]) -> Unit | None:
        """`texts`, each a round, in turn as often as it is cheapest by the round."""
        best: tuple[float, int] | None = None
        for rounds in ROUNDS:
            if rounds % len(texts):
                continue
            text = b"".join(texts) * (rounds // len(texts))
            if best is not None and len(text) > SHORT // 2:
                break
            spelled = self.tokens(text)
            if spelled is not None and (best is None or len(spelled) / rounds < best[0]):
                best = len(spelled) / rounds, rounds
        if best is None:
            return None
        whole = texts * best[1]
        tokens = [self.tokens(b"".join(whole[:count])) or [] for count in range(best[1] + 1)]
        return Unit(best[1], tokens[-1], tokens[:-1])

    def _dense(self, letters: int) -> Unit | None:
        """The token with the most letters of a set, and the fewest tokens for each count below."""
        tokens, letter = self.vocabulary.within(letters), self.letter(letters)
        if not tokens or letter is None:
            return None
        tokens = {1: self.vocabulary.by_bytes[letter], **tokens}
        most = max(tokens)
        fewest: list[list[int]] = [[]]
        for count in range(1, most):
            size = min((size for size in tokens if size <= count), key=lambda size: len(fewest[count - size]))
            fewest.append([tokens[size], *fewest[count - size]])
        return Unit(most, [tokens[most]], fewest)


class Prices:
    """The prices of all shapes in one grammar, for one vocabulary. Any number of threads may share them."""

    def __init__(self, root: nodes.Shape, speller: Speller, kept: Iterable[nodes.Shape] = ()) -> None:
        """`kept`: parts whose prices the speller keeps from one grammar to the next. Raises `Unmodelled` for a shape
        that is too large."""
        self.speller = speller
        self.kept = {part: speller.priced(part) for part in kept}
        self.dearest: int | None = None
        """`farthest` of a part that is kept; None: not counted so far."""
        self._costs: dict[nodes.Shape, int] = {}
        self._best: dict[nodes.Shape, nodes.Shape] = {}
        """The cheapest of alternatives."""
        self._letters: dict[nodes.Shape, bytes] = {}
        """One character of each set."""
        self._suffixes: dict[nodes.Chain, list[int]] = {}
        self._blanks: dict[nodes.Times, bool] = {}
        self.inner: dict[nodes.Shape, Sequence[nodes.Shape]] = {}
        self.users: dict[nodes.Shape, list[nodes.Shape]] = {}
        """The parts of each shape, and the shapes that each is a part of, without repetitions; not within `kept`."""
        self._units: dict[nodes.Shape, Unit | None] = {}
        """The units of repetitions by their bodies."""
        self._settle(root)

    def shapes(self) -> Iterable[nodes.Shape]:
        return self._costs.keys()

    def cost(self, shape: nodes.Shape) -> int:
        """Tokens of the cheapest text known; `UNREACHABLE` if there is none, or none so far."""
        return self._costs.get(shape, UNREACHABLE)

    def rest(self, shape: nodes.Shape, index: Any) -> int:
        """Tokens of the cheapest text behind a place in a shape (`tracker.Frame`)."""
        if isinstance(shape, nodes.Lexeme):
            return 0 if index == 0 else self.cost(shape.body)
        if isinstance(shape, nodes.Literal):
            return self.speller.cost(shape.data, index + 1)
        if isinstance(shape, nodes.Chain):
            return self.suffix(shape, index + 1)
        if isinstance(shape, nodes.Times):
            return self.times(shape, shape.least - index)
        if isinstance(shape, nodes.Unordered):
            return min(UNREACHABLE, sum(map(self.cost, shape.left(index))))
        assert isinstance(shape, Words)
        return min(map(self.speller.cost, shape.endings(index)), default=UNREACHABLE)

    @property
    def nbytes(self) -> int:
        """Memory of the shapes and what is known of them, roughly."""
        return SHAPE_BYTES * len(self._costs)

    def suffix(self, shape: nodes.Chain, begin: int) -> int:
        """The cost of the items from `begin` on."""
        if shape not in self._suffixes:
            costs = [self.cost(item) for item in reversed(shape.items)]
            self._suffixes[shape] = [0, *itertools.accumulate(costs)][::-1]
        return self._suffixes[shape][begin]

    def times(self, shape: nodes.Times, count: int) -> int:
        """The cost of the body, `count` times in a row."""
        if count <= 1:
            return self.cost(shape.body) if count == 1 else 0
        unit = self.unit_of(shape)
        if unit is None:
            return min(UNREACHABLE, count * self.cost(shape.body))
        whole, rest = _split(shape, unit, count)
        return whole * len(unit.tokens) + len(unit.fewer[rest])

    # ---------------------------------------------------------------- the texts

    def pieces(self, shape: nodes.Shape, begin: Any = 0) -> Iterator[Piece]:
        """The cheapest text. `begin`: items of a sequence, rounds of a repetition or bytes of a text that are left
        out, or the state of words."""
        stack = [(shape, begin)]
        while stack:
            shape, begin = stack.pop()
            if isinstance(shape, nodes.Literal):
                yield shape.data[begin:]
            elif isinstance(shape, nodes.Mark):
                yield [shape.token], 1
            elif isinstance(shape, nodes.Lexeme):
                stack += [(shape.body, 0)] * (begin == 0)
            elif isinstance(shape, nodes.Chain):
                stack += [(item, 0) for item in reversed(shape.items[begin:])]
            elif isinstance(shape, nodes.Unordered) and (begin or shape.counts):
                stack += [(item, 0) for item in reversed(shape.left(begin))]
            elif isinstance(shape, (nodes.Either, nodes.Unordered)):
                stack.append((self._best[shape], 0))
            elif isinstance(shape, Words):
                yield min(shape.endings(begin or b""), key=self.speller.cost)
            elif not isinstance(shape, nodes.Times):
                yield self._letters[shape]
            elif shape.least == begin == 0 and self._is_blank(shape):
                yield BLANK
            elif shape.least <= begin:
                continue
            elif shape.least - begin == 1 or (unit := self.unit_of(shape)) is None:
                stack += [(shape.body, 0)] * (shape.least - begin)
            else:
                whole, rest = _split(shape, unit, shape.least - begin)
                table = self.speller.vocabulary.token_bytes
                if short := whole * len(unit.tokens) <= SHORT // 8:
                    yield b"".join(table[token] for token in unit.tokens) * whole
                yield b"".join(table[token] for token in unit.fewer[rest])
                if not short:
                    yield unit.tokens, whole

    def segments(self, pieces: Iterable[Piece]) -> Iterator[Segment]:
        """Pieces as tokens, each of these so many times in a row."""
        text = b""
        for piece in itertools.chain(pieces, ((),)):
            if isinstance(piece, bytes):
                text += piece
            while len(text) >= SHORT or (text and not isinstance(piece, bytes)):
                yield self.speller.tokens(text[:SHORT]) or [], 1
                text = text[SHORT:]
            if piece and not isinstance(piece, bytes):
                yield piece

    def _is_blank(self, shape: nodes.Times) -> bool:
        """It may be left out, or is a blank."""
        if shape not in self._blanks:
            self._blanks[shape] = False  # should its text lead to itself
            self._blanks[shape] = shape.most != 0 and self._text(shape.body) == b" "
        return self._blanks[shape]

    def _text(self, shape: nodes.Shape) -> bytes | None:
        """The cheapest text, where it is very short."""
        found = b""
        if self.cost(shape) >= UNREACHABLE:
            return None
        for piece in self.pieces(shape):
            if not isinstance(piece, bytes) or len(found) + len(piece) > SHORT // 8:
                return None
            found += piece
        return found.replace(BLANK, b"")

    # ---------------------------------------------------------------- the fixpoint

    def _settle(self, root: nodes.Shape) -> None:
        """Settle the cost of every shape in `root`, cheapest first: so the first of alternatives is the cheapest."""
        found = nodes.within(root, MAX_SHAPES, self.kept)
        users, missing, settled = self.users, dict[nodes.Shape, int](), dict[nodes.Shape, None]()
        heap: list[tuple[int, int, nodes.Shape]] = []
        costs, count = self._costs, itertools.count()
        for own in self.kept.values():
            costs.update(own._costs)
            self._best.update(own._best)
            self._letters.update(own._letters)

        def push(shape: nodes.Shape, cost: int) -> None:
            if cost < UNREACHABLE:
                heapq.heappush(heap, (cost, next(count), shape))

        for shape, inner in found.items():
            self.inner[shape] = todo = [*dict.fromkeys(inner)] if len(inner) > 1 else inner
            missing[shape] = len(todo)
            for part in todo:
                users.setdefault(part, []).append(shape)
            if shape not in self.kept and (not inner or isinstance(shape, (nodes.Letters, nodes.Times))):
                push(shape, self._value(shape))
        for part in self.kept:  # of equal alternatives the simplest are the first
            push(part, costs[part])
        while heap:
            cost, _, shape = heapq.heappop(heap)
            if shape in settled:
                continue
            settled[shape] = None
            if isinstance(shape, nodes.Times) and shape.least > 1:  # more alternatives of its body are settled by now
                cost = min(cost, self._value(shape))
            costs[shape] = cost
            for user in users.get(shape, ()):
                missing[user] -= 1
                if user in settled or (missing[user] and isinstance(user, nodes.Chain)):
                    continue
                if not isinstance(user, (nodes.Either, nodes.Unordered)) or (
                    isinstance(user, nodes.Unordered) and user.counts
                ):
                    push(user, self._value(user))
                elif user not in self._best:
                    self._best[user] = shape
                    push(user, cost)
        for shape in found:
            costs.setdefault(shape, UNREACHABLE)
            if isinstance(shape, nodes.Times) and shape.least > 1:
                self.unit_of(shape)

    def _value(self, shape: nodes.Shape) -> int:
        """The cost as far as those of its parts are settled."""
        if isinstance(shape, nodes.Mark):
            return 1
        if isinstance(shape, nodes.Letters):
            text = self._one(shape)
            return UNREACHABLE if text is None else self.speller.cost(text)
        return self.rest(shape, shape.begin)

    def _one(self, shape: nodes.Letters) -> bytes | None:
        """A character of a set."""
        text = self.speller.letter(shape.mask)
        for low, _, tail in shape.tails if text is None else ():
            if (rest := self._text(tail)) is not None:
                text = bytes([low]) + rest
                break
        if text is not None:
            self._letters[shape] = text
        return text

    def unit_of(self, shape: nodes.Times) -> Unit | None:
        """The best unit for its rounds."""
        body = shape.body
        if body in self._units:
            return self._units[body]
        items = body.items if isinstance(body, nodes.Either) else (body,)
        texts = [text for item in items if (text := self._text(item))][:MAX_UNITS]
        found = self.speller.unit(texts, [item.mask for item in items if isinstance(item, nodes.Letters)])
        if all(item in self._costs for item in items):
            self._units[body] = found
        return found


def _with_blanks(text: bytes) -> list[bytes]:
    """Texts with and without the blanks that may be left out: behind colons, commas, both or none."""
    if BLANK not in text:
        return [text]
    found = [text, text.replace(b":" + BLANK, b": ")]
    found += [said.replace(b"," + BLANK, b", ") for said in found]
    return [said.replace(BLANK, b"") for said in found]


def _split(shape: nodes.Times, unit: Unit, count: int) -> tuple[int, int]:
    """Units and single rounds for `count` rounds; or for some more, where that is cheaper and allowed."""
    whole, rest = divmod(count, unit.rounds)
    more = shape.most is None or unit.rounds - rest <= shape.most - shape.least
    return (whole + 1, 0) if more and len(unit.fewer[rest]) >= len(unit.tokens) else (whole, rest)

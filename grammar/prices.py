"""What the cheapest text of a shape costs in tokens, and which tokens those are.

Counts are kept: a repetition costs its count times what the best unit for it does, found once (a token that holds many
letters of the set, or the body's text over and over). So a text of sixty thousand letters is priced as fast as one of
six. Short neighbours are spelled together, in as few tokens as they take; no token reaches across a long repetition's
ends, which is why a price is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncengine.grammar.shapes import Either, Letters, Named, Opaque, Sequence_, Shape, Times, Unmodelled
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.grammar.ways import UNREACHABLE, Way

SHORT = 512
"""Bytes of a text that is spelled as a whole."""
ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Repetitions of a body that are tried as one unit."""
MAX_UNITS, MAX_PAIRED = 16, 4
"""Alternatives of a body that are tried as units, and of those in pairs."""
MAX_SHAPES = 100_000


class Unit(NamedTuple):
    """A text for some rounds of a repetition, by its tokens; and for fewer rounds, each count by its own."""

    rounds: int
    tokens: list[int]
    fewer: list[list[int]]


class Run(NamedTuple):
    """Items of a sequence from `first` up to `end` that are spelled together as `text`; None: one by itself."""

    first: int
    end: int
    text: bytes | None


class Price:
    """Of one shape. `cost` is in tokens, `UNREACHABLE` or more if no text of it is known."""

    __slots__ = ("chosen", "cost", "runs", "suffixes", "text", "unit")

    def __init__(self) -> None:
        self.cost = UNREACHABLE
        self.text: bytes | None = None
        """The cheapest text, where it is short."""
        self.chosen: Shape | None = None
        """Of alternatives, the cheapest."""
        self.unit: Unit | None = None
        self.runs: list[Run] = []
        self.suffixes: list[int] = []
        """Of a sequence: from each item to its end."""


class Prices:
    """All prices in one shape, for one vocabulary. Immutable once made."""

    def __init__(self, root: Shape, vocabulary: Vocabulary) -> None:
        """Raises `Unmodelled` for a shape that is too large."""
        self._vocabulary = vocabulary
        self._spelled: dict[bytes, list[int] | None] = {}
        self._of: dict[Shape, Price] = {}
        order = _inside_out(root)
        for shape in order:
            self._of[shape] = Price()
        while any([self._improve(shape) for shape in order]):  # more than once only where shapes contain themselves
            pass
        for shape in order:
            if isinstance(shape, Sequence_):
                self._of[shape].runs = self._runs(shape)
                self._of[shape].suffixes = self._suffixes(shape, self._of[shape].runs)
        self.opaque = any(isinstance(shape, Opaque) for shape in order)
        """What costs much here may have a cheaper text that is not known."""
        self.counts = max((self.times(shape, shape.least) for shape in order if isinstance(shape, Times)), default=0)
        """The dearest repetition."""

    def cost(self, shape: Shape) -> int:
        return self._of[shape].cost

    def suffix(self, shape: Sequence_, begin: int) -> int:
        """From item `begin` on."""
        return self._of[shape].suffixes[begin]

    def times(self, shape: Times, count: int) -> int:
        """Of the body, `count` times in a row."""
        if count <= 0:
            return 0
        unit = self._of[shape].unit
        if unit is None:
            return min(UNREACHABLE, count * self._of[shape.body].cost)
        return count // unit.rounds * len(unit.tokens) + len(unit.fewer[count % unit.rounds])

    # ---------------------------------------------------------------- the tokens

    def tokens(self, shape: Shape) -> Iterator[int]:
        """Those of its cheapest text, `cost` of them."""
        price = self._of[shape]
        if price.text is not None:
            yield from self._spell(price.text) or ()
        elif isinstance(shape, Sequence_):
            yield from self.suffix_tokens(shape, 0)
        elif isinstance(shape, Times):
            yield from self.times_tokens(shape, shape.least)
        elif price.chosen is not None:
            yield from self.tokens(price.chosen)

    def suffix_tokens(self, shape: Sequence_, begin: int) -> Iterator[int]:
        for run in self._of[shape].runs:
            if run.end <= begin:
                continue
            if run.text is None:
                yield from self.tokens(shape.items[run.first])
            else:
                said = sum(len(self._of[shape.items[index]].text or b"") for index in range(run.first, begin))
                yield from self._spell(run.text[said:]) or ()

    def times_tokens(self, shape: Times, count: int) -> Iterator[int]:
        unit = self._of[shape].unit
        if unit is None:
            for _ in range(count):
                yield from self.tokens(shape.body)
        elif count > 0:
            for _ in range(count // unit.rounds):
                yield from unit.tokens
            yield from unit.fewer[count % unit.rounds]

    # ---------------------------------------------------------------- pricing

    def _improve(self, shape: Shape) -> bool:
        """Look again what it costs. Whether that has become less."""
        price = self._of[shape]
        cost, text = UNREACHABLE, None
        if isinstance(shape, Letters):
            text = self._letter(shape)
        elif isinstance(shape, (Either, Named)):
            options = shape.items if isinstance(shape, Either) else (shape.target,)
            best = min(options, key=lambda option: self._key(option), default=None)
            if best is not None:
                cost, text = self._of[best].cost, self._of[best].text
                if cost < price.cost:
                    price.chosen = best
        elif isinstance(shape, Sequence_):
            texts = [self._of[item].text for item in shape.items]
            if all(part is not None for part in texts) and sum(map(len, texts)) <= SHORT:  # type: ignore[arg-type]
                text = b"".join(texts)  # type: ignore[arg-type]
            elif all(self._of[item].cost < UNREACHABLE for item in shape.items):
                cost = self._suffixes(shape, self._runs(shape))[0]
        elif isinstance(shape, Times):
            cost, text = self._repeated(shape)
        if text is not None:
            spelled = self._spell(text)
            cost = UNREACHABLE if spelled is None else len(spelled)
        if cost >= price.cost:
            return False
        price.cost, price.text = cost, text
        return True

    def _key(self, shape: Shape | None) -> tuple[int, int]:
        price = self._of[shape]  # type: ignore[index]
        return price.cost, len(price.text or b"")

    def _letter(self, shape: Letters) -> bytes | None:
        filler = self._vocabulary.filler
        for byte in (filler, *b"a0AxZ", *range(33, 127), *range(256)):
            if shape.mask >> byte & 1:
                return bytes([byte])
        for low, _, tail in shape.tails:
            if (rest := self._of[tail].text) is not None:
                return bytes([low]) + rest
        return None

    def _repeated(self, shape: Times) -> tuple[int, bytes | None]:
        price = self._of[shape]
        if shape.least == 0:
            return 0, b""
        texts = self._units(shape.body)
        pairs = [[one, two] for one in texts[:MAX_PAIRED] for two in texts[:MAX_PAIRED] if one != two]
        found = [unit for said in ([text] for text in texts) if (unit := self._unit(said)) is not None]
        found += [unit for said in pairs if (unit := self._unit(said)) is not None]
        found += [unit for unit in self._dense(shape.body) if unit is not None]
        if found:
            price.unit = min(found, key=lambda unit: (len(unit.tokens) / unit.rounds, unit.rounds))
        cost = self.times(shape, shape.least)
        body = self._of[shape.body].text
        if shape.least == 1:
            return self._of[shape.body].cost, body
        return cost, None

    def _units(self, body: Shape) -> list[bytes]:
        """Short texts of one round."""
        while isinstance(body, Named) and body.target is not None:
            body = body.target
        found = [self._of[item].text for item in body.items] if isinstance(body, Either) else [self._of[body].text]
        short = [text for text in found if text and len(text) <= SHORT // 8]
        return short[:MAX_UNITS]

    def _unit(self, texts: list[bytes]) -> Unit | None:
        """`texts`, each a round, in turn as often as it is cheapest by the round."""
        best: tuple[float, int] | None = None
        for rounds in ROUNDS:
            if rounds % len(texts):
                continue
            text = b"".join(texts) * (rounds // len(texts))
            if best is not None and len(text) > SHORT // 2:
                break
            spelled = self._spell(text)
            if spelled is not None and (best is None or len(spelled) / rounds < best[0]):
                best = len(spelled) / rounds, rounds
        if best is None:
            return None
        whole = texts * best[1]
        tokens = [self._spell(b"".join(whole[:count])) or [] for count in range(best[1] + 1)]
        return Unit(best[1], tokens[-1], tokens[:-1])

    def _dense(self, body: Shape) -> Iterator[Unit | None]:
        """The token with the most letters of a set."""
        while isinstance(body, Named) and body.target is not None:
            body = body.target
        for shape in body.items if isinstance(body, Either) else (body,):
            if isinstance(shape, Letters):
                mask = shape.mask
                for data, token in self._vocabulary.by_length:
                    if all(mask >> byte & 1 and byte < 128 for byte in data):
                        fewer = [self._spell(data[:count]) for count in range(len(data))]
                        if all(part is not None for part in fewer):
                            yield Unit(len(data), [token], [part or [] for part in fewer])
                        break

    def _suffixes(self, shape: Sequence_, runs: list[Run]) -> list[int]:
        """What each item and those after it cost."""
        found = [0] * (len(shape.items) + 1)
        for run in reversed(runs):
            if run.text is None:
                found[run.first] = self._of[shape.items[run.first]].cost + found[run.end]
                continue
            way, place = Way(list(run.text), self._vocabulary), 0
            for index in range(run.first, run.end):
                found[index] = way.cost(place) + found[run.end]
                place += len(self._of[shape.items[index]].text or b"")
        return found

    def _runs(self, shape: Sequence_) -> list[Run]:
        runs: list[Run] = []
        for index, item in enumerate(shape.items):
            text, last = self._of[item].text, runs[-1] if runs else None
            if text is not None and last is not None and last.text is not None and len(last.text) + len(text) <= SHORT:
                runs[-1] = Run(last.first, index + 1, last.text + text)
            else:
                runs.append(Run(index, index + 1, text))
        return runs

    def _spell(self, text: bytes) -> list[int] | None:
        """The fewest tokens for it; None if there are none."""
        if text not in self._spelled:
            way, at, tokens = Way(list(text), self._vocabulary), 0, []
            if way.cost(0) < UNREACHABLE:
                while at < len(text):
                    tokens.append(way.first(at))
                    at += len(self._vocabulary.token_bytes[tokens[-1]])
            self._spelled[text] = tokens if at == len(text) else None
        return self._spelled[text]


def _inside_out(root: Shape) -> list[Shape]:
    """Every shape once, what it contains before it where it does not contain itself. Raises `Unmodelled`."""
    seen: dict[Shape, bool] = {root: True}
    order: list[Shape] = []
    stack: list[tuple[Shape, Iterator[Shape]]] = [(root, iter(_parts(root)))]
    while stack:
        shape, parts = stack[-1]
        for part in parts:
            if part not in seen:
                seen[part] = True
                stack.append((part, iter(_parts(part))))
                break
        else:
            stack.pop()
            order.append(shape)
        if len(seen) > MAX_SHAPES:
            raise Unmodelled
    return order


def _parts(shape: Shape) -> tuple[Shape, ...]:
    if isinstance(shape, (Sequence_, Either)):
        return shape.items
    if isinstance(shape, Times):
        return (shape.body,)
    if isinstance(shape, Named):
        return () if shape.target is None else (shape.target,)
    if isinstance(shape, Letters):
        return tuple(tail for _, _, tail in shape.tails)
    assert isinstance(shape, Opaque)
    return ()

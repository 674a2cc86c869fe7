"""The cost of the cheapest text of a shape in tokens, and these tokens.

Counts are kept: a repetition costs its count times what the best unit for it does, found once (a token that holds many
letters of the set, or the body's text over and over). So a text of sixty thousand letters is priced as fast as one of
six. Short neighbours are spelled together, in as few tokens as they take; no token reaches across a long repetition's
ends, which is why a price is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncengine.grammar.shapes import Chain, Either, Letters, Named, Opaque, Shape, Times, inside_out
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.grammar.ways import UNREACHABLE, Way

SHORT = 512
"""Bytes of a text that is spelled as a whole."""
ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Repetitions of a body that are tried as one unit."""
MAX_UNITS, MAX_PAIRED = 16, 4
"""Alternatives of a body that are tried as units, and of those in pairs."""
MAX_BLANK = 4
"""Bytes of a text that may be left out and is said where that is cheaper."""
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
    """The price of one shape. `cost` is in tokens, `UNREACHABLE` or more if no text of it is known."""

    __slots__ = ("chosen", "cost", "runs", "suffixes", "text", "unit")

    def __init__(self) -> None:
        self.cost = UNREACHABLE
        self.text: bytes | None = None
        """The cheapest text, where it is short."""
        self.chosen: Shape | None = None
        """The cheapest of alternatives."""
        self.unit: Unit | None = None
        self.runs: list[Run] = []
        self.suffixes: list[int] = []
        """Costs of a sequence from each item to its end."""


class Prices:
    """All prices in one shape, for one vocabulary. Immutable once made."""

    def __init__(self, root: Shape, vocabulary: Vocabulary) -> None:
        """Raises `Unmodelled` for a shape that is too large."""
        self._vocabulary = vocabulary
        self._spelled: dict[bytes, list[int] | None] = {}
        self._within: dict[int, dict[int, int]] = {}
        """Tokens made of the letters of a set, by the set."""
        self._of: dict[Shape, Price] = {}
        order = inside_out(root, MAX_SHAPES)
        for shape in order:
            self._of[shape] = Price()
        while sum(self._improve(shape) for shape in order):  # more than once only where shapes contain themselves
            pass
        for shape in order:
            if isinstance(shape, Chain):
                self._of[shape].runs = self._runs(shape)
                self._of[shape].suffixes = self._suffixes(shape, self._of[shape].runs)
        self.opaque = any(isinstance(shape, Opaque) for shape in order)
        """True where expensive shapes may have a cheaper text that is not known."""
        self.counts = max((self.times(shape, shape.least) for shape in order if isinstance(shape, Times)), default=0)
        """The dearest repetition."""

    def cost(self, shape: Shape) -> int:
        return self._of[shape].cost

    def suffix(self, shape: Chain, begin: int) -> int:
        """From item `begin` on."""
        return self._of[shape].suffixes[begin]

    def times(self, shape: Times, count: int) -> int:
        """The cost of the body, `count` times in a row."""
        if count <= 0:
            return 0
        unit = self._of[shape].unit
        if unit is None:
            return min(UNREACHABLE, count * self._of[shape.body].cost)
        whole, rest = self._split(shape, unit, count)
        return whole * len(unit.tokens) + len(unit.fewer[rest])

    def _split(self, shape: Times, unit: Unit, count: int) -> tuple[int, int]:
        """Units and single rounds for `count` rounds; or for some more, where that is cheaper and allowed."""
        whole, rest = divmod(count, unit.rounds)
        more = shape.most is None or count + unit.rounds - rest <= shape.most - shape.least + count
        return (whole + 1, 0) if more and len(unit.fewer[rest]) >= len(unit.tokens) else (whole, rest)

    # ---------------------------------------------------------------- the tokens

    def tokens(self, shape: Shape) -> Iterator[int]:
        """Tokens of its cheapest text, `cost` of them."""
        price = self._of[shape]
        if price.text is not None:
            yield from self._spell(price.text) or ()
        elif isinstance(shape, Chain):
            yield from self.suffix_tokens(shape, 0)
        elif isinstance(shape, Times):
            yield from self.times_tokens(shape, shape.least)
        elif price.chosen is not None:
            yield from self.tokens(price.chosen)

    def suffix_tokens(self, shape: Chain, begin: int) -> Iterator[int]:
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
            whole, rest = self._split(shape, unit, count)
            for _ in range(whole):
                yield from unit.tokens
            yield from unit.fewer[rest]

    # ---------------------------------------------------------------- pricing

    def _improve(self, shape: Shape) -> bool:
        """Look again what it costs. Whether that has become less."""
        price = self._of[shape]
        cost, text = UNREACHABLE, None
        if isinstance(shape, Letters):
            text = self._letter(shape)
        elif isinstance(shape, (Either, Named)):
            options = shape.items if isinstance(shape, Either) else (shape.target,)
            best = min(options, key=self._key, default=None)
            if best is not None:
                cost, text = self._of[best].cost, self._of[best].text
                if cost < price.cost:
                    price.chosen = best
        elif isinstance(shape, Chain):
            texts = [self._of[item].text for item in shape.items]
            said = [part for part in texts if part is not None]
            if len(said) == len(texts) and sum(map(len, said)) <= SHORT:
                text = self._with_blanks(shape, said)
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

    def _with_blanks(self, shape: Chain, texts: list[bytes]) -> bytes:
        """`texts` together; with what may be left out (a blank between JSON's tokens) where that takes fewer tokens."""
        best = b"".join(texts)
        if len(best) > SHORT // 4:
            return best
        for index, item in enumerate(shape.items):
            more = self._of[item.body].text if isinstance(item, Times) and not texts[index] and item.most != 0 else None
            if more and len(more) <= MAX_BLANK:
                tried = b"".join([*texts[:index], more, *texts[index + 1 :]])
                if len(self._spell(tried) or tried) < len(self._spell(best) or best):
                    best, texts = tried, [*texts[:index], more, *texts[index + 1 :]]
        return best

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
        found += self._dense(shape.body)
        if found:
            price.unit = min(found, key=lambda unit: (len(unit.tokens) / unit.rounds, unit.rounds))
        cost = self.times(shape, shape.least)
        if cost > SHORT or price.unit is None:
            return cost, None
        token_bytes = self._vocabulary.token_bytes
        text = b"".join(token_bytes[token] for token in self.times_tokens(shape, shape.least))
        return cost, text if len(text) <= SHORT else None

    def _units(self, body: Shape) -> list[bytes]:
        """Short texts of one round."""
        while isinstance(body, Named) and body.target is not None:
            body = body.target
        found = [self._of[item].text for item in body.items] if isinstance(body, Either) else [self._of[body].text]
        return [text for text in found if text and len(text) <= SHORT // 8][:MAX_UNITS]

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

    def _dense(self, body: Shape) -> Iterator[Unit]:
        """The token with the most letters of a set, and the fewest tokens for less than that."""
        while isinstance(body, Named) and body.target is not None:
            body = body.target
        for shape in body.items if isinstance(body, Either) else (body,):
            if isinstance(shape, Letters):
                best, letter = self._tokens_of(shape.mask), self._letter(shape)
                if best and letter is not None and (single := self._spell(letter)):
                    yield _coins({1: single[0], **best})

    def _tokens_of(self, letters: int) -> dict[int, int]:
        if letters not in self._within:
            self._within[letters] = self._vocabulary.within(letters)
        return self._within[letters]

    def _suffixes(self, shape: Chain, runs: list[Run]) -> list[int]:
        """Costs of each item and those after it."""
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

    def _runs(self, shape: Chain) -> list[Run]:
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


def _coins(tokens: dict[int, int]) -> Unit:
    """`tokens` by how many letters they have; those with the most, and the fewest for each count below."""
    most = max(tokens)
    fewest: list[list[int]] = [[]]
    for count in range(1, most):
        size = min((size for size in tokens if size <= count), key=lambda size: len(fewest[count - size]))
        fewest.append([tokens[size], *fewest[count - size]])
    return Unit(most, [tokens[most]], fewest)

"""Pictures never share what is not theirs, whatever of their digests is alike (contract line 22); bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.long import LONG
from worlds.image_fuzz import ImageLife
from worlds.plants import in_place_of
from worlds.schedule_fuzz import Life

from asyncengine.errors import InvariantViolation
from asyncengine.images import ImageSpan
from asyncengine.scheduler.encoding import EncodedImages
from asyncengine.scheduler.request import Request


def shorten_ids(count: int, at: int = 0) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def broken(self: ImageSpan) -> list[int]:
            base = -(int.from_bytes(self.image.digest[at : at + count]) + 1 << 32) - self.offset
            return list(range(base, base - self.length, -1))

        patch.setattr(ImageSpan, "ids", broken)

    return plant


@in_place_of(ImageSpan, "ids")
def combine_halves(_: Any, self: ImageSpan) -> list[int]:
    """8 bytes that all 16 have gone into (SGLang #8342: hashes that were joined by XOR)."""
    digest = self.image.digest
    base = -((int.from_bytes(digest[:8]) ^ int.from_bytes(digest[8:])) + 1 << 32) - self.offset
    return list(range(base, base - self.length, -1))


def drop_what_is_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EncodedImages, "cut", lambda self: ())


@in_place_of(EncodedImages, "fit")
def drop_what_this_step_needs(fit: Any, self: EncodedImages, request: Request, count: int) -> int:
    self.used.clear()
    return fit(self, request, count)


def encode_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EncodedImages, "take", lambda self: None)


@in_place_of(EncodedImages, "fit")
def cut_what_is_whole(fit: Any, self: EncodedImages, request: Request, count: int) -> int:
    return min(fit(self, request, count), count)


BUGS = {
    "ids of 15 bytes": shorten_ids(15),
    "ids of joined halves": combine_halves,
    "drops what this step needs": drop_what_this_step_needs,
    "encodes nothing": encode_nothing,
    "cuts what is whole": cut_what_is_whole,
}


if LONG:
    BUGS |= {f"ids of 8 bytes from {at}": shorten_ids(8, at) for at in (0, 8)}
    BUGS["ids of the other 15 bytes"] = shorten_ids(15, 1)


@pytest.mark.parametrize("bug", BUGS)
def test_the_fuzz_finds(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation)):
        live_on()


FIRST = (46, 24, 18, 2)
"""Lives that show what others seldom do: they are lived first, to be quick."""


def live_on() -> None:
    for seed in (*FIRST, *range(60)):
        ImageLife(seed, books_every=8).run()  # as the long form does: it has to find them, too


def test_a_picture_that_is_cut_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image would otherwise be encoded for each of its chunks: no wrong answer, and no progress to speak of."""

    def encoded() -> int:
        lives: list[Life] = [ImageLife(seed) for seed in range(5)]
        for life in lives:
            life.run()
        return sum(life.encoded for life in lives if isinstance(life, ImageLife))

    before = encoded()
    drop_what_is_cut(monkeypatch)
    assert encoded() > before

"""Random lives of requests with pictures whose digests are alike in most of their bytes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from worlds.schedule_fuzz import Life

from asyncengine.images import ImageSpan, PromptImage, with_identity
from asyncengine.scheduler.encoding import EncodedImages

DIGESTS = [
    *(bytes(15) + bytes([last]) for last in range(4)),
    *(bytes([first]) + bytes(15) for first in (1, 2, 128)),
    *(bytes(8) + bytes([middle]) + bytes(7) for middle in (1, 2)),
    b"\x01" + bytes(7) + b"\x01" + bytes(7),  # whose halves, as numbers, cancel out
    b"\xff" * 16,
]
"""Any 15 bytes of one are those of another, and so are their halves and what is left of them modulo a power of 2."""


class ImageLife(Life):
    """A life in which most prompts hold pictures; every other one, such as must be whole."""

    def __init__(self, seed: int, depth: int | None = None, **kinds: Any) -> None:
        super().__init__(seed, depth, **kinds)
        self.chance = random.Random(seed)
        self.whole = bool(seed // 2 % 2) and self.config.max_num_batched_tokens > 10
        budget = self.chance.choice([None, 1, 20, 60, 10_000])
        self.config = self.config.replace(image_cache_memory=budget)
        self.budget = budget or 0
        self.scheduler.encoding = EncodedImages(self.budget, self.scheduler.running)
        self.recording.config = self.config
        self.pictured = self.encoded = self.dropped = 0

    def with_images(self, prompt: list[int]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        spans: list[ImageSpan] = []
        place = self.chance.randrange(6)
        while self.chance.random() < 0.7:
            digest = self.chance.choice(DIGESTS)
            length = 1 + sum(digest) % 9  # the same picture has the same number of tokens
            if place + length >= len(prompt):
                break
            image = PromptImage(digest, length, 2 * length, dict)
            if self.whole or length < 3:
                spans.append(ImageSpan(image, place, length, 0, 5, self.whole))
            else:  # with text between its rows
                spans += [ImageSpan(image, place, 2, 0, 5), ImageSpan(image, place + 3, length - 2, 2, 5)]
                place += 1
            place += length + self.chance.randrange(4)
        spans = [span for span in spans if span.end < len(prompt)]
        self.pictured += bool(spans)
        return list(with_identity(prompt, spans)), tuple(spans)

    def turn(self) -> None:
        super().turn()
        images = self.scheduler.encoding
        assert images.nbytes <= self.budget or len(images.sizes) <= 1 + len(list(images.cut())) + len(images.used)

    def before_commit(self, batch: Any, result: Any) -> None:
        if batch.encode is not None:
            self.encoded += 1
            self.dropped += len(batch.encode.dropped)

    def counts(self) -> Counter[str]:
        found = self.scheduler.encoding.reused
        return super().counts() + Counter(
            pictured=self.pictured, encoded=self.encoded, dropped=self.dropped, encoded_before=found
        )

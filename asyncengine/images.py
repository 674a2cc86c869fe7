"""Pictures of a request as plain data: their place in the prompt, and their identity.

A picture is its content: in the place of the placeholders that the model sees, all code that compares tokens (radix
tree, frontiers, routing, speculation) sees negative ids made of the picture's digest and of an index. Python's integers
hold all 16 bytes in each of them, so that two pictures never have an id in common, and equal ones have all. (SGLang
puts hashes of 30 bits there; of the wrong answers that come of it, reference vllm #21175.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DIGEST_BYTES = 16
_INDEX_BITS = 32
"""More than a prompt has tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """A picture that its request's model can read."""

    digest: bytes
    """`DIGEST_BYTES` of a cryptographic hash of its pixels and of the settings by which they are processed."""
    tokens: int
    """Hidden states that the vision tower makes of it."""
    nbytes: int
    """Bytes of these."""
    pixels: Callable[[], Mapping[str, Any]]
    """Arguments of the vision tower, by name. May take long: called when it is encoded, if it is."""
    grid: tuple[int, int] | None = None
    """(rows, columns) of its hidden states, where positions have three axes; None: it is counted like text."""


class ImageSpan(NamedTuple):
    """Consecutive tokens of a prompt that stand for a picture, or for a part of one."""

    image: PromptImage
    first: int
    length: int
    offset: int = 0
    """The picture's hidden state at `first`."""
    token: int = 0
    """The placeholder that the model's tokenizer has there."""
    whole: bool = False
    """Its tokens attend to each other both ways (Gemma 3): one step computes all that is left of them."""

    @property
    def end(self) -> int:
        return self.first + self.length

    def ids(self) -> list[int]:
        """[length] negative ids in the place of its placeholders."""
        # counted from 1: small negative numbers have meanings of their own elsewhere
        base = -(int.from_bytes(self.image.digest) + 1 << _INDEX_BITS) - self.offset
        return list(range(base, base - self.length, -1))


def with_identity(prompt: Sequence[int], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """`prompt` with the ids of its pictures in their places."""
    tokens = list(prompt)
    for span in images:
        tokens[span.first : span.end] = span.ids()
    return tuple(tokens)


def without_identity(prompt: Sequence[int], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """The reverse: `prompt` with placeholders, as its tokenizer gave it."""
    tokens = list(prompt)
    for span in images:
        tokens[span.first : span.end] = [span.token] * span.length
    return tuple(tokens)

"""The output of a request whose engine is in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncengine.outputs import Chunk
from asyncengine.step import TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from asyncengine.scheduler import Output


class RequestOutput(NamedTuple):
    """Everything new of one request."""

    key: int
    chunks: Sequence[Chunk] = ()
    computing: float | None = None
    """Seconds from the first step to the first token; given once, with the first chunk."""
    cached_tokens: int = 0
    """Tokens that its prompt found, or the questions of a decision that have begun."""
    restored_tokens: int = 0
    prompt_logprobs: Mapping[int, TokenLogprob] = {}
    """Log-probabilities by prompt position, given once as well."""
    traces: Sequence[tuple[int, int, NDArray[Any]]] = ()
    """`Mailbox.traces` since the last output."""
    predicted: tuple[int, int] = (0, 0)
    """Tokens of the caller's prediction that were right, and that were wrong, since the last output."""
    cause: Exception | None = None
    """Error that its consumer raises, where that has a type of its own."""
    vectors: NDArray[np.float32] | None = None
    """Vectors [texts, width] of all texts."""
    fault: tuple[int, Output] | None = None
    """Index and last output of the first text that has no vector."""

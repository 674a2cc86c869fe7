"""The steps that a runner runs before anybody asks it, so that no request's step waits for a compiler."""

from __future__ import annotations

from asyncengine.execution.layers.recorded import MOST_TOKENS
from asyncengine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
"""Sampling parameters of the first steps, where they sample."""
_NARROW, _LONG = 2**26, 513
"""Bytes of a model that may be narrow, and the tokens of a text that is long for the narrowest."""


def first_lengths(model_bytes: int, most: int) -> list[int]:
    """Tokens of such steps, at most `most`: one, a short text and a long one."""
    # embeddings of many numbers are looked up by a kernel of their own: of a narrow model that is a longer text
    long = MOST_TOKENS + 1 if model_bytes > _NARROW else _LONG
    return sorted({1, min(2, most), min(long, most)})

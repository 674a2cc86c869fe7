"""The steps that a runner runs before anybody asks it, so that no request's step waits for a compiler."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncengine.execution.layers.recorded import MOST_TOKENS
from asyncengine.kernels.compile_ahead import had
from asyncengine.sampling_params import SamplingParams

logger = logging.getLogger("asyncengine")

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
"""Sampling parameters of the first steps, where they sample."""
_NARROW, _LONG = 2**26, 513
"""Bytes of a model that may be narrow, and the tokens of a text that is long for the narrowest."""


def first_lengths(model_bytes: int, most: int) -> list[int]:
    """Tokens of such steps, at most `most`: one, a short text and a long one."""
    # embeddings of many numbers are looked up by a kernel of their own: of a narrow model that is a longer text
    long = MOST_TOKENS + 1 if model_bytes > _NARROW else _LONG
    return sorted({1, min(2, most), min(long, most)})


def read_kept(names: Sequence[str]) -> bool:
    """Read kernels out of the cache (`calls.compile_named`; one that is gone is compiled). False: there are none, or
    one cannot be had, which the steps that need it will say."""
    if not names:
        return False
    from asyncengine.kernels.cpu.calls import compile_named

    try:
        for name in (name for name in names if name not in had):
            compile_named(name)
            had.add(name)
    except Exception:
        logger.debug("kernels are not read ahead", exc_info=True)
        return False
    return True

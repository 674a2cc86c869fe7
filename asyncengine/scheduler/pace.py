"""Pace of prompts beside running streams: as many of their tokens in a step as let it end in the time it aims at.

The scheduler is not told how fast the machine is. It knows when it scheduled a step and when it got the result, clock
readings that a recording has, too. From these it learns the current cost of a prompt's token: in this context, beside
these decodes, on this machine with its other load. Chunks beside decodes are Sarathi's
(arXiv:2403.02310), which sizes them in tokens, once.
"""

from __future__ import annotations

_BLOCK = 16
"""Tokens that kernels take as one block of a step: a part of one costs as much as all of it."""
_CROWD = 4
"""Prompts that have the target each, in one step: what delays many first tokens may delay the next ones of others."""
_SHARE = 2.0
"""Time that a step may take in any case, in times of its decodes alone: half of the machine is for prompts."""
_GAIN = 0.4
"""Weight of a new measurement in the expected cost."""
_MAX_RISE = 4.0
"""Factor over the expected time beyond which a step is taken for disturbed, as by a program that holds up the loop."""


class Pace:
    """Learns what steps take, and says how much of prompts the next one may compute."""

    def __init__(self, target: float | None) -> None:
        """`target`: seconds that a step with one prompt beside running streams aims at; None: it takes what it
        takes."""
        self._target = target
        self._aim = target or 0.0
        """Seconds that the last step with prompts aimed at."""
        self._decodes = 0.0
        """Seconds of a step without prompts; 0: none was measured."""
        self._decodes_then = 0.0
        """The same when a step with prompts was measured last."""
        self._per_token = 0.0
        """Seconds that a step takes longer for each token of a prompt; 0: none was measured."""

    def most(self, budget: int, decodes: int, prompts: int) -> int:
        """Number of prompts' tokens, at most `budget`, that a step may compute beside `decodes` rows that decode, where
        `prompts` requests have tokens of prompts left."""
        if self._target is None:
            return budget
        self._aim = max(self._target * min(max(prompts, 1), _CROWD), _SHARE * self._decodes)
        left, per_token = self._aim - self._decodes, self._expected
        if left >= budget * per_token:
            return budget
        blocks = round((left / per_token + decodes) / _BLOCK)  # decodes fill blocks together with the prompt
        return min(budget, max(blocks, decodes // _BLOCK + 2) * _BLOCK - decodes)

    def learn(self, tokens: int, took: float) -> None:
        """Learn from a step with `tokens` tokens of prompts, which took `took` seconds."""
        if self._target is None:
            return
        few = tokens < _BLOCK // 2
        self._decodes = _blend(self._decodes, took, 1.0) if few else min(self._decodes, took)
        if not tokens:
            return
        expected = self._expected
        # what decodes take may have been measured with more of them
        measured = (took - min(self._decodes, 0.75 * took)) / tokens
        if not expected or measured < expected or took > self._aim:  # else there were too few tokens to tell
            weight = min(1.0, 2 * expected * tokens / self._aim)
            base = min(expected, max(self._per_token, measured))
            self._per_token = _blend(base, measured, weight)
            self._decodes_then = self._decodes

    @property
    def _expected(self) -> float:
        """`_per_token` as of now: slower decodes tell of slower prompts."""
        slower = self._decodes / self._decodes_then if self._decodes_then else 1.0
        return self._per_token * min(max(1.0, slower), _MAX_RISE)


def _blend(old: float, new: float, weight: float) -> float:
    return old + _GAIN * weight * (min(new, _MAX_RISE * old) - old) if old else new

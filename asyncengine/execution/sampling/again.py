"""The tokens that a matcher may take in the place of one that was drawn: its output would not end within its budget."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.execution.sampling.noise import AGAIN_FLAG, gumbel, noise_keys
from asyncengine.execution.sampling.top_p import kept_threshold
from asyncengine.request_spec import RequestSpec

MOST = 64
"""Tokens that are offered."""


def drawn_again(logits: torch.Tensor, spec: RequestSpec, position: int) -> list[int]:
    """The likeliest tokens, `MOST` at most, in the order in which they are to be tried at `position` of a request: as
    further draws without replacement would give them, behind these the ones that truncation leaves out, likeliest
    first; of a greedy request all likeliest first.

    logits float32 [vocab] as the first token was drawn from them (penalties and the grammar's mask applied), on the
    host. A function of its arguments alone: the random numbers are those of (seed, position, token id).
    """
    params = spec.params
    temperature = 1.0 if params.temperature is None else params.temperature
    found = logits.topk(min(MOST, len(logits)))
    pairs = zip((-found.values).tolist(), found.indices.tolist(), strict=True)
    ids = [token for value, token in sorted(pairs) if value < float("inf")]
    if not temperature or not ids:
        return ids
    scaled = logits[None].float() / temperature
    least = float(scaled.max()) + (float(np.log(params.min_p)) if params.min_p else -float("inf"))
    top_k, top_p = params.top_k or 0, 1.0 if params.top_p is None else params.top_p
    if top_p < 1 or 0 < top_k < len(logits):
        limit = kept_threshold(scaled, np.array([top_k if top_k < len(logits) else 0]), torch.tensor([top_p]))
        least = max(least, float(limit))
    keys = noise_keys(*(np.array([part]) for part in (spec.seed & 0xFFFFFFFF, spec.seed >> 32 & 0xFFFFFFFF, position)))
    where = torch.tensor([ids])
    own = scaled[0, where[0]]
    noisy = own + gumbel(torch.from_numpy(keys), where | AGAIN_FLAG)[0]
    scores = zip(noisy.tolist(), (own >= least).tolist(), strict=True)
    ranks = [(0, -score) if kept else (1, place) for place, (score, kept) in enumerate(scores)]
    return [ids[place] for place in sorted(range(len(ids)), key=ranks.__getitem__)]

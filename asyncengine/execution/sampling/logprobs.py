"""Log-probabilities of sampled tokens and of prompts, with those of the likeliest tokens or of named ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncengine.execution.device.transfer import Readback, upload
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import TokenLogprob

_BLOCK_ELEMENTS = 2**24
"""Most float32 log-probabilities held at once."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of some tokens, and their likeliest alternatives in descending order."""

    tokens: torch.Tensor
    """int64 [rows]."""
    logprobs: torch.Tensor
    """float32 [rows], of `tokens`."""
    top_ids: torch.Tensor
    """int64 [rows, num_top]."""
    top: torch.Tensor
    """float32 [rows, num_top]."""

    def fetch(self, readback: Readback) -> LogprobTensors:
        """The same on the host, once `readback` has arrived."""
        return LogprobTensors(*map(readback.fetch, (self.tokens, self.logprobs, self.top_ids, self.top)))

    def entries(self) -> list[TokenLogprob]:
        """For host tensors: one entry for each token."""
        columns = (tensor.tolist() for tensor in (self.tokens, self.logprobs, self.top_ids, self.top))
        return [
            TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(*columns, strict=True)
        ]


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, named: torch.Tensor | None = None
) -> LogprobTensors:
    """Log-probability of tokens[i] under logits[i], with those of the `num_top` likeliest tokens, or of `named` ones.

    logits [rows, vocab] any float type, tokens int64 [rows], named int64 [rows, num_top] ids, -1 for the likeliest at
    that rank; the softmax is taken in float32, block by block.
    """
    num_top = min(num_top, logits.shape[-1])
    logprobs, top_ids, top = [], [], []
    block = max(_BLOCK_ELEMENTS // logits.shape[-1], 1)
    for begin in range(0, logits.shape[0], block):
        logs = torch.log_softmax(logits[begin : begin + block].float(), dim=-1)
        logprobs.append(logs.gather(1, tokens[begin : begin + block, None])[:, 0])
        values, ids = logs.topk(num_top, dim=-1)
        if named is not None:
            wanted = named[begin : begin + block, :num_top]
            ids = torch.where(wanted < 0, ids, wanted)
            values = logs.gather(1, ids)
        top_ids.append(ids)
        top.append(values)
    return LogprobTensors(tokens, torch.cat(logprobs), torch.cat(top_ids), torch.cat(top))


def num_listed(params: SamplingParams) -> int:
    """Number of tokens whose log-probabilities are listed at each position, besides the output's own."""
    return len(params.logprob_token_ids) or params.top_logprobs


def named_by(params: Sequence[SamplingParams], width: int, device: torch.device) -> torch.Tensor | None:
    """int64 [rows, width] `logprob_token_ids` of each row, -1 where it names none; None: no row does."""
    if not any(row_params.logprob_token_ids for row_params in params):
        return None
    named = np.full((len(params), width), -1, dtype=np.int64)
    for row, row_params in zip(named, params, strict=True):
        row[: len(row_params.logprob_token_ids)] = row_params.logprob_token_ids
    return upload(named, device)

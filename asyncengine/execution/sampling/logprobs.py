"""Log-probabilities under the model's own distribution, of sampled tokens and of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncengine.execution.device.transfer import Readback
from asyncengine.step import TokenLogprob

_BLOCK_ELEMENTS = 2**24
"""Most float32 log-probabilities held at once."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of some tokens, and their likeliest alternatives in descending order."""

    tokens: torch.Tensor
    """int64 [rows]."""
    own: torch.Tensor
    """float32 [rows]."""
    top_ids: torch.Tensor
    """int64 [rows, num_top]."""
    top: torch.Tensor
    """float32 [rows, num_top]."""

    def fetch(self, readback: Readback) -> LogprobTensors:
        """The same on the host, once `readback` has arrived."""
        return LogprobTensors(*(readback.fetch(part) for part in (self.tokens, self.own, self.top_ids, self.top)))

    def entries(self) -> list[TokenLogprob]:
        """For host tensors: one entry for each token."""
        alternatives = zip(self.top_ids.tolist(), self.top.tolist(), strict=True)
        return [
            TokenLogprob(token, own, tuple(zip(ids, values, strict=True)))
            for token, own, (ids, values) in zip(self.tokens.tolist(), self.own.tolist(), alternatives, strict=True)
        ]


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> LogprobTensors:
    """Log-probability of tokens[i] under logits[i], with the `num_top` likeliest.

    logits [rows, vocab] any float type, tokens int64 [rows]; the softmax is taken in float32, block by block.
    """
    num_top = min(num_top, logits.shape[-1])
    own, top_ids, top = [], [], []
    block = max(_BLOCK_ELEMENTS // logits.shape[-1], 1)
    for begin in range(0, logits.shape[0], block):
        logs = torch.log_softmax(logits[begin : begin + block].float(), dim=-1)
        own.append(logs.gather(1, tokens[begin : begin + block, None])[:, 0])
        best = logs.topk(num_top, dim=-1)
        top_ids.append(best.indices)
        top.append(best.values)
    return LogprobTensors(tokens, torch.cat(own), torch.cat(top_ids), torch.cat(top))

"""Log-probabilities under the model's own distribution, of sampled tokens and of the prompt."""

from __future__ import annotations

import torch

from asyncengine.batch import TokenLogprob

_BLOCK_ELEMENTS = 2**24
"""Most float32 log-probabilities held at once."""


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[TokenLogprob]:
    """Log-probability of tokens[i] under logits[i], with the `num_top` likeliest in descending order.

    logits [rows, vocab] any float type, tokens int64 [rows]; the softmax is taken in float32, block by block.
    """
    result: list[TokenLogprob] = []
    block = max(_BLOCK_ELEMENTS // logits.shape[-1], 1)
    num_top = min(num_top, logits.shape[-1])
    for begin in range(0, logits.shape[0], block):
        logs = torch.log_softmax(logits[begin : begin + block].float(), dim=-1)
        chosen = tokens[begin : begin + block]
        own = logs.gather(1, chosen[:, None])[:, 0].tolist()
        ids = chosen.tolist()
        if num_top == 0:
            result += [TokenLogprob(token, value) for token, value in zip(ids, own, strict=True)]
            continue
        best = logs.topk(num_top, dim=-1)
        alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for token, value, (top_ids, top_values) in zip(ids, own, alternatives, strict=True):
            result.append(TokenLogprob(token, value, tuple(zip(top_ids, top_values, strict=True))))
    return result

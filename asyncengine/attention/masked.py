"""Masked attention written out in plain torch operations: the form that knows soft-capping and sinks.

Shapes are those of `torch.matmul` with any leading batch dimensions; grouped queries are the caller's business
(heads that share keys are folded into the query dimension).
"""

from __future__ import annotations

import torch

from asyncengine.attention.base import LayerSpec


def masked_attention(
    spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """softmax(softcap(q k^T scale) + bias) v.

    query [..., Q, Dk], key [..., L, Dk], value [..., L, Dv], bias broadcastable to [..., Q, L] with 0 where a key is
    seen and -inf where not (at least one 0 per query), sinks broadcastable to [..., Q, 1]. The softmax is computed in
    float32 whatever the inputs' type, as transformers' eager attention does.
    """
    scores = torch.matmul(query * spec.scale, key.transpose(-1, -2))
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores + bias
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        sink_column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink_column), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def causal_bias(
    first_query: int, num_queries: int, first_key: int, num_keys: int, window: int | None, like: torch.Tensor,
    chunk: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """[num_queries, num_keys], 0 where query position first_query + i sees key position first_key + j, else -inf.

    dtype and device are those of `like`.
    """
    queries = torch.arange(first_query, first_query + num_queries, device=like.device)[:, None]
    keys = torch.arange(first_key, first_key + num_keys, device=like.device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    if chunk is not None:
        hidden |= keys < queries // chunk * chunk
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))

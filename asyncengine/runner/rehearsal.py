"""The largest step there can be: run once before the KV pool is sized, it shows what a step takes of a device."""

from __future__ import annotations

from asyncengine.batch import Batch, Row, RowSpec
from asyncengine.config import EngineConfig
from asyncengine.sampling_params import SamplingParams

_SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=0, repetition_penalty=1.1, min_tokens=1, logprobs=True, top_logprobs=20,
    prompt_logprobs=True,
)  # fmt: skip
"""What takes the most memory beside the model's own: logits of all tokens, the sampler's copies of those it samples
from, counts for penalties. Masks of grammars come in small parts."""


def largest_step(config: EngineConfig, max_model_len: int) -> tuple[Batch, int]:
    """The step, and the pages of a pool that holds it, page 0 included."""
    budget = config.max_num_batched_tokens
    count = min(config.max_num_seqs, budget)
    size = config.page_size
    rows: list[Row] = []
    page = 1
    for slot in range(count):
        left = budget - (count - slot - 1)  # the others need one token each
        length = min(left, max_model_len - 1)
        budget -= length
        pages = list(range(page, page + -(-length // size)))
        page += len(pages)
        spec = RowSpec(slot + 1, _SAMPLED, slot, length, (0,))
        rows.append(Row(spec, slot, 0, length, [0] * length, False, pages, True))
    return Batch(0, tuple(rows)), page

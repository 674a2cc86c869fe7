"""Penalties and masks by a kernel, in Triton's interpreter, against those by torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncengine.execution.sampling import logit_processors
from asyncengine.execution.sampling.logit_processors import LogitProcessors, SlotParams, SlotTables
from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row

TOKENS = [5, 5, 9, 11, 8, 8, 8, 9, 40, 17]
FIELDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "logit_bias": {8: 3.0, 40: -2.0}},
    {"frequency_penalty": -1.1},
    {"logit_bias": {3: 6.0}},
    {"repetition_penalty": 0.6, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    {"min_tokens": 50},
]


def row(slot: int, fields: dict[str, Any]) -> Row:
    """The last of its tokens is known to the device alone."""
    params = SamplingParams(**{"temperature": 0.0, "repetition_penalty": 1.0, **fields})
    spec = RequestSpec(slot + 1, tuple(TOKENS[:4]), params, 64, stop_ids=(7, 12))
    return Row(spec, slot, len(TOKENS), 1, TOKENS, True, [], True)


def applied(rows: list[Row], logits: torch.Tensor, masks: FilledMasks) -> tuple[list[int], torch.Tensor]:
    vocab = logits.shape[1]
    params = SlotParams(len(rows), vocab)
    processors = LogitProcessors(rows, params, params.update(rows), masks, vocab)
    last = torch.tensor([8, 40, 3, 2, 1, 17, 30])
    return processors.rows, processors.apply(logits[processors.rows], SlotTables(params, vocab, logits.device), last)


@pytest.mark.parametrize("masked", [[], [0, 1, 5, 6], [0]])
@pytest.mark.parametrize("vocab", [41, 2500])
def test_as_by_torch(vocab: int, masked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((len(FIELDS), vocab), generator=generator) * 3
    words = torch.randint(-(2**31), 2**31, (len(masked), -(-vocab // 32)), generator=generator).to(torch.int32)
    masks = FilledMasks(masked, words, {}, [])
    rows = [row(slot, fields) for slot, fields in enumerate(FIELDS)]
    places, wanted = applied(rows, logits, masks)
    monkeypatch.setattr(logit_processors, "triton_missing", lambda device: None)
    again, found = applied(rows, logits, masks)
    assert places == again
    assert 1 in places
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, logits[places])

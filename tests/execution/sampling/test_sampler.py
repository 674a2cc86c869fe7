"""The batched sampler against a slow reference, its distribution, and its independence of neighbours."""

from __future__ import annotations

import gc
import math
import random
from typing import Any
from weakref import ref

import pytest
import torch
from support.device_sampling import SETTINGS

from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.execution.sampling.sampler import NON_FINITE, Sampler
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row

from . import reference_sampler as reference

VOCAB = 1200
CPU = torch.device("cpu")


def row(
    slot: int = 0,
    seed: int = 0,
    tokens: tuple[int, ...] = (1, 2, 3),
    prompt_len: int = 3,
    stop_ids: tuple = (),
    **fields: Any,
) -> Row:
    params = SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, **fields})
    spec = RequestSpec(slot, tokens[:prompt_len], params, 64, seed=seed, stop_ids=stop_ids)
    return Row(spec, slot, 0, len(tokens), list(tokens), False, [], True)


def sample(rows: list[Row], logits: torch.Tensor, sampler: Sampler | None = None, **more: Any) -> list[int]:
    sampler = sampler or Sampler(64, logits.shape[-1], CPU)
    last = more.get("last_token", torch.zeros(64, dtype=torch.int64))
    return sampler.sample(rows, logits, filled(more.get("masks", {})), last).tokens.tolist()


def filled(masks: dict[int, torch.Tensor]) -> FilledMasks:
    return FilledMasks(list(masks), torch.stack(list(masks.values())), {}, []) if masks else FilledMasks.none()


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


TRUNCATIONS = [own for own in SETTINGS if own.get("temperature") != 0.0 and own.get("top_k", 0) < VOCAB]


@pytest.mark.parametrize("fields", TRUNCATIONS, ids=str)
def test_token_for_token_like_the_reference(fields: dict[str, Any]) -> None:
    count = 12
    logits = random_logits(count, seed=5)
    seeds = [random.Random(index).randrange(2**64) for index in range(count)]
    rows = [row(index, seeds[index], tuple(range(index + 1)), **fields) for index in range(count)]
    expected = []
    for index in range(count):
        arguments = {"temperature": 1.0, **fields}
        probabilities = reference.distribution(logits[index].tolist(), **arguments)
        expected.append(reference.choose(probabilities, seeds[index], index + 1))
    assert sample(rows, logits) == expected
    if fields not in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):  # they leave the largest alone
        assert expected != logits.argmax(dim=-1).tolist()


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.1},
    {"frequency_penalty": -2.0},
    {"logit_bias": {11: 4.5, 1199: -100.0, 5: 3.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6, "logit_bias": {8: 6.0}},
]


@pytest.mark.parametrize("fields", EDITS, ids=str)
def test_penalties_and_bias(fields: dict[str, Any]) -> None:
    """Processed logits are a plain reference's; the row without penalties is left alone."""
    from asyncengine.execution.sampling.logit_processors import LogitProcessors, SlotParams, SlotTables

    tokens = (5, 5, 9, 11, 8, 8, 8, 9, 40)
    logits = random_logits(2, seed=9)
    rows = [row(3, tokens=tokens, prompt_len=4, **fields), row(4)]
    params = SlotParams(64, VOCAB)
    processors = LogitProcessors(rows, params, params.update(rows), FilledMasks.none(), VOCAB)
    assert processors.rows == [0], "nothing is done to the other row"
    found = processors.apply(logits[:1], SlotTables(params, VOCAB, CPU), torch.zeros(64, dtype=torch.int64))
    names = {"repetition_penalty": "repetition", "presence_penalty": "presence", "frequency_penalty": "frequency"}
    arguments = {names.get(key, "bias"): value for key, value in fields.items()}
    expected = reference.penalized(logits[0].tolist(), list(tokens[:4]), list(tokens[4:]), **arguments)
    assert torch.allclose(found[0], torch.tensor(expected), atol=1e-5)
    assert not torch.allclose(found[0], logits[0])


def test_penalty_state_follows_the_request() -> None:
    """Counts are extended step by step, with a token in flight, after a preemption and when the slot changes hands."""
    sampler = Sampler(8, 50, CPU)
    logits = torch.zeros(1, 50)
    last = torch.zeros(8, dtype=torch.int64)
    fields: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 2.0}
    first = row(5, tokens=(0, 1), prompt_len=1, **fields)

    def step(spec: RequestSpec, tokens: list[int], in_flight: bool = False) -> int:
        total = len(tokens) + in_flight
        step_row = Row(spec, 5, total - 1, 1, tokens, in_flight, [], True)
        return sample([step_row], logits, sampler, last_token=last)[0]

    assert step(first.spec, [0, 1]) == 0
    assert step(first.spec, [0, 1, 0]) == 2
    last[5] = 2
    assert step(first.spec, [0, 1, 0], in_flight=True) == 3
    assert step(first.spec, [0, 1, 0, 2, 3]) == 4
    assert step(first.spec, [0, 1, 0]) == 2, "preempted: tokens after these were dropped"
    other = row(5, tokens=(0, 1), prompt_len=1, **fields)
    assert step(other.spec, [0, 4]) == 0, "another request"
    assert step(row(5, **{**fields, "presence_penalty": 0.0}).spec, [0, 0]) == 0
    assert step(first.spec, [0, 1, 0]) == 2, "back again"


def test_min_tokens() -> None:
    logits = torch.zeros(3, 40)
    logits[:, 7] = 9.0
    logits[:, 8] = 8.0
    rows = [
        row(0, tokens=(1, 2, 3, 4), prompt_len=3, temperature=0.0, min_tokens=2, stop_ids=(7,)),
        row(1, tokens=(1, 2, 3, 4, 5), prompt_len=3, temperature=0.0, min_tokens=2, stop_ids=(7,)),
        row(2, tokens=(1, 2, 3, 4), prompt_len=3, temperature=0.0, min_tokens=2, stop_ids=(7, 8)),
    ]
    assert sample(rows, logits) == [8, 7, 0]


def test_a_grammar_that_only_allows_the_end_beats_min_tokens() -> None:
    logits = random_logits(1, 40)
    mask = torch.zeros(2, dtype=torch.int32)
    mask[0] = 1 << 7
    rows = [row(0, temperature=0.0, min_tokens=5, stop_ids=(7,))]
    assert sample(rows, logits, masks={0: mask}) == [7]


@pytest.mark.parametrize("vocab", [31, 32, 33, 600])
def test_masks_reach_every_token(vocab: int) -> None:
    words = -(-vocab // 32)
    logits = torch.zeros(vocab, vocab)
    masks = {}
    for token in range(vocab):
        bits = [0] * words
        bits[token // 32] = 1 << (token % 32)
        masks[token] = torch.tensor([b - (1 << 32) if b >= 1 << 31 else b for b in bits], dtype=torch.int32)
    sampler = Sampler(vocab, vocab, CPU)
    rows = [row(token, temperature=0.0 if token % 2 else 1.0) for token in range(vocab)]
    last = torch.zeros(vocab, dtype=torch.int64)
    assert sampler.sample(rows, logits, filled(masks), last).tokens.tolist() == list(range(vocab))


def test_a_row_does_not_see_its_neighbours() -> None:
    chance = random.Random(4)
    logits = random_logits(40, seed=6)
    settings: list[dict[str, Any]] = [*TRUNCATIONS, *EDITS, {"temperature": 0.0}]
    rows = [
        row(i, chance.randrange(2**64), tokens=tuple(range(1, 2 + i)), prompt_len=1, **settings[i % len(settings)])
        for i in range(40)
    ]
    together = sample(rows, logits)
    alone = [sample([rows[i]], logits[i : i + 1])[0] for i in range(40)]
    moved = [r._replace(slot=63 - i) for i, r in enumerate(rows)]
    assert together == alone
    assert sample(moved[::-1], logits.flip(0))[::-1] == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 4}, {"repetition_penalty": 1.5}], ids=str)
def test_non_finite_rows_are_named(bad: float, fields: dict[str, Any]) -> None:
    logits = random_logits(3)
    logits[1, 17] = bad
    rows = [row(index, seed=index, **fields) for index in range(3)]
    found = Sampler(64, VOCAB, CPU).sample(rows, logits, FilledMasks.none(), torch.zeros(64, dtype=torch.int64))
    assert found.errors == {1: NON_FINITE}
    assert [found.tokens.tolist()[place] for place in (0, 2)] == [
        sample([rows[place]], logits[place : place + 1])[0] for place in (0, 2)
    ]


@pytest.mark.parametrize("fields", [{}, {"presence_penalty": 1.0}])
def test_a_slot_that_nobody_uses_keeps_no_prompt_in_memory(fields: dict[str, Any]) -> None:
    """Up to `max_num_seqs` prompts as long as the context would otherwise lie there until their slots are taken."""
    sampler = Sampler(8, 50, CPU)
    ended = row(5, **fields)
    sample([ended], torch.zeros(1, 50), sampler, last_token=torch.zeros(8, dtype=torch.int64))
    spec = ref(ended.spec)
    del ended
    gc.collect()
    assert spec() is None

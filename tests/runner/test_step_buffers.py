"""The flat arrays of a step."""

from __future__ import annotations

import torch

from asyncengine.request_spec import RequestSpec
from asyncengine.runner.step_buffers import StepBuffers
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row

CPU = torch.device("cpu")


def row(
    slot: int, start: int, count: int, tokens: list[int], pages: list[int], prompt_len: int = 4, **more: object
) -> Row:
    scores = bool(more.pop("prompt_logprobs", False))
    spec = RequestSpec(slot, (0,) * prompt_len, SamplingParams(temperature=0.0, prompt_logprobs=scores), 64)
    return Row(spec, slot, start, count, tokens, bool(more.get("in_flight")), pages, bool(more.get("samples", True)))


def test_flattening() -> None:
    buffers = StepBuffers(8, 4, CPU)
    rows = (
        row(3, 2, 3, [10, 11, 12, 13, 14], [7, 5], samples=False),
        row(0, 5, 1, [20, 21, 22, 23, 24], [2, 9], in_flight=True),
        row(6, 0, 4, [30, 31, 32, 33], [4], prompt_logprobs=True),
    )
    last_token = torch.arange(100, 108)
    step = buffers.build(Batch(1, rows), last_token)
    assert step.input_ids.tolist() == [12, 13, 14, 100, 30, 31, 32, 33]
    assert step.positions.tolist() == [2, 3, 4, 5, 0, 1, 2, 3]
    assert step.view.kv_slots.tolist() == [30, 31, 20, 37, 16, 17, 18, 19]
    assert step.view.qo_indptr.tolist() == [0, 3, 4, 8]
    assert step.logit_rows.tolist() == [3, 4, 5, 6, 7]
    assert (step.sampling, step.sample_logits.tolist()) == ([1, 2], [0, 4])
    assert step.prompt_spans == [(2, 1, 4)]
    assert step.view.page_tables[:2].tolist() == [[7, 5], [2, 9]]


def test_only_new_pages_are_copied_while_the_list_is_the_same() -> None:
    buffers = StepBuffers(4, 2, CPU)
    pages, tokens = [5, 6], [1, 2, 3, 4]

    def table(pages: list[int], start: int) -> list[int]:
        step = buffers.build(Batch(1, (row(1, start, len(tokens) - start, tokens, pages),)), torch.zeros(4).long())
        return step.view.page_tables[0].tolist()

    assert table(pages, 0) == [5, 6]
    pages.append(8)
    tokens.append(9)
    assert table(pages, 4) == [5, 6, 8]
    assert table([5, 7, 8], 4) == [5, 7, 8], "another list object is read anew"
    shorter = [3]
    del tokens[2:]
    assert table(shorter, 0) == [3]


def test_tables_grow() -> None:
    buffers = StepBuffers(2, 1, CPU)
    tokens = list(range(300))
    pages = list(range(1, 301))
    step = buffers.build(Batch(1, (row(0, 299, 1, tokens, pages, 300),)), torch.zeros(2).long())
    assert step.view.page_tables[0].tolist() == pages
    assert step.view.kv_slots.tolist() == [300]


def test_prompt_scores_stop_at_the_prompts_end() -> None:
    buffers = StepBuffers(2, 4, CPU)
    tokens = list(range(10))
    for start, count, expected in ((0, 5, [(0, 0, 5)]), (5, 5, [(0, 0, 1)]), (6, 4, []), (0, 10, [(0, 0, 6)])):
        batch = Batch(1, (row(0, start, count, tokens, [1, 2, 3], 7, prompt_logprobs=True, samples=False),))
        assert buffers.build(batch, torch.zeros(2).long()).prompt_spans == expected

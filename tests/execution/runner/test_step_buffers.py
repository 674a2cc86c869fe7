"""The flat arrays of a step."""

from __future__ import annotations

import random

import pytest
import torch

from asyncengine.execution.runner.step_buffers import Step, StepBuffers
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row, WindowPages

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


class Lives:
    """Requests that come, grow by what their steps compute, and go; their slots and pages are used again."""

    def __init__(self, seed: int, windows: bool) -> None:
        self.random = random.Random(seed)
        self.windows = windows
        self.alive: dict[int, tuple[RequestSpec, list[int], list[int], list[int]]] = {}
        self.tickets = 0

    def batch(self, step: int) -> Batch:
        draw = self.random
        for slot in list(self.alive):
            if draw.random() < 0.1:
                del self.alive[slot]
        while len(self.alive) < 1 or (len(self.alive) < 6 and draw.random() < 0.2):
            slot = draw.choice([slot for slot in range(8) if slot not in self.alive])
            self.tickets += 1
            params = SamplingParams(temperature=0.0, prompt_logprobs=draw.random() < 0.3)
            tokens = [draw.randrange(90) for _ in range(draw.randrange(1, 30))]
            self.alive[slot] = RequestSpec(self.tickets, tuple(tokens), params, 200), tokens, [], []
        slots = draw.sample(list(self.alive), draw.randrange(1, len(self.alive) + 1))
        return Batch(step, tuple(self.row(slot) for slot in slots))

    def row(self, slot: int) -> Row:
        draw = self.random
        spec, tokens, pages, near = self.alive[slot]
        start = draw.randrange(len(tokens))
        known = len(tokens) - start
        kind = draw.choice(["decode", "drafted", "chunk", "in flight"])
        drafts: tuple[int, ...] = ()
        if kind == "chunk":
            known = draw.randrange(1, known + 1)
        elif kind != "in flight":
            start, known = len(tokens) - 1, 1
        if kind == "drafted":
            drafts = tuple(draw.randrange(90) for _ in range(draw.randrange(1, 9)))
        count = known + len(drafts) + (kind == "in flight")
        first = start // 4 if self.windows else 0
        if draw.random() < 0.1:  # it gave way, and has others now
            pages, near = [], []
        near = near if draw.random() < 0.5 else []  # pages that no window sees any more are given back
        while len(pages) * 4 < start + count:
            pages.append(draw.randrange(1, 500))
        shifted = near if len(near) >= len(pages) - first else [draw.randrange(1, 500) for _ in pages[first:]]
        samples = start + count >= len(tokens)
        window = WindowPages(first, shifted) if self.windows else None
        row = Row(spec, slot, start, count, tokens, kind == "in flight", pages, samples, window=window, drafts=drafts)
        if samples and kind != "in flight":
            tokens = [*tokens] if draw.random() < 0.1 else tokens
            tokens.append(draw.randrange(90))
        self.alive[slot] = spec, tokens, pages, []
        return row


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_after_others_are_what_first_ones_would_be(seed: int, windows: bool) -> None:
    """Rows come and go, in any order, with drafts of any number, pages of others and windows that move: whatever a
    table held of an earlier step is not seen."""
    lives, last_token = Lives(seed, windows), torch.arange(100, 108)
    kept = StepBuffers(8, 4, CPU)
    for number in range(400):
        batch = lives.batch(number)
        frozen = Batch(number, tuple(row._replace(tokens=list(row.tokens)) for row in batch.rows))
        found = kept.build(frozen, last_token)
        assert same(found, StepBuffers(8, 4, CPU).build(frozen, last_token)), frozen
        places = [(row, place) for row in frozen.rows for place in range(row.start, row.start + row.num_scheduled)]
        assert found.positions.tolist() == [place for _, place in places]
        assert found.view.kv_slots.tolist() == [row.pages[place // 4] * 4 + place % 4 for row, place in places]
        if windows:
            held = [(row.window.pages[place // 4 - row.window.first], place) for row, place in places if row.window]
            assert found.view.window_slots is not None
            assert found.view.window_slots.tolist() == [page * 4 + place % 4 for page, place in held]


def same(found: Step, wanted: Step) -> bool:
    for name in ("input_ids", "positions", "logit_rows", "sample_logits"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    for name in ("starts", "counts", "qo_indptr", "page_tables", "kv_slots", "window_tables", "window_slots"):
        left, right = getattr(found.view, name), getattr(wanted.view, name)
        if name.endswith("tables") and right is not None:  # what lies behind a row's own pages is arbitrary
            needs = -(-(wanted.view.starts + wanted.view.counts) // 4)
            firsts = wanted.view.starts // 4 if name == "window_tables" else 0 * needs
            pairs = list(zip(left, right, firsts, needs, strict=True))
            assert all(one[a:b].tolist() == other[a:b].tolist() for one, other, a, b in pairs), name
        else:
            assert (left is None) == (right is None), name
            assert left is None or left.tolist() == right.tolist(), name
    return (found.sampling, found.prompt_spans, found.pool_spans) == (
        wanted.sampling, wanted.prompt_spans, wanted.pool_spans
    )  # fmt: skip


def test_a_short_step_that_lacks_pages_or_tokens_is_refused() -> None:
    buffers = StepBuffers(2, 4, CPU)
    for tokens, pages in (([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [3])):
        with pytest.raises(ValueError, match="do not cover"):
            buffers.build(Batch(1, (row(0, 0, 5, tokens, pages),)), torch.zeros(2).long())

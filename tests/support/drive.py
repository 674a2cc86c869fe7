"""A hand-driven scheduler for tests of the runner: plain lists, no queues, page tables shuffled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row, StateUse, StepResult, TokenLogprob

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Job:
    """One request: what it asks and where it stands."""

    spec: RequestSpec
    tokens: list[int]
    want: int
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    error: str | None = None
    grammar: Any = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.spec.prompt_len :]

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.output) >= self.want


class Driver:
    """Steps jobs over a runner. `chunk` tokens of a prompt at most per step; None: all at once."""

    def __init__(self, runner: Any, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.free = list(range(1, runner.num_pages))[:4096]
        self.random.shuffle(self.free)
        self.slots = list(range(64))
        self.random.shuffle(self.slots)
        self.step = 0
        self.tickets = 0

    def job(
        self,
        prompt: Sequence[int],
        want: int,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        grammar: Any = None,
    ) -> Job:
        self.tickets += 1
        total = len(prompt) + want
        spec = RequestSpec(self.tickets, tuple(prompt), params, total, seed=seed, stop_ids=stop_ids)
        return Job(spec, list(prompt), want, grammar=grammar)

    def admit(self, job: Job) -> None:
        job.slot = self.slots.pop()

    def release(self, job: Job) -> None:
        """Give everything back; the job keeps its tokens and starts anew when admitted again (preemption)."""
        self.random.shuffle(job.pages)
        self.free += job.pages  # taken again first, so that pages with a past are the common case
        job.pages = []
        job.computed = 0
        if job.slot >= 0:
            self.slots.insert(self.random.randrange(len(self.slots) + 1), job.slot)
            job.slot = -1

    def row(self, job: Job, chunk: int | None = None) -> Row:
        total = len(job.tokens)
        count = total - job.computed if chunk is None else min(chunk, total - job.computed)
        need = -(-(job.computed + count) // self.runner.page_size)
        while len(job.pages) < need:
            job.pages.append(self.free.pop())
        samples = job.computed + count == total
        state = None
        if getattr(self.runner, "num_states", 0):  # a request's state lies in the slot of its number
            state = StateUse(job.slot + 1, job.slot + 1 if job.computed else 0)
        return Row(
            job.spec, job.slot, job.computed, count, job.tokens, False, job.pages, samples, 0, job.grammar, state
        )

    def execute(self, rows: Sequence[Row]) -> StepResult:
        self.step += 1
        result: StepResult = self.runner.launch(Batch(self.step, tuple(rows))).wait()
        assert result.step == self.step
        assert len(result.tokens) == len(rows)
        return result

    def advance(self, jobs: Sequence[Job], chunk: int | None = None) -> None:
        """One step over all `jobs`."""
        rows = [self.row(job, chunk) for job in jobs]
        result = self.execute(rows)
        for index, (job, row) in enumerate(zip(jobs, rows, strict=True)):
            job.computed += row.num_scheduled
            job.error = result.errors.get(index)
            job.prompt_logprobs += result.prompt_logprobs.get(index, [])
            if row.samples and job.error is None:
                job.tokens.append(result.tokens[index])
                if index in result.logprobs:
                    job.logprobs += result.logprobs[index]
            else:
                assert result.tokens[index] == -1

    def run(self, jobs: Sequence[Job], chunk: int | None = None, preempt_every: int | None = None) -> list[list[int]]:
        """All `jobs` to their end, together; every so many steps one of them starts over from nothing, once each."""
        for job in jobs:
            self.admit(job)
        steps = 0
        spared = list(jobs)
        while active := [job for job in jobs if not job.done]:
            steps += 1
            candidates = [job for job in spared if not job.done]
            if preempt_every is not None and steps % preempt_every == 0 and candidates:
                victim = self.random.choice(candidates)
                spared.remove(victim)
                self.release(victim)
                self.admit(victim)
            self.advance(active, chunk)
        for job in jobs:
            self.release(job)
        return [job.output for job in jobs]


def from_another_request(driver: Driver, text: Sequence[int], want: int) -> list[int]:
    """The answer of a request that finds its first 24 tokens in the pages of another one, which still runs. Pages of 4
    tokens."""
    first, second = (driver.job(text, want) for _ in range(2))
    driver.admit(first)
    driver.advance([first])
    driver.admit(second)
    second.pages, second.computed = first.pages[:6], 24
    while not second.done:
        driver.advance([second, *([] if first.done else [first])], 16)
    return second.output


def from_a_snapshot(driver: Driver, text: Sequence[int], want: int) -> list[int]:
    """The same where there are states: the second request starts from a snapshot amid the first one's chunk, behind its
    last full page: a wrong state shows soon after."""
    first, second = (driver.job(text, want) for _ in range(2))
    driver.admit(first)
    snapshot, pages = driver.runner.num_states - 1, (len(text) - 1) // driver.runner.page_size
    known = pages * driver.runner.page_size
    driver.execute([driver.row(first)._replace(state=StateUse(first.slot + 1, 0, ((known, snapshot),)))])
    driver.admit(second)
    second.pages, second.computed = first.pages[:pages], known
    row = driver.row(second)._replace(state=StateUse(second.slot + 1, snapshot))
    second.tokens.append(driver.execute([row]).tokens[0])
    second.computed = len(text)
    while not second.done:
        driver.advance([second])
    return second.output


def greedy_reference(model: Any, prompt: Sequence[int], want: int, end: int | None = None) -> list[int]:
    """transformers' own greedy output, eager attention, one sequence. `end`: the token that ends it, none by itself."""
    import torch

    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=want, do_sample=False, eos_token_id=end, pad_token_id=0
        )
    return [int(token) for token in out[0, len(prompt) :]]


def prompts(lengths: Sequence[int], vocab: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of the given lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab) for _ in range(length)] for length in lengths]

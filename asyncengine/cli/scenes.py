"""The demo's scenes. Each prints what there is to see and returns its figures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from asyncengine.async_engine import AsyncEngine
from asyncengine.cli.documents import ABOUT_ARCHIVE, ARCHIVE, DOCUMENTS, FOR_RETRIEVAL, SMALL_JOBS, Question
from asyncengine.cli.frameworks import MAX_TOKENS, SYSTEM, Chain, QueryEngine
from asyncengine.cli.show import Line, Show, board, side_by_side
from asyncengine.kvcache import PageCounts
from asyncengine.sampling_params import SamplingParams

ROWS = 12
LEAVERS = 16
TOKENS_BEFORE_LEAVING = 24
STAYERS = (SMALL_JOBS[2], SMALL_JOBS[3], SMALL_JOBS[5], SMALL_JOBS[10])
FOR_VOICES = ((ABOUT_ARCHIVE[1], ARCHIVE), (ABOUT_ARCHIVE[15], ARCHIVE), (SMALL_JOBS[1], ""), (SMALL_JOBS[2], ""))
"""Questions that are asked in every voice, and the text in front of each."""
SOON = 0.002
"""Seconds between two looks at the page counts."""


@dataclass(slots=True)
class Tally:
    """Figures over all scenes."""

    seconds: float = 0.0
    """Time in which requests were in the engine."""
    right: int = 0
    asked: int = 0
    most_streams: int = 0
    scenes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, lines: list[Line], seconds: float, **more: Any) -> None:
        self.seconds += seconds
        self.right += sum(line.right is True for line in lines)
        self.asked += len(lines)
        self.most_streams = max(self.most_streams, more.get("streams", len(lines)))
        answers = [{"question": line.question, "answer": line.answer, "right": line.right} for line in lines]
        self.scenes.append({"scene": name, "seconds": seconds, **more, "answers": answers})


async def many_streams(show: Show, engine: AsyncEngine, chain: Chain, streams: int, tally: Tally) -> None:
    through = f"a {chain.name} chain's astream" if chain.name else "the plain API"
    show.scene(
        f"1  {streams} streams at once",
        f"Each line is its own request through {through}. They share every forward pass.",
    )
    questions = [*SMALL_JOBS, *(_counting(index) for index in range(max(0, streams - len(SMALL_JOBS))))][:streams]
    lines = [Line(question.text) for question in questions]
    tokens = engine.stats().generated_tokens
    began = time.perf_counter()

    async def follow(line: Line, question: Question) -> None:
        async for piece in chain.stream(question.text):
            line.answer += piece
        line.right = question.answered_by(line.answer)

    async with show.live(lambda: board(lines, shown=ROWS)), asyncio.TaskGroup() as group:
        for line, question in zip(lines, questions, strict=True):
            group.create_task(follow(line, question))
    seconds = time.perf_counter() - began
    tokens = engine.stats().generated_tokens - tokens
    tally.add("many_streams", lines, seconds, output_tokens=tokens, through=chain.name or "plain API")
    show.outcome(
        f"{streams} answers, {tokens} tokens in {seconds:.1f} s: [bold]{tokens / seconds:.0f} tokens/s[/bold]. "
        f"{_score(lines)}"
    )


def _counting(index: int) -> Question:
    low, high = index % 13, index % 13 + 4 + index % 5
    return Question(f"Count from {low} to {high}.", ", ".join(str(n) for n in range(low, high + 1)))


async def shared_prefix(show: Show, engine: AsyncEngine, chain: Chain, tally: Tally) -> None:
    through = f"{chain.name} abatch" if chain.name else "The plain API"
    show.scene(
        f"2  One text, {len(ABOUT_ARCHIVE)} questions",
        f"{through} sends the same text before every question. The engine computes it once and keeps its pages.",
    )
    began = time.perf_counter()
    with busy(show, "answering"):
        replies = await chain.batch([question.text for question in ABOUT_ARCHIVE], ARCHIVE)
    seconds = time.perf_counter() - began
    lines = []
    for question, reply in zip(ABOUT_ARCHIVE, replies, strict=True):
        line = Line(question.text)
        line.answer, line.right = reply.text, question.answered_by(reply.text)
        line.note = f"{reply.cached_tokens} of {reply.prompt_tokens} cached"
        lines.append(line)
    show.print(board(lines, shown=8, note="cached"))
    prompt = sum(reply.prompt_tokens for reply in replies)
    cached = sum(reply.cached_tokens for reply in replies)
    tally.add("shared_prefix", lines, seconds, prompt_tokens=prompt, cached_tokens=cached)
    show.outcome(
        f"{prompt} prompt tokens, of which [bold]{cached} came from the prefix cache[/bold] "
        f"({cached / prompt:.0%}) and {prompt - cached} were computed, in {seconds:.1f} s. {_score(lines)}"
    )


async def retrieval(show: Show, engine: AsyncEngine, queries: QueryEngine, tally: Tally) -> None:
    through = f"A {queries.name} query engine" if queries.name else "The plain API"
    show.scene(
        f"3  Answers from {len(DOCUMENTS)} documents",
        f"{through} finds the two nearest documents by the vectors of a second engine and answers from them; "
        f"{len(FOR_RETRIEVAL)} queries run at once.",
    )
    lines = [Line(question.text) for question in FOR_RETRIEVAL]
    began = time.perf_counter()

    async def ask(line: Line, question: Question) -> None:
        reply = await queries.query(question.text)
        line.answer, line.note, line.right = reply.text, reply.source, question.answered_by(reply.text)

    async with show.live(lambda: board(lines, shown=ROWS, note="source")), asyncio.TaskGroup() as group:
        for line, question in zip(lines, FOR_RETRIEVAL, strict=True):
            group.create_task(ask(line, question))
    seconds = time.perf_counter() - began
    tally.add("retrieval", lines, seconds, through=queries.name or "plain API")
    show.outcome(f"{len(lines)} queries in {seconds:.1f} s. {_score(lines)}")


async def three_voices(show: Show, engine: AsyncEngine, adapters: Sequence[str], tally: Tally) -> None:
    show.scene(
        "4  One model, three voices in one batch",
        f"The base model and its LoRA adapters {' and '.join(adapters)} answer the same questions at the same time.",
    )
    voices = (None, *adapters)
    rows = [[Line(question.text) for _ in voices] for question, _ in FOR_VOICES]
    before = engine.stats()
    began = time.perf_counter()

    async def follow(line: Line, question: Question, text: str, adapter: str | None) -> None:
        messages = [{"role": "system", "content": SYSTEM.format(context=text)}] if text else []
        messages.append({"role": "user", "content": question.text})
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        async with engine.stream_chat(messages, params, adapter=adapter) as stream:
            async for chunk in stream:
                line.answer += chunk.text
        line.right = question.answered_by(line.answer)

    async with show.live(lambda: side_by_side(rows, ("base", *adapters))), asyncio.TaskGroup() as group:
        for row, (question, text) in zip(rows, FOR_VOICES, strict=True):
            for line, adapter in zip(row, voices, strict=True):
                group.create_task(follow(line, question, text, adapter))
    seconds = time.perf_counter() - began
    lines = [line for row in rows for line in row]
    for line, voice in zip(lines, ("base", *adapters) * len(rows), strict=True):
        line.note = voice
    after = engine.stats()
    tokens, steps = after.generated_tokens - before.generated_tokens, after.steps - before.steps
    tally.add("three_voices", lines, seconds, output_tokens=tokens, steps=steps, voices=[line.note for line in lines])
    show.outcome(
        f"{len(lines)} answers in one batch: {tokens} tokens in {steps} forward passes, "
        f"[bold]{tokens / steps:.1f} tokens a pass[/bold], in {seconds:.1f} s. {_score(lines)}"
    )


async def change_of_mind(show: Show, engine: AsyncEngine, chain: Chain, tally: Tally) -> None:
    show.scene(
        "5  Leaving costs nothing",
        f"{LEAVERS} readers ask for long stories and are cancelled in the middle; four others read to the end.",
    )
    began = time.perf_counter()
    lines = [Line(question.text) for question in STAYERS]
    stages: list[tuple[str, PageCounts]] = [("before", engine.stats().pages)]
    readers = [_Reader(engine, f"Tell me a story about a cat named Lio{index}.") for index in range(LEAVERS)]

    async def stay(line: Line, question: Question) -> None:
        async for piece in chain.stream(question.text):
            line.answer += piece
        line.right = question.answered_by(line.answer)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader.read()) for reader in readers]
        for line, question in zip(lines, STAYERS, strict=True):
            group.create_task(stay(line, question))
        for reader in readers:
            await reader.under_way.wait()
        stages.append(("reading", engine.stats().pages))
        steps = engine.stats().steps
        for task in tasks:
            task.cancel()
    while in_use(engine.stats().pages):  # noqa: ASYNC110  # to see pages return is the point of the scene
        await asyncio.sleep(SOON)
    stages.append(("after", engine.stats().pages))
    seconds = time.perf_counter() - began
    show.print(_pages_table(stages))
    pages = {stage: {"in_use": in_use(p), "cached": p.cached, "free": p.free} for stage, p in stages}
    tally.add("cancellation", lines, seconds, pages=pages, cancelled=LEAVERS, streams=LEAVERS + len(lines))
    held = in_use(stages[1][1])
    show.outcome(
        f"{LEAVERS} tasks cancelled: [bold]{held} pages in use, then {in_use(stages[2][1])}[/bold]. Nothing ran on for "
        f"them; the other four were done {engine.stats().steps - steps} steps later. {_score(lines)}"
    )


class _Reader:
    """Reads a stream that would be long, until it is cancelled."""

    def __init__(self, engine: AsyncEngine, question: str) -> None:
        self._engine = engine
        self._question = question
        self.under_way = asyncio.Event()

    async def read(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1024, ignore_eos=True)
        count = 0
        async with self._engine.stream_chat([{"role": "user", "content": self._question}], params) as stream:
            async for chunk in stream:
                count += len(chunk.token_ids)
                if count >= TOKENS_BEFORE_LEAVING:
                    self.under_way.set()
        self.under_way.set()


def in_use(pages: PageCounts) -> int:
    return pages.held + pages.shared + pages.retiring


def _pages_table(stages: list[tuple[str, PageCounts]]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in ("", "in use", "cached", "free"):
        table.add_column(name, justify="right" if name else "left", style="cyan" if not name else "")
    table.add_column("[yellow]█[/yellow] in use  [blue]█[/blue] cached, reusable  [dim]·[/dim] free")
    for stage, pages in stages:
        scale = 56 / pages.total
        used, kept = round(in_use(pages) * scale), round(pages.cached * scale)
        bar = f"[yellow]{'█' * used}[/yellow][blue]{'█' * kept}[/blue][dim]{'·' * (56 - used - kept)}[/dim]"
        table.add_row(stage, str(in_use(pages)), str(pages.cached), str(pages.free), bar)
    return table


def _score(lines: list[Line]) -> str:
    return f"{sum(line.right is True for line in lines)} of {len(lines)} answers are right."


@contextlib.contextmanager
def busy(show: Show, text: str) -> Any:
    """A spinner, where somebody watches."""
    if show.console.is_terminal and not show.console.quiet:
        with show.console.status(text):
            yield
    else:
        yield

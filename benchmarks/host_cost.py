"""Host cost of the engine itself: scheduling and delivery, per token and stream, without a model.

    python benchmarks/host_cost.py [--streams 256] [--tokens 200] [--repeat 5] [--json]

The executor answers at once with a constant token, so all time measured is the engine's: schedule, launch, commit,
deliver, mailbox, and the consumer's `async for`. "in line" calls the executor on the loop's own thread and so counts
CPU work only; "device thread" hands every step to the real device thread and back. Beside them, the bare cost of
asyncio waking as many tasks that await a future each, which no design can go below.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.wiring import wire
from asyncengine.info import ModelInfo
from asyncengine.step import Batch, FinishedStep, StepResult


class InstantExecutor:
    """Answers every row with token 7."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_size = 16
        self.num_states = self.num_window_pages = 0
        self.windows: tuple[tuple[int, int], ...] = ()

    def launch(self, batch: Batch) -> FinishedStep:
        return FinishedStep(StepResult(batch.step, [7] * len(batch.rows)))

    def close(self) -> None:
        pass


class InlineRunner:
    """A `Runner` that executes on the event loop's own thread."""

    def __init__(self, executor: InstantExecutor) -> None:
        self.executor = executor

    def launch(self, batch: Batch) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_result(self.executor.launch(batch).wait())
        return future

    async def aclose(self) -> None:
        pass


def core(streams: int, tokens: int, inline: bool) -> Frontend:
    config = EngineConfig(max_num_seqs=streams, max_num_batched_tokens=max(2048, streams))
    executor = InstantExecutor(2 + streams * (tokens + 64) // 8)
    info = ModelInfo("instant", 32, 1 << 20, (), "none", "cpu", executor.num_pages, 16, has_tokenizer=False)
    built = wire(executor, info, config)
    if inline:
        built.loop.runner = InlineRunner(executor)
    return built


async def serve(streams: int, tokens: int, inline: bool) -> float:
    """Microseconds per token and stream."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    async with AsyncEngine(lambda: core(streams, tokens, inline)) as engine:

        async def consume(index: int) -> int:
            count = 0
            async for chunk in engine.stream([index % 31 + 1] * 32, params):
                count += len(chunk.token_ids)
            return count

        gc.collect()
        began = time.perf_counter()
        counts = await asyncio.gather(*(consume(index) for index in range(streams)))
        seconds = time.perf_counter() - began
    assert sum(counts) == streams * tokens
    return seconds / (streams * tokens) * 1e6


async def floor(streams: int, tokens: int) -> float:
    """Microseconds for asyncio to wake one task that awaits a bare future."""
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[None]] = []

    async def consume() -> None:
        for _ in range(tokens):
            future: asyncio.Future[None] = loop.create_future()
            waiting.append(future)
            await future

    tasks = [loop.create_task(consume()) for _ in range(streams)]
    began = time.perf_counter()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        ready, waiting[:] = waiting[:], []
        for future in ready:
            future.set_result(None)
    return (time.perf_counter() - began) / (streams * tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: dict[str, list[float]] = {"asyncio floor": [], "in line": [], "device thread": []}
    for _ in range(args.repeat):
        rows["asyncio floor"].append(asyncio.run(floor(args.streams, args.tokens)))
        rows["in line"].append(asyncio.run(serve(args.streams, args.tokens, inline=True)))
        rows["device thread"].append(asyncio.run(serve(args.streams, args.tokens, inline=False)))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    if args.json:
        print(json.dumps({"streams": args.streams, "microseconds_per_token": medians, "runs": rows}))
        return
    print(f"{args.streams} streams, {args.tokens} tokens each, median of {args.repeat} (min .. max)")
    for name, values in rows.items():
        print(f"  {name:14} {medians[name]:6.2f} us per token and stream  ({min(values):.2f} .. {max(values):.2f})")


if __name__ == "__main__":
    main()

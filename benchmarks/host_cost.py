"""Host cost of the engine itself: scheduling and delivery, per token and stream, without a model.

    python -m benchmarks.host_cost [--streams 256] [--tokens 200] [--repeat 5] [--json]
    python -m benchmarks.host_cost --device-ms 0 3 [--rows 1 16 64 256] [--launch-ms 0] [--hosted]

The executor answers at once with a constant token, so all time measured is the engine's: schedule, launch, commit,
deliver, mailbox, and the consumer's `async for`. "in line" calls the executor on the loop's own thread and so counts
CPU work only; "device thread" hands every step to the real device thread and back. Beside them, the bare cost of
asyncio waking as many tasks that await a future each, which no design can go below.

With `--device-ms` it is a device that computes by itself, one step after another, each in so many milliseconds (0: the
host is all there is to wait for): two steps in flight, wall-clock milliseconds a step, for steps of so many rows.
`--launch-ms` of Python stand for a runner that prepares and launches. Run it in two trees to compare them: the loop's
thread launches where the engine has it do so.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from typing import NamedTuple

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.assembly.wiring import wire
from asyncengine.engine.frontend import Frontend
from asyncengine.info import ModelInfo
from asyncengine.seams import Executor
from asyncengine.step import Batch, FinishedStep, StepResult


class InstantExecutor(Executor):
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


class Arriving(NamedTuple):
    """A handle whose result is there at a time."""

    result: StepResult
    due: float

    @property
    def ready(self) -> bool:
        return time.perf_counter() >= self.due

    def block(self) -> None:
        if (left := self.due - time.perf_counter()) > 0:
            time.sleep(left)

    def wait(self) -> StepResult:
        self.block()
        return self.result


class DeviceExecutor(InstantExecutor):
    """Computes by itself, and one step after another."""

    asynchronous = True

    def __init__(self, num_pages: int, launching: float, computing: float) -> None:
        """Seconds of the host and of the device that a step takes."""
        super().__init__(num_pages)
        self.launching, self.computing = launching, computing
        self.free = 0.0

    def is_brief(self, batch: Batch) -> bool:
        return True

    def launch(self, batch: Batch) -> Arriving:  # type: ignore[override]
        until = time.perf_counter() + self.launching
        while time.perf_counter() < until:
            pass
        self.free = max(self.free, time.perf_counter()) + self.computing
        return Arriving(StepResult(batch.step, [7] * len(batch.rows)), self.free)


class InlineRunner:
    """Executes on the event loop's own thread, in the place of a `DeviceThread`."""

    def __init__(self, executor: InstantExecutor) -> None:
        self.executor = executor

    def launch(self, batch: Batch) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_result(self.executor.launch(batch).wait())
        return future

    async def aclose(self) -> None:
        pass


def core(streams: int, tokens: int, inline: bool, device: tuple[float, float] | None = None) -> Frontend:
    depth = 1 if device is None else 2
    config = EngineConfig(
        max_num_seqs=streams, max_num_batched_tokens=max(2048, 32 * streams), max_steps_in_flight=depth
    )
    pages = 2 + streams * (tokens + 64) // 8
    executor = InstantExecutor(pages) if device is None else DeviceExecutor(pages, *device)
    info = ModelInfo("instant", 32, 1 << 20, (), "none", "cpu", executor.num_pages, 16, has_tokenizer=False)
    built = wire(executor, info, config)
    if inline:
        built.loop.runner = InlineRunner(executor)
    return built


async def serve(
    streams: int, tokens: int, inline: bool, device: tuple[float, float] | None = None, hosted: bool = False
) -> float:
    """Seconds per step, from the first token on. `device`: seconds of its launches and steps."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    async with AsyncEngine(lambda: core(streams, tokens, inline, device), hosted=hosted) as engine:

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
    return seconds / tokens


async def per_token(streams: int, tokens: int, inline: bool) -> float:
    """Microseconds per token and stream."""
    return await serve(streams, tokens, inline) / streams * 1e6


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


def steps(args: argparse.Namespace) -> None:
    """Measure steps of a device that computes by itself."""
    kind = "hosted" if args.hosted else "owned"
    found: dict[str, dict[int, float]] = {}
    for computing in args.device_ms:
        for rows in args.rows:
            device = (args.launch_ms / 1e3, computing / 1e3)
            times = [
                asyncio.run(serve(rows, args.tokens, inline=False, device=device, hosted=args.hosted)) * 1e3
                for _ in range(args.repeat)
            ]
            found.setdefault(f"device {computing:g} ms", {})[rows] = statistics.median(times)
    if args.json:
        print(json.dumps({"kind": kind, "milliseconds_per_step": found}))
        return
    print(f"{kind}, {args.launch_ms:g} ms of launching: ms a step, median of {args.repeat}, by rows")
    for name, by_rows in found.items():
        print(f"  {name:14}" + "".join(f"{rows:6}: {value:6.3f}" for rows, value in by_rows.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device-ms", type=float, nargs="+")
    parser.add_argument("--launch-ms", type=float, default=0.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--hosted", action="store_true")
    args = parser.parse_args()
    if args.device_ms:
        steps(args)
        return
    rows: dict[str, list[float]] = {"asyncio floor": [], "in line": [], "device thread": []}
    for _ in range(args.repeat):
        rows["asyncio floor"].append(asyncio.run(floor(args.streams, args.tokens)))
        rows["in line"].append(asyncio.run(per_token(args.streams, args.tokens, inline=True)))
        rows["device thread"].append(asyncio.run(per_token(args.streams, args.tokens, inline=False)))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    if args.json:
        print(json.dumps({"streams": args.streams, "microseconds_per_token": medians, "runs": rows}))
        return
    print(f"{args.streams} streams, {args.tokens} tokens each, median of {args.repeat} (min .. max)")
    for name, values in rows.items():
        print(f"  {name:14} {medians[name]:6.2f} us per token and stream  ({min(values):.2f} .. {max(values):.2f})")


if __name__ == "__main__":
    main()

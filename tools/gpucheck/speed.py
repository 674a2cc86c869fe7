"""How fast: one request, many at once, requests that arrive at random, and what share of the machine's best that is."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncengine.async_engine import AsyncEngine
from asyncengine.errors import OutOfMemory
from tools.gpucheck.environment import BANDWIDTH
from tools.gpucheck.host_time import PARTS, HostClock
from tools.gpucheck.modes import graphs_of
from tools.gpucheck.report import Skipped
from tools.gpucheck.session import Session
from tools.gpucheck.shapes import LARGE, SMALL, Shape
from tools.gpucheck.workloads import (
    SAMPLED,
    Burst,
    burst,
    poisson,
    quantile,
    random_lengths,
    single,
)

BATCH = 256
PEER_LENGTHS = (128, 256)
"""Prompt and output tokens of the load that `benchmarks/transformers_on_gpu.py` gives to transformers too."""
_LOAD = 0.5
"""Share of the burst's request rate at which requests arrive at random."""
_MEAN_OUTPUT = 160
"""Tokens, of a request that arrives at random."""


def run_small(session: Session) -> None:
    """The 0.6B shape."""
    session.check(f"{SMALL.name} serves", lambda: asyncio.run(measure_small(session, SMALL)))
    session.check("requests arriving at random are served", lambda: asyncio.run(measure_arrivals(session, SMALL)))


def run_large(session: Session) -> None:
    """The 8B shape."""
    session.check(f"{LARGE.name} serves", lambda: asyncio.run(measure_large(session, LARGE)))


async def measure_small(session: Session, shape: Shape) -> str:
    settings, name, seed = session.settings, shape.name, session.settings.seed
    async with loaded(session, shape) as engine:
        await one_stream(session, engine, shape, 64 if settings.quick else 512, 700)
        await at_once(session, engine, shape, [PEER_LENGTHS] * BATCH, _label(*PEER_LENGTHS))
        await sampled(session, engine, shape)
        clock = HostClock(engine)
        await burst(engine, [(32, 48 if settings.quick else 128)] * BATCH, seed)
        clock.close()
        host_time(session, clock, name)
        lengths = random_lengths(BATCH, 100, 256 if settings.quick else 1024, seed)
        label = "nano-vllm workload, shortened" if settings.quick else "nano-vllm workload"
        await at_once(session, engine, shape, lengths, label, None if settings.quick else 20_000)
    return f"{sum(output for _, output in lengths)} tokens in the largest load"


async def measure_large(session: Session, shape: Shape) -> str:
    quick = session.settings.quick
    async with loaded(session, shape) as engine:
        await one_stream(session, engine, shape, 64 if quick else 256, 200)
        output = 128 if quick else 1024
        await at_once(session, engine, shape, [(128, output)] * BATCH, _label(128, output), None if quick else 14_000)
    return f"{BATCH * output} tokens in the largest load"


async def measure_arrivals(session: Session, shape: Shape) -> str:
    """On a hosted engine, whose event loop is not the caller's."""
    seed, name = session.settings.seed, shape.name
    async with loaded(session, shape, told=False, hosted=True) as engine:
        full = await burst(engine, [(256, _MEAN_OUTPUT)] * BATCH, seed)
        rate = _LOAD * full.rate / _MEAN_OUTPUT
        found = await poisson(engine, rate, 4 if session.settings.quick else 15, seed)
        inner = engine.stats().loop_lag
    note = f"{rate:.1f} requests/s at random, {_LOAD:.0%} of what it can do; 64..512 in, 64..256 out"
    for label, values in (("time to first token", found.first_token), ("inter-token time", found.between)):
        for at in (0.5, 0.99):
            session.figure(f"{name}, {label}, p{at * 100:.0f}", _ms(quantile(values, at)), "ms", note=note)
    for at in (0.5, 0.99):
        session.figure(f"event-loop lag of the caller, p{at * 100:.0f}", _ms(quantile(found.lag, at)), "ms")
    session.figure("event-loop lag of the engine, p99", inner.p99 * 1e3, "ms")
    return f"{len(found.first_token)} requests"


def _label(prompt: int, output: int) -> str:
    return f"{BATCH} x {prompt}/{output}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


async def one_stream(session: Session, engine: AsyncEngine, shape: Shape, output: int, aim: float) -> None:
    rate = await single(engine, 128, output, session.settings.seed)
    session.figure(f"{shape.name}, batch 1", rate, "tokens/s", aim=aim, note=f"128 in, {output} out, decode alone")
    took = Burst([(128, output)], (output - 1) / rate, output - 1)
    roofline(session, shape, took, f"{shape.name}, batch 1")


async def at_once(
    session: Session, engine: AsyncEngine, shape: Shape, lengths: list[tuple[int, int]], label: str,
    aim: float | None = None,
) -> None:  # fmt: skip
    took = await burst(engine, lengths, session.settings.seed)
    name = f"{shape.name}, {label}"
    session.figure(name, took.rate, "tokens/s", aim=aim, note=f"{took.seconds:.1f} s, {took.steps} steps")
    roofline(session, shape, took, name)


async def sampled(session: Session, engine: AsyncEngine, shape: Shape) -> None:
    """The same two loads, drawn as most models' own settings ask for instead of greedily."""
    seed = session.settings.seed
    prompt, output = PEER_LENGTHS
    note = f"temperature {SAMPLED.temperature}, top-k {SAMPLED.top_k}, top-p {SAMPLED.top_p}"
    rate = await single(engine, 128, 64 if session.settings.quick else 256, seed, 2, SAMPLED)
    session.figure(f"{shape.name}, batch 1, sampled", rate, "tokens/s", note=note)
    await burst(engine, [(prompt, 4)] * BATCH, seed, SAMPLED)
    took = await burst(engine, [PEER_LENGTHS] * BATCH, seed, SAMPLED)
    session.figure(f"{shape.name}, {_label(prompt, output)}, sampled", took.rate, "tokens/s", note=note)


def roofline(session: Session, shape: Shape, took: Burst, name: str) -> None:
    """Time that the bytes to be read take at the copy bandwidth of this run, over the time that it took."""
    bandwidth = session.report.figure(BANDWIDTH)
    if bandwidth is None:
        session.figure(f"{name}, of roofline", None, "%", note="needs the section environment in the same run")
        return
    least = shape.bytes_read(took.steps, took.lengths) / (bandwidth * 1e9)
    session.figure(f"{name}, of roofline", 100 * least / took.seconds, "%", note="weights and KV read, no compute")


def host_time(session: Session, clock: HostClock, name: str) -> None:
    found = clock.medians(BATCH)
    if not found:
        session.figure(f"{name}, host time per step", None, "ms", note=f"no decode step had {BATCH} rows")
        return
    parts = ", ".join(f"{part} {found[part] * 1e3:.2f}" for part in PARTS)
    session.figure(
        f"{name}, host time per step at batch {BATCH}", found["total"] * 1e3, "ms", aim=1.0, at_most=True,
        note=f"median; wall-clock on three threads, without waiting for results: {parts}",
    )  # fmt: skip


@asynccontextmanager
async def loaded(
    session: Session, shape: Shape, *, told: bool = True, hosted: bool = False
) -> AsyncIterator[AsyncEngine]:
    """An engine on random weights of `shape`, warmed up; `told`: report what loading took."""
    settings = session.settings
    folder = shape.write(session.folder / shape.name.replace(" ", "-"))
    began = time.perf_counter()
    with CaptureLog() as log:
        engine = await _made(
            folder, hosted=hosted, device=settings.device, attention_backend=settings.backend, dtype="bfloat16",
            load_format="dummy", max_num_seqs=BATCH, max_num_batched_tokens=8192, max_model_len=2304,
            prefix_caching=False, show_progress=False,
        )  # fmt: skip
    try:
        if told:
            tell_loading(session, shape, engine, time.perf_counter() - began, log)
        await burst(engine, [(32, 8)] * BATCH, settings.seed)
        gc.collect()
        yield engine
    finally:
        await engine.aclose()


async def _made(folder: Path, **options: Any) -> AsyncEngine:
    try:
        return await AsyncEngine.from_pretrained(folder, **options)
    except OutOfMemory as error:
        raise Skipped(str(error)) from None


def tell_loading(session: Session, shape: Shape, engine: AsyncEngine, seconds: float, log: CaptureLog) -> None:
    session.figure(f"{shape.name}, loading", seconds, "s", note="weights made up on the device; graphs included")
    graphs: Any = graphs_of(engine)
    missing = "" if graphs is not None else "no CUDA graphs on this attention backend"
    count = 0 if graphs is None else len(graphs.sizes)
    session.figure(
        f"{shape.name}, graph capture", None if graphs is None else graphs.seconds, "s",
        note=missing or f"{count} sizes",
    )  # fmt: skip
    session.figure(f"{shape.name}, memory of graphs", log.mebibytes, "MiB", note=missing)


class CaptureLog(logging.Handler):
    """Reads what the runner logs of its graphs: how many, in how many seconds, and how many MiB they take."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.mebibytes: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("captured %d CUDA graphs") and isinstance(record.args, tuple):
            self.mebibytes = float(str(record.args[-1]))

    def __enter__(self) -> CaptureLog:
        logger = logging.getLogger("asyncengine")
        self._before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("asyncengine")
        logger.removeHandler(self)
        logger.setLevel(self._before)

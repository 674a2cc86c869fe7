"""`asyncengine bench`: the speed of a model for each of several numbers of streams at once."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncengine.async_engine import AsyncEngine
from asyncengine.checks import as_integer
from asyncengine.integrations.cli.exits import FAILED, CliError
from asyncengine.integrations.cli.inputs import given_adapters
from asyncengine.integrations.cli.loading import open_async_engine
from asyncengine.integrations.cli.options import engine_config
from asyncengine.sampling_params import SamplingParams
from asyncengine.stats import Summary

PROBE = 0.005
"""Seconds between two readings of the caller's event-loop lag."""


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "rounds"):
        as_integer(name, getattr(args, name), 1)
    counts = args.concurrency if isinstance(args.concurrency, tuple) else (args.concurrency,)
    args.concurrency = [as_integer("concurrency", count, 1) for count in counts]
    if args.plot is not None:
        try:  # before the sweep, not after it
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise CliError('--plot needs matplotlib: pip install "asyncengine[bench]"', FAILED) from error
    config = engine_config(args, max_num_seqs=max(args.concurrency), show_progress=False, adapters=given_adapters(args))
    console = Console(stderr=True)
    with console.status(f"loading {args.model}") as status:
        setup, rows = asyncio.run(_sweep(args, config, status.update))
    if args.json:
        results = [{**asdict(row), "tokens_per_second": row.tokens_per_second} for row in rows]
        print(json.dumps({**setup, "results": results}))
    else:
        _show(Console(), setup, rows)
    if args.plot is not None:
        _draw(args.plot, setup, rows)
        print(f"plot written to {args.plot}", file=sys.stderr)
    return 0


async def _sweep(
    args: argparse.Namespace, config: Any, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[Measured]]:
    async with open_async_engine(args.model, config, hosted=not args.owned) as engine:
        adapters = tuple(given_adapters(args)) or (None,)
        load = Load(len(adapters), 1, args.input_len, min(8, args.output_len), adapters)
        say("warming up")
        await measure(engine, load, seed=-1)
        rows = []
        for streams in args.concurrency:
            say(f"{streams} streams")
            load = replace(load, concurrency=streams, rounds=args.rounds, output_len=args.output_len)
            rows.append(await measure(engine, load))
        setup: dict[str, Any] = {"model": engine.info.name, "dtype": engine.info.dtype, "device": engine.info.device}
        setup |= {"input_len": args.input_len, "output_len": args.output_len}
        hosting = "owned" if args.owned else "hosted"
        return {**setup, "hosting": hosting, "adapters": list(given_adapters(args))}, rows


def _show(console: Console, setup: dict[str, Any], rows: list[Measured]) -> None:
    title = "{model} ({dtype}, {device}, {hosting}): {input_len} tokens in, {output_len} out".format_map(setup)
    if setup["adapters"]:
        title += f"; adapters: {', '.join(setup['adapters'])}"
    table = Table(title=title, title_justify="left", caption="times in ms; p50 / p99", caption_justify="left")
    for name in ("streams", "tokens/s", "first token", "between tokens", "loop lag", "preempted", "tokens/pass"):
        table.add_column(name, justify="right")
    for row in rows:
        times = row.first_token, row.inter_token, row.loop_lag
        shown = [f"{1000 * summary.p50:.1f} / {1000 * summary.p99:.1f}" for summary in times]
        rate, per_pass = f"{row.tokens_per_second:.0f}", f"{row.tokens_per_pass:.2f}"
        table.add_row(str(row.concurrency), rate, *shown, str(row.preemptions), per_pass)
    console.print(table)


def _draw(path: Any, setup: dict[str, Any], rows: list[Measured]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate, times) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    streams = [row.concurrency for row in rows]
    rate.plot(streams, [row.tokens_per_second for row in rows], marker="o")
    rate.set(title="output tokens per second", xlabel="streams", xscale="log", ylim=(0, None))
    for field, label in (("first_token", "first token"), ("inter_token", "between tokens")):
        for percentile, line in (("p50", "-"), ("p99", "--")):
            values = [1000 * getattr(getattr(row, field), percentile) for row in rows]
            times.plot(streams, values, marker="o", ls=line, label=f"{label}, {percentile}")
    times.set(title="latency, ms", xlabel="streams", xscale="log", yscale="log")
    times.legend()
    for axes in (rate, times):
        axes.set_xticks(streams, [str(n) for n in streams])
        axes.grid(alpha=0.3)
    figure.suptitle("{model} ({dtype}, {device}): {input_len} tokens in, {output_len} out".format_map(setup))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CliError(f"plot: {error}", FAILED) from error


# -------------------------------------------------------------------- the load


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop: each of `concurrency` streams sends its next request when the one before has ended."""

    concurrency: int
    rounds: int
    input_len: int
    output_len: int
    adapters: tuple[str | None, ...] = (None,)
    """Stream i uses adapter i modulo their number; None: no adapter."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Times in seconds. `inter_token` is the gap between deliveries divided by the tokens delivered."""

    concurrency: int
    requests: int
    output_tokens: int
    seconds: float
    first_token: Summary
    inter_token: Summary
    loop_lag: Summary
    preemptions: int
    tokens_per_pass: float
    """Tokens of one request in one step: above 1 where drafted tokens were accepted."""

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


async def measure(engine: AsyncEngine, load: Load, seed: int = 0) -> Measured:
    """Put `load` on `engine` from the running loop. Prompts are random and all different: no prefix is shared."""
    params = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=True)
    first, gaps, lag = list[float](), list[float](), list[float]()
    tokens = 0

    async def client(index: int) -> None:
        nonlocal tokens
        adapter, rng = load.adapters[index % len(load.adapters)], random.Random(f"{seed}/{index}")
        for _ in range(load.rounds):
            prompt = [rng.randrange(engine.info.vocab_size) for _ in range(load.input_len)]
            begun, last = False, time.perf_counter()
            async with engine.stream(prompt, params, adapter=adapter) as stream:
                async for chunk in stream:
                    now, count = time.perf_counter(), len(chunk.token_ids)
                    tokens += count
                    if begun and count:
                        gaps.extend([(now - last) / count] * count)
                    elif count:
                        first.append(now - last)
                        begun = True
                    last = now

    async def probe() -> None:
        """Measure how late the caller's own loop runs its timers."""
        while True:
            due = time.perf_counter() + PROBE
            await asyncio.sleep(PROBE)
            lag.append(time.perf_counter() - due)

    before, began = engine.stats(), time.perf_counter()
    probing = asyncio.create_task(probe())
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(load.concurrency):
                group.create_task(client(index))
    finally:
        probing.cancel()
    after, seconds = engine.stats(), time.perf_counter() - began
    summaries = Summary.of(first), Summary.of(gaps), Summary.of(lag)
    preempted, passes = after.preemptions - before.preemptions, max(1, after.passes - before.passes)
    per_pass = (after.generated_tokens - before.generated_tokens) / passes
    requests = load.concurrency * load.rounds
    return Measured(load.concurrency, requests, tokens, seconds, *summaries, preempted, per_pass)

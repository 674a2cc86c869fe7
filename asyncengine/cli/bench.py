"""`asyncengine bench`: how fast, for how many streams at once."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncengine.async_engine import AsyncEngine
from asyncengine.checks import as_integer
from asyncengine.cli.adapters import given_adapters
from asyncengine.cli.errors import FAILED, CliError
from asyncengine.cli.load import Load, Measured, measure
from asyncengine.cli.loading import open_async_engine
from asyncengine.cli.options import engine_config

Progress = Callable[[str], None]


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "rounds"):
        as_integer(name, getattr(args, name), 1)
    counts = args.concurrency if isinstance(args.concurrency, tuple) else (args.concurrency,)
    args.concurrency = [as_integer("concurrency", count, 1) for count in counts]
    if args.plot is not None:
        _require_matplotlib()
    config = engine_config(args, max_num_seqs=max(args.concurrency), show_progress=False, adapters=given_adapters(args))
    console = Console(stderr=True)
    with console.status(f"loading {args.model}") as status:
        setup, rows = asyncio.run(_sweep(args, config, status.update))
    if args.json:
        print(json.dumps({**setup, "results": [as_dict(row) for row in rows]}))
    else:
        _show(Console(), setup, rows)
    if args.plot is not None:
        _draw(args.plot, setup, rows)
        print(f"plot written to {args.plot}", file=sys.stderr)
    return 0


async def _sweep(args: argparse.Namespace, config: Any, say: Progress) -> tuple[dict[str, Any], list[Measured]]:
    async with open_async_engine(args.model, config, hosted=not args.owned) as engine:
        adapters = tuple(given_adapters(args)) or (None,)
        say("warming up")
        await measure(engine, Load(len(adapters), 1, args.input_len, min(8, args.output_len), adapters), seed=-1)
        rows = []
        for concurrency in args.concurrency:
            say(f"{concurrency} streams")
            load = Load(concurrency, args.rounds, args.input_len, args.output_len, adapters)
            rows.append(await measure(engine, load))
        return _setup(args, engine), rows


def _setup(args: argparse.Namespace, engine: AsyncEngine) -> dict[str, Any]:
    info = engine.info
    return {
        "model": info.name,
        "dtype": info.dtype,
        "device": info.device,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "hosting": "owned" if args.owned else "hosted",
        "adapters": list(given_adapters(args)),
    }


def as_dict(row: Measured) -> dict[str, Any]:
    return {**asdict(row), "tokens_per_second": row.tokens_per_second}


def _show(console: Console, setup: dict[str, Any], rows: list[Measured]) -> None:
    title = "{model} ({dtype}, {device}, {hosting}): {input_len} tokens in, {output_len} out".format_map(setup)
    if setup["adapters"]:
        title += f"; adapters: {', '.join(setup['adapters'])}"
    table = Table(title=title, title_justify="left", caption="times in ms; p50 / p99", caption_justify="left")
    for name in ("streams", "tokens/s", "first token", "between tokens", "loop lag", "preempted", "tokens/pass"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.concurrency),
            f"{row.tokens_per_second:.0f}",
            *(f"{1000 * s.p50:.1f} / {1000 * s.p99:.1f}" for s in (row.first_token, row.inter_token, row.loop_lag)),
            str(row.preemptions),
            f"{row.tokens_per_pass:.2f}",
        )
    console.print(table)


def _require_matplotlib() -> None:
    """Before the sweep, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CliError('--plot needs matplotlib: pip install "asyncengine[bench]"', FAILED) from error


def _draw(path: Any, setup: dict[str, Any], rows: list[Measured]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate, times) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    streams = [row.concurrency for row in rows]
    rate.plot(streams, [row.tokens_per_second for row in rows], marker="o")
    rate.set(title="output tokens per second", xlabel="streams", xscale="log", ylim=(0, None))
    for label, found in (
        ("first token", [row.first_token for row in rows]),
        ("between tokens", [row.inter_token for row in rows]),
    ):
        times.plot(streams, [1000 * each.p50 for each in found], marker="o", label=f"{label}, p50")
        times.plot(streams, [1000 * each.p99 for each in found], marker="o", ls="--", label=f"{label}, p99")
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

"""`asyncengine demo`: the engine on its bundled model, as a short story in five scenes and a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import Any

from rich.table import Table

from asyncengine.async_engine import AsyncEngine
from asyncengine.checks import as_integer
from asyncengine.cli import fleet_demo, frameworks, scenes
from asyncengine.cli.errors import FAILED, CliError
from asyncengine.cli.loading import in_background, open_async_engine
from asyncengine.cli.options import engine_config
from asyncengine.cli.scenes import Tally
from asyncengine.cli.show import Show
from asyncengine.cli.text import write_json
from asyncengine.config import EngineConfig
from asyncengine.stats import EngineStats

MODEL = "demo"
EMBEDDER = "demo-embed"
ADAPTERS = {"pirate": "demo/pirate", "json": "demo/json"}
DEFAULTS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "32MiB", "show_progress": False}
"""One thread: matrices this small gain nothing from a second one. A small cache: its pages can be counted by eye."""


def run(args: argparse.Namespace) -> int:
    as_integer("streams", args.streams, 1)
    if args.fleet is not None:
        as_integer("fleet", args.fleet, 2)  # one of them is killed
    show = Show(quiet=args.json, picture=args.export_svg)
    if args.fleet is None:
        summary = asyncio.run(_story(show, engine_config(args, **DEFAULTS, adapters=ADAPTERS), args.streams))
    else:
        summary = asyncio.run(fleet_demo.story(show, engine_config(args, **DEFAULTS), MODEL, args.fleet, args.streams))
    if args.json:
        write_json(summary)
    try:
        show.save()
    except OSError as error:
        raise CliError(f"export_svg: {error}", FAILED) from error
    return 0


async def _story(show: Show, config: EngineConfig, streams: int) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        with scenes.busy(show, "importing torch and loading the models"):
            engine = await stack.enter_async_context(open_async_engine(MODEL, config))
            like = EngineConfig(device=config.device, num_threads=config.num_threads, show_progress=False)
            embedder = await stack.enter_async_context(open_async_engine(EMBEDDER, like))
        return await _play(show, engine, embedder, streams)


async def _play(show: Show, engine: AsyncEngine, embedder: AsyncEngine, streams: int) -> dict[str, Any]:
    info = engine.info
    show.print(
        f"[bold]asyncengine[/bold] has loaded its bundled model into this process: {info.weight_bytes / 1e6:.1f} MB "
        f"of {info.dtype} on {info.device}, {info.num_pages - 1} KV pages of {info.page_size} tokens. No server, no "
        "network."
    )
    with scenes.busy(show, "importing LangChain and LlamaIndex"):
        chain = await in_background(lambda: frameworks.chain(engine))
        queries = await in_background(lambda: frameworks.query_engine(engine, embedder))
    for name, module, extra in (
        ("LangChain", "langchain_core", "langchain"),
        ("LlamaIndex", "llama_index.core", "llama-index"),
    ):
        if not frameworks.installed(module):
            show.print(f'{name} is not installed (pip install "asyncengine\\[{extra}]"): the plain API stands in.')
    tally = Tally()
    await scenes.many_streams(show, engine, chain, streams, tally)
    await scenes.shared_prefix(show, engine, chain, tally)
    await scenes.retrieval(show, engine, queries, tally)
    await scenes.three_voices(show, engine, tuple(ADAPTERS), tally)
    await scenes.change_of_mind(show, engine, chain, tally)
    stats = engine.stats()
    show.scene("In figures", "Everything above, in one process.")
    show.print(_table(stats, tally))
    show.print("", "Next: [bold]asyncengine chat demo[/bold], or any Hugging Face model in place of demo.")
    return _summary(engine, stats, tally)


def _summary(engine: AsyncEngine, stats: EngineStats, tally: Tally) -> dict[str, Any]:
    return {
        "model": engine.info.name,
        "dtype": engine.info.dtype,
        "requests": sum(stats.finished.values()),
        "finished": stats.finished,
        "most_streams": tally.most_streams,
        "right_answers": tally.right,
        "checked_answers": tally.asked,
        "output_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "hit_rate": stats.hit_rate,
        "tokens_per_second": stats.generated_tokens / tally.seconds,
        "first_token_ms": {"p50": stats.first_token.p50 * 1000, "p99": stats.first_token.p99 * 1000},
        "inter_token_ms": {"p50": stats.inter_token.p50 * 1000, "p99": stats.inter_token.p99 * 1000},
        "step_ms": {"p50": stats.step.p50 * 1000, "p99": stats.step.p99 * 1000},
        "engine_loop_lag_ms": {"p50": stats.loop_lag.p50 * 1000, "p99": stats.loop_lag.p99 * 1000},
        "preemptions": stats.preemptions,
        "tokens_per_pass": stats.tokens_per_pass,
        "guessed_ahead": 0 if stats.speculation is None else stats.speculation.accepted,
        "scenes": tally.scenes,
    }


def _table(stats: EngineStats, tally: Tally) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="cyan")
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")

    def times(summary: Any) -> str:
        return f"{summary.p50 * 1000:.1f} / {summary.p99 * 1000:.1f} ms"

    ended = ", ".join(f"{count} {reason}" for reason, count in stats.finished.items())
    table.add_row("requests", str(sum(stats.finished.values())), f"{ended}; at most {tally.most_streams} at once")
    table.add_row("right answers", f"{tally.right} of {tally.asked}", "of those with a known answer")
    table.add_row(
        "output tokens", str(stats.generated_tokens), f"{stats.generated_tokens / tally.seconds:.0f} per second"
    )
    if stats.speculation is not None:
        drafts = stats.speculation
        table.add_row(
            "guessed ahead",
            str(drafts.accepted),
            f"tokens right of {drafts.drafted}; {stats.tokens_per_pass:.2f} tokens per pass of a request",
        )
    table.add_row("prompt tokens", str(stats.prompt_tokens), f"{stats.hit_rate:.0%} from the prefix cache")
    table.add_row("first token", times(stats.first_token), "p50 / p99, from submit")
    table.add_row("between tokens", times(stats.inter_token), "p50 / p99")
    table.add_row("one step", times(stats.step), "p50 / p99, a forward pass for all")
    table.add_row("preemptions", str(stats.preemptions), "requests that gave way and resumed")
    return table

"""Does compiling grammars disturb anybody: the caller's loop, and streams that run beside?

    python -m benchmarks.grammar_lag [--model demo --streams 32 --schemas 10 --fields 100 --seconds 5 --rounds 4 --json]
    python -m benchmarks.grammar_lag --hostile [--timeout 10]

Loop lag is measured as in `event_loop.py`: a task on the caller's loop sleeps 1 ms again and again. An owned engine
runs on that loop, a hosted one on a thread of its own. Phases of `--seconds` alternate: streams only; the same streams
while large schemas compile, all distinct and none compiled before, so many at once. Each such phase goes on until the
last has compiled. The streams' inter-token times are taken on the caller's side. Target: lag p99 below 20 ms.

--hostile instead throws grammars at a hosted engine that are made to hurt, one after the other: each must be refused or
time out. The table says how, after how long, how late the caller's loop ran at worst, and how long a harmless grammar
that comes next has to wait to be served; then threads and child processes before the first and after the last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.errors import EngineError, GrammarTimeout
from asyncengine.grammar import Grammar
from benchmarks.constraints import BOOLEAN, INTEGER, STRING, array, record, text
from benchmarks.event_loop import LagProbe
from benchmarks.grammar_setup import spread
from benchmarks.hostile_grammars import CASES

TARGET_MS = 20
PATIENCE = 120.0
"""Seconds for a large schema to compile: how long it takes is what is asked here."""
FREE = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"kv_cache_memory": "512MB", "show_progress": False}
clock = time.perf_counter


def large_schema(number: int, fields: int) -> dict[str, Any]:
    """`fields` fields in records of 20, named by `number`, so that no two share anything."""
    kinds: tuple[dict[str, Any], ...] = (
        STRING, INTEGER, BOOLEAN, text(1, 60), {"type": "number", "minimum": 0}, {"type": "string", "format": "date"},
        {"enum": [f"option_{number}_{i}" for i in range(12)]}, array(STRING), {"anyOf": [STRING, {"type": "null"}]},
        {"type": "string", "pattern": f"^[A-Z]{{2}}{number}-[0-9]{{4,8}}$"},
    )  # fmt: skip
    groups = range(fields // 20)
    return record(
        {f"part_{number}_{g}": record({f"field_{number}_{g}_{i}": kinds[i % 10] for i in range(20)}) for g in groups}
    )


class Streams:
    """Streams that run until told to stop; the times between their tokens are kept while `keep` is set."""

    def __init__(self, engine: AsyncEngine, count: int) -> None:
        self._engine = engine
        self.gaps: list[float] = []
        self._tasks = [asyncio.create_task(self._one(index)) for index in range(count)]

    async def _one(self, index: int) -> None:
        rng = random.Random(index)
        while True:
            prompt = [rng.randrange(10, self._engine.info.vocab_size) for _ in range(32)]
            last = 0.0
            async for _ in self._engine.stream(prompt, FREE):
                now = clock()
                if last:
                    self.gaps.append(now - last)
                last = now

    async def __aenter__(self) -> Streams:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def compile_all(engine: AsyncEngine, schemas: list[dict[str, Any]]) -> list[float]:
    """Seconds until the first token of each, submitted at once. Cut short after it: no way to the end is kept."""

    async def one(schema: dict[str, Any]) -> float:
        began = clock()
        params = SamplingParams(grammar=schema, max_tokens=1, on_budget="truncate", temperature=0)
        await engine.generate([5, 6, 7], params)
        return clock() - began

    return list(await asyncio.gather(*map(one, schemas)))


async def phase(streams: Streams, seconds: float, work: Any = None) -> tuple[list[float], list[float], Any]:
    """Lags, gaps between tokens, and what `work` returns, over `seconds` or until `work` is done."""
    streams.gaps.clear()
    probe = LagProbe()
    task = asyncio.create_task(probe.run())
    if work is None:
        await asyncio.sleep(seconds)
        result = None
    else:
        result = await work
    task.cancel()
    return probe.late, list(streams.gaps), result


async def beside(options: argparse.Namespace, hosted: bool) -> dict[str, Any]:
    engine = await AsyncEngine.from_pretrained(options.model, hosted=hosted, grammar_timeout=PATIENCE, **SETTINGS)
    found: dict[str, dict[str, list[float]]] = {
        name: {"lag": [], "gap": [], "waited": [], "took": []} for name in ("alone", "compiling")
    }
    size = len(json.dumps(large_schema(0, options.fields)))
    async with engine, Streams(engine, options.streams) as streams:
        await asyncio.sleep(2)  # warm
        await compile_all(engine, [large_schema(10**6, 20)])
        for turn in range(options.rounds):
            schemas = [large_schema(turn * options.schemas + i, options.fields) for i in range(options.schemas)]
            for name in ("alone", "compiling"):
                began = clock()
                work = compile_all(engine, schemas) if name == "compiling" else None
                lag, gap, waited = await phase(streams, options.seconds, work)
                found[name]["took"].append(clock() - began)
                found[name]["lag"] += lag
                found[name]["gap"] += gap
                found[name]["waited"] += waited or []
    report: dict[str, Any] = {"schema_bytes": size}
    for name, values in found.items():
        report[name] = {
            "lag_ms": spread(values["lag"], 1e3),
            "inter_token_ms": spread(values["gap"], 1e3),
            "first_token_of_constrained_s": spread(values["waited"]),
            "seconds": sum(values["took"]),
        }
    return report


# ---------------------------------------------------------------- hostile grammars


def threads_and_children() -> dict[str, int]:
    tasks = list(Path("/proc/self/task").iterdir())
    children = [child for task in tasks for child in (task / "children").read_text(encoding="utf-8").split()]
    return {"threads": len(tasks), "children": len(children)}


async def try_one(engine: AsyncEngine, make: Any) -> dict[str, Any]:
    """The engine's answer to one request with the grammar that `make` returns. Making it is not timed."""
    grammar = await asyncio.to_thread(make)
    probe = LagProbe()
    task = asyncio.create_task(probe.run())
    await asyncio.sleep(0.01)
    began = clock()
    try:
        params = SamplingParams(grammar=grammar, max_tokens=200, temperature=1, seed=1)
        completion = await engine.generate([5, 6, 7], params)
        how = f"accepted, {len(completion.token_ids)} tokens, {completion.finish_reason}"
    except EngineError as error:
        how = f"{type(error).__name__}: {error}"
    seconds = clock() - began
    others = await harmless(engine)
    task.cancel()
    return {"how": how, "seconds": seconds, "lag_max_ms": max(probe.late) * 1e3, "others_wait": others}


async def harmless(engine: AsyncEngine) -> float:
    """Seconds until a harmless grammar that nobody has asked for before is served, timeouts included."""
    began = clock()
    while True:
        with contextlib.suppress(GrammarTimeout):
            pattern = f"[a-z]{{3}}{clock():.9f}"
            await engine.generate([5, 6, 7], SamplingParams(grammar=Grammar.regex(pattern), max_tokens=64))
            return clock() - began


async def hostile(options: argparse.Namespace) -> dict[str, Any]:
    engine = await AsyncEngine.from_pretrained(options.model, hosted=True, grammar_timeout=options.timeout, **SETTINGS)
    async with engine:
        await compile_all(engine, [large_schema(0, 20)])  # the threads that compile and fill masks now run
        before = threads_and_children()
        cases = {name: await try_one(engine, make) for name, make in CASES.items()}
        probe = LagProbe()
        idle = asyncio.create_task(probe.run())
        await asyncio.sleep(1)
        idle.cancel()
        answer = await engine.generate("What is two plus two?", SamplingParams(max_tokens=8))
        after = threads_and_children()
    return {
        "cases": cases,
        "before": before,
        "after": after,
        "closed": threads_and_children(),
        "lag_max_ms_idle": max(probe.late) * 1e3,
        "alive_after": bool(answer.token_ids),
    }


# ---------------------------------------------------------------- output


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--schemas", type=int, default=10)
    parser.add_argument("--fields", type=int, default=100, help="of each schema")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a phase without compiling")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--timeout", type=float, default=10.0, help="grammar_timeout of the hostile run")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def table(report: dict[str, Any]) -> str:
    lines = []
    for mode, found in report.items():
        lines.append(f"{mode} engine, schemas of {found['schema_bytes']:,} bytes (p50 / p99 / max)")
        for name in ("alone", "compiling"):
            row = found[name]
            for key in ("lag_ms", "inter_token_ms", "first_token_of_constrained_s"):
                if row[key]["count"]:
                    values = " / ".join(f"{row[key][q]:.2f}" for q in ("p50", "p99", "max"))
                    lines.append(f"  {name:<10} {key:<30} {values}   ({row[key]['count']} in {row['seconds']:.1f} s)")
    return "\n".join([*lines, f"target: lag p99 below {TARGET_MS} ms"])


def hostile_table(report: dict[str, Any]) -> str:
    lines = [f"{'grammar':<42}{'seconds':>8}{'lag max ms':>11}{'next waits s':>13}  outcome"]
    for name, row in report["cases"].items():
        figures = f"{row['seconds']:>8.2f}{row['lag_max_ms']:>11.1f}{row['others_wait']:>13.2f}"
        lines.append(f"{name:<42}{figures}  {row['how'][:110]}")
    rest = {key: value for key, value in report.items() if key != "cases"}
    return "\n".join([*lines, json.dumps(rest)])


def main() -> None:
    options = parse()
    if options.hostile:
        found = asyncio.run(hostile(options))
        print(json.dumps(found) if options.json else hostile_table(found))
        return
    report = {mode: asyncio.run(beside(options, mode == "hosted")) for mode in ("owned", "hosted")}
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()

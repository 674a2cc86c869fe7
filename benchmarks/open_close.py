"""Whether engines that were closed leave anything in a process: python -m benchmarks.open_close

    [--cycles 200 --at 20 60 200 --hosting owned hosted sync shared group embedder --grammars]

Each hosting has a process of its own, which opens an engine of the bundled model, asks it one question (an embedder:
one text) and closes it, so many times. Resident memory and objects that the garbage collector knows, each after
collecting and after giving free memory back to the system, at the cycles named; and what there is of the engine's
classes. The first cycles compile kernels and fill caches of torch and the allocator: what counts is the growth between
the last two marks, which ends the command with exit status 1 where it is more than `--allowed` KiB a cycle.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import multiprocessing
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from asyncengine import AsyncEngine, Engine, EngineGroup, SamplingParams, shared_engine
from asyncengine.grammar import Grammar

SETTINGS: dict[str, Any] = {"show_progress": False, "kv_cache_memory": "16MiB"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
QUESTION = [{"role": "user", "content": "Hello!"}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--at", type=int, nargs="+", default=[20, 60, 200])
    parser.add_argument("--hosting", choices=HOSTINGS, nargs="+", default=list(HOSTINGS))
    parser.add_argument("--grammars", action="store_true", help="ask for JSON: a grammar is compiled each time")
    parser.add_argument("--allowed", type=float, default=50.0, help="KiB that a cycle may leave, between the last two")
    options = parser.parse_args()
    grown = [_apart(hosting, options) for hosting in options.hosting]
    return int(any(each > options.allowed for each in grown))


def _apart(hosting: str, options: argparse.Namespace) -> float:
    """KiB that each cycle left, measured in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    given, told = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_measure, args=(told, hosting, options))
    process.start()
    told.close()
    rows: list[dict[str, Any]] = []
    while True:
        try:
            rows.append(given.recv())
        except EOFError:
            break
        print(json.dumps({"hosting": hosting, **rows[-1]}), flush=True)
    process.join()
    if process.exitcode or len(rows) < 2:
        return float("inf")
    first, last = rows[-2:]
    return (last["rss_mib"] - first["rss_mib"]) * 1024 / (last["cycles"] - first["cycles"])


def _measure(told: Any, hosting: str, options: argparse.Namespace) -> None:
    marks = sorted({each for each in options.at if each < options.cycles} | {options.cycles})
    cycles = HOSTINGS[hosting]

    def note(cycle: int) -> None:
        if cycle in marks:
            told.send({"cycles": cycle, **_held()})

    params = SamplingParams(max_tokens=8)
    if options.grammars:
        params = SamplingParams(max_tokens=64, grammar=Grammar.json_schema(SCHEMA))
    cycles(options.cycles, params, note)


def _held() -> dict[str, Any]:
    """Resources that this process has, once all that can be given back is."""
    for _ in range(3):
        gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    objects = gc.get_objects()
    kinds = Counter(map(type, objects))
    ours = {kind.__name__: n for kind, n in kinds.most_common() if str(kind.__module__).startswith("asyncengine.")}
    return {
        "rss_mib": round(int(status.split("VmRSS:")[1].split()[0]) / 1024, 1),
        "objects": len(objects),
        "threads": int(status.split("Threads:")[1].split()[0]),
        "of_the_engine": dict(list(ours.items())[:6]),
    }


async def _ask(engine: AsyncEngine, params: SamplingParams) -> None:
    if engine.info.task == "embed":
        await engine.embed(["Hello!"])
    else:
        await engine.chat(QUESTION, params)


def _of_one(model: str, hosted: bool) -> Any:
    """Cycles of one engine after another, all on one loop."""

    def cycles(count: int, params: SamplingParams, note: Any) -> None:
        async def run() -> None:
            for cycle in range(1, count + 1):
                async with await AsyncEngine.from_pretrained(model, hosted=hosted, **SETTINGS) as engine:
                    await _ask(engine, params)
                del engine
                note(cycle)

        asyncio.run(run())

    return cycles


def _sync(count: int, params: SamplingParams, note: Any) -> None:
    for cycle in range(1, count + 1):
        with Engine.from_pretrained("demo", **SETTINGS) as engine:
            engine.chat(QUESTION, params)
        del engine
        note(cycle)


def _shared(count: int, params: SamplingParams, note: Any) -> None:
    for cycle in range(1, count + 1):
        handle = shared_engine("demo", keep_alive=0, **SETTINGS)
        engine = handle.get()
        engine.chat(QUESTION, params)
        handle.close()
        engine.close()  # until it has ended, which closing the handle does not wait for
        del handle, engine
        note(cycle)


def _group(count: int, params: SamplingParams, note: Any) -> None:
    async def run() -> None:
        for cycle in range(1, count + 1):
            models = {"chat": "demo", "embed": "demo-embed"}
            async with await EngineGroup.from_pretrained(models, **SETTINGS) as group:
                await _ask(group["chat"], params)
                await _ask(group["embed"], params)
            del group
            note(cycle)

    asyncio.run(run())


HOSTINGS = {
    "owned": _of_one("demo", hosted=False),
    "hosted": _of_one("demo", hosted=True),
    "sync": _sync,
    "shared": _shared,
    "group": _group,
    "embedder": _of_one("demo-embed", hosted=False),
}


if __name__ == "__main__":
    sys.exit(main())

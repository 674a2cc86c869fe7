"""Gaps of running streams while a long prompt is computed beside them: python -m benchmarks.gaps MODEL.gguf

    [--targets 0.05 none --llama-cpp --streams 8 --prompt 2340 --beside 0 2 --rounds 5 --threads 2 --json]

Each system is loaded once: this engine with each `step_time_target`, and, with `--llama-cpp`, the server of the package
`xllamacpp`, which must be installed, in a process of its own. In each round all take turns, on the idle machine and
beside processes that only count: streams generate, a prompt of random tokens comes, and until its first token is there
the time between two tokens of each stream is a gap. Medians of rounds, and the worst round. "CPU" is processor time of
this process for each token of prompt and streams (of nobody else's server).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from itertools import pairwise
from typing import Any, Protocol

from asyncengine import AsyncEngine, SamplingParams
from benchmarks.neighbours import Neighbours

_WARM = 16
"""Tokens that each stream has before the prompt comes."""
_SERVER = """
import sys, threading
import xllamacpp
params = xllamacpp.CommonParams()
model, port, threads, slots = sys.argv[1], *map(int, sys.argv[2:])
params.model.path, params.port, params.n_parallel, params.n_ctx = model, port, slots, 4096 * slots
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.verbosity = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
"""


class System(Protocol):
    def tokens(self, prompt: list[int], count: int) -> AsyncIterator[Any]:
        """Something for each of the `count` tokens that follow `prompt`, greedy."""
        ...

    async def aclose(self) -> None: ...


class Ours:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.aclose = engine.aclose

    def tokens(self, prompt: list[int], count: int) -> AsyncIterator[Any]:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        return aiter(self._engine.stream(prompt, params))


class LlamaServer:
    """llama.cpp's server on the loopback address."""

    def __init__(self, options: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        sizes = str(self._port), str(options.threads), str(options.streams + 1)
        command = [sys.executable, "-c", _SERVER, options.model, *sizes]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("llama.cpp's server did not start: is xllamacpp installed?")

    async def tokens(self, prompt: list[int], count: int) -> AsyncIterator[Any]:
        wanted = {"prompt": prompt, "n_predict": count, "stream": True, "temperature": 0.0, "ignore_eos": True}
        body = json.dumps(wanted | {"return_tokens": True, "cache_prompt": False}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        try:
            head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}"
            writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
            async for line in reader:
                if line.startswith(b"data: {"):
                    for token in json.loads(line[6:]).get("tokens", ()):
                        yield token
        finally:
            writer.close()

    async def aclose(self) -> None:
        self._process.kill()
        self._process.wait()


async def measure(system: System, streams: int, prompt: int, rng: random.Random) -> dict[str, float]:
    """Seconds of the prompt until its first token, and of gaps meanwhile."""
    times: list[list[float]] = [[] for _ in range(streams)]
    started, done = asyncio.Event(), asyncio.Event()

    async def stream(mine: list[float], tokens: list[int]) -> None:
        async with aclosing(system.tokens(tokens, 2000)) as found:  # type: ignore[type-var]
            async for _ in found:
                mine.append(time.perf_counter())
                if len(mine) >= _WARM and all(len(other) >= _WARM for other in times):
                    started.set()
                if done.is_set():
                    return

    def draw(count: int) -> list[int]:
        return [rng.randrange(1000, 30000) for _ in range(count)]

    async with asyncio.TaskGroup() as tasks:
        for mine in times:
            tasks.create_task(stream(mine, draw(32)))
        await started.wait()
        began, cpu = time.perf_counter(), time.process_time()
        async for _ in system.tokens(draw(prompt), 1):
            pass
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        await asyncio.sleep(0.05)
        done.set()
    gaps = [after - before for mine in times for before, after in pairwise(mine) if after > began and before < ended]
    gaps.sort()
    made = sum(began < moment <= ended for mine in times for moment in mine)
    return {
        "prompt": ended - began, "p50": gaps[len(gaps) // 2], "p99": gaps[int(0.99 * len(gaps))], "max": gaps[-1],
        "tokens": made / streams, "cpu": cpu / (made + prompt),
    }  # fmt: skip


async def run(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    rng, found = random.Random(options.seed), dict[str, dict[str, list[float]]]()
    async with AsyncExitStack() as stack:
        systems: dict[str, System] = {}
        for target in options.targets:
            seconds = None if target == "none" else float(target)
            engine = await AsyncEngine.from_pretrained(
                options.model, hosted=True, show_progress=False, num_threads=options.threads, step_time_target=seconds
            )
            stack.push_async_callback(engine.aclose)
            systems[f"target {target}"] = Ours(engine)
        if options.llama_cpp:
            systems["llama.cpp server"] = server = LlamaServer(options)
            stack.push_async_callback(server.aclose)
        for system in systems.values():
            await measure(system, 2, 256, rng)
        for _ in range(options.rounds):
            for beside in options.beside:
                for name, system in systems.items():
                    with Neighbours(beside):
                        cells = await measure(system, options.streams, options.prompt, rng)
                    for key, value in cells.items():
                        found.setdefault(f"beside {beside}, {name}", {}).setdefault(key, []).append(value)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    for name, cells in sorted(found.items()):
        middle = {key: statistics.median(values) for key, values in cells.items()}
        print(
            f"{name:30} prompt {middle['prompt']:6.2f} s, gaps p50 {middle['p50']:.3f} p99 {middle['p99']:.3f} s "
            f"(worst {max(cells['max']):.3f}), {middle['tokens']:.0f} tokens a stream, CPU {1e3 * middle['cpu']:.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--targets", nargs="+", default=["0.05", "none"], help="seconds, or none")
    parser.add_argument("--llama-cpp", action="store_true", help="measure its server, too")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2340)
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(run(options))
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()

"""The gain of a prefix cache on a disk after a restart, and the cost of keeping it.

    python -m benchmarks.durable_prefix [--model demo] [--shared 1024] [--requests 32] [--long 2000] [--slow 10]

Each engine is a process of its own, so that nothing is in memory but what a disk has. Of 0.6B shapes, write
`--model` of a folder with Qwen3-0.6B's config.json, and `--load-format dummy`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.kvcache.store.disk import SystemDisk

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def tokens(count: int, seed: int) -> list[int]:
    return [100 + (seed * 7919 + place * 31 + place * place) % 300 for place in range(count)]


async def serve(options: dict[str, Any]) -> dict[str, Any]:
    """One process: all first tokens of many requests with a shared beginning, then of one long prompt."""
    if options["slow"]:
        _slow_down(options["slow"] * 1e6)
    settings = {"kv_cache_dir": options["folder"]} if options["folder"] else {}
    settings |= {"load_format": options["load_format"], "show_progress": False, "speculation": "off"}
    async with await AsyncEngine.from_pretrained(options["model"], **settings) as engine:
        await engine.generate(tokens(40, 99), ONE)  # the first request of a process pays for what all need
        shared = tokens(options["shared"], 1)
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(engine.generate([*shared, *tokens(32, 2 + number)], ONE) for number in range(options["requests"]))
        )
        seconds = {"requests": time.perf_counter() - began}
        began = time.perf_counter()
        answers.append(await engine.generate(tokens(options["long"], 77), ONE))
        seconds["long"] = time.perf_counter() - began
        began = time.perf_counter()
        rest = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        await asyncio.gather(*(engine.generate(tokens(200, 1000 + number), rest) for number in range(8)))
        seconds["serving"] = time.perf_counter() - began
        stats = engine.stats()
    return {
        **seconds, "restored": stats.restored_tokens, "read": stats.stored.bytes_read,
        "written": stats.stored.bytes_written, "answers": [answer.token_ids for answer in answers],
    }  # fmt: skip


def _slow_down(rate: float) -> None:
    """Make every read of records take as long as at so many bytes a second."""
    read = SystemDisk.preadv

    def slowly(self: SystemDisk, descriptor: int, buffers: Any, offset: int) -> int:
        count = read(self, descriptor, buffers, offset)
        time.sleep(count / rate)
        return count

    SystemDisk.preadv = slowly  # type: ignore[method-assign]


def run(options: argparse.Namespace, folder: str | None, slow: float = 0) -> dict[str, Any]:
    """The output of `serve` in another process."""
    given = json.dumps({**vars(options), "folder": folder, "slow": slow})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.durable_prefix", "--serve", given], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--slow", type=float, default=10, help="MB/s of a slow disk")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        print(json.dumps(asyncio.run(serve(json.loads(options.serve)))))
        return
    kinds: dict[str, list[dict[str, Any]]] = {"none": [], "writing": [], "restored": [], "slow": []}
    for _ in range(options.rounds):  # in turns: what else the machine does is in all of them alike
        folder = tempfile.mkdtemp(prefix="durable-prefix-")
        kinds["none"].append(run(options, None))
        kinds["writing"].append(run(options, folder))
        kinds["restored"].append(run(options, folder))
        kinds["slow"].append(run(options, folder, options.slow))
        shutil.rmtree(folder)
    said = {kind: [each["answers"] for each in found] for kind, found in kinds.items()}
    print("answers are the same:", all(each == said["none"][0] for found in said.values() for each in found))
    for what in ("requests", "long", "serving"):
        base = statistics.median(each[what] for each in kinds["none"])
        for kind, found in kinds.items():
            seconds = statistics.median(each[what] for each in found)
            print(f"{what:9} {kind:9} {seconds:8.3f} s  {seconds / base:6.3f} of none")
    for kind, found in kinds.items():
        print(
            f"{kind:9} restored {found[-1]['restored']} tokens, read {found[-1]['read']}, wrote {found[-1]['written']}"
        )


if __name__ == "__main__":
    main()

"""Does the resident set stay flat while a long list is embedded? Its vectors grow, and nothing else should.

    python -m benchmarks.vector_soak MODEL [--texts 50000] [--words 12] [--json]

Prints the process's resident set, without the vectors' own bytes, after each tenth of the texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

from asyncengine import AsyncEngine


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def soak(options: argparse.Namespace) -> list[dict[str, float]]:
    rng = random.Random(0)
    texts = [
        " ".join(f"word{rng.randrange(5000)}" for _ in range(rng.randrange(1, 2 * options.words)))
        for _ in range(options.texts)
    ]
    found: list[dict[str, float]] = []
    async with await AsyncEngine.from_pretrained(options.model, show_progress=False) as engine:
        await engine.embed(texts[:500])  # caches of bounded size fill
        own = options.texts * engine.info.dimensions * 4 / 2**20
        steps, seen, began = options.texts // 10, 0, time.perf_counter()

        def look(event: object) -> None:
            nonlocal seen
            done = engine.stats().finished.get("stop", 0) - 500
            if done // steps > seen:
                seen = done // steps
                rate = done / (time.perf_counter() - began)
                found.append(
                    {
                        "texts": done,
                        "resident_mib": resident_mib() - own * done / options.texts,
                        "texts_per_second": rate,
                    }
                )
                if not options.json:
                    print("{texts:>8.0f}  {resident_mib:.0f} MiB  {texts_per_second:.0f} texts/s".format(**found[-1]))

        engine.on_event(look)
        await engine.embed(texts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=50_000)
    parser.add_argument("--words", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(soak(options))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

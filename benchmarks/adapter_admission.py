"""Filling of batches by requests of many adapters, and the cost of planning then: the scheduler alone, no model.

    python -m benchmarks.adapter_admission [--requests 400 --slots 8 --rows 64 --adapters 0 1 8 64]

All requests arrive at once and take turns over the adapters, `--slots` of which can run at a time. Printed for each
number of adapters: steps until all have ended (as few as without adapters, if the batch is always full), mean rows of a
step, and milliseconds to plan one.
"""

from __future__ import annotations

import argparse
import statistics
import time

from asyncengine import EngineConfig, SamplingParams
from asyncengine.kvcache import KVCache
from asyncengine.lora.admission import AdapterSlots
from asyncengine.options import RequestOptions
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.messages import AdapterReady
from asyncengine.step import StepResult

PARAMS = SamplingParams(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--input", type=int, default=200)
    parser.add_argument("--output", type=int, default=30)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 64])
    options = parser.parse_args()
    print(f"{'adapters':>8} {'steps':>6} {'rows':>6} {'plan p50':>9} {'plan max':>9}")
    for adapters in options.adapters:
        spent, rows = run(options, adapters)
        median, most = statistics.median(spent) * 1e3, max(spent) * 1e3
        print(f"{adapters:>8} {len(spent):>6} {rows / len(spent):>6.1f} {median:>6.2f} ms {most:>6.2f} ms")


def run(options: argparse.Namespace, adapters: int) -> tuple[list[float], int]:
    """Seconds to plan each step, and rows of all steps."""
    config = EngineConfig(max_num_seqs=options.rows, page_size=16, check_every=10**9)
    pages = 2 + options.requests * -(-(options.input + options.output) // 16)
    scheduler = Scheduler(config, KVCache(pages, 16), AdapterSlots(options.slots))
    for index in range(options.requests):
        prompt = tuple((index * 7 + place) % 97 for place in range(options.input))
        name = f"adapter {index % adapters}" if adapters else None
        total = len(prompt) + options.output
        scheduler.apply(RequestSpec(index + 1, prompt, PARAMS, total, RequestOptions(adapter=name)))
        if name is not None:
            scheduler.apply(AdapterReady(index + 1, name))
    spent, rows = [], 0
    while scheduler.requests:
        began = time.perf_counter()
        batch = scheduler.schedule(0.0)
        spent.append(time.perf_counter() - began)
        assert batch is not None
        rows += len(batch.rows)
        tokens = [5 if row.samples else -1 for row in batch.rows]
        scheduler.commit(StepResult(batch.step, tokens), 0.0)
        scheduler.take_outputs()
    return spent, rows


if __name__ == "__main__":
    main()

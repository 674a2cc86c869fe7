"""One system in a process of its own: reads orders and writes answers, a line of JSON each.

    python -m benchmarks.peers.worker DRIVER READ_FD WRITE_FD

Imports the standard library alone until it is told to load: a peer's Python need not have this engine. What a system
prints goes to its log, never among the answers.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.drivers.base import Absent, Driver, Settings
from benchmarks.peers.workloads import Request, Trace


def main() -> None:
    name, reading, writing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for end in (reading, writing):
        os.set_inheritable(end, False)  # or a child of the system would keep the pipe open
    asyncio.run(serve(importlib.import_module(f"benchmarks.peers.drivers.{name}").make(), reading, writing))


async def serve(driver: Driver, reading: int, writing: int) -> None:
    with os.fdopen(reading, encoding="utf-8") as orders, os.fdopen(writing, "w", encoding="utf-8") as answers:
        while True:
            line = await asyncio.to_thread(orders.readline)  # the system's own tasks go on
            order = json.loads(line) if line else {"do": "quit"}
            try:
                answer = await obey(driver, order)
            except Absent as error:
                answer = {"absent": str(error)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            if line:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
            if order["do"] == "quit":
                return


async def obey(driver: Driver, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "load":
        return await driver.load(Settings(**order["settings"]))
    if order["do"] == "quit":
        await driver.close()
        return {}
    if order["do"] == "measure":
        measured: dict[str, float] = driver.measure()  # type: ignore[attr-defined]  # of the driver `machine`
        return measured
    requests = [Request(**request) for request in order["requests"]]
    gc.collect()
    traces = await driver.run(requests, order["way"])
    check(requests, traces)
    return {"traces": [asdict(trace) for trace in traces]}


def check(requests: Sequence[Request], traces: Sequence[Trace]) -> None:
    wanted = [request.output for request in requests]
    found = [len(trace.tokens) for trace in traces]
    if wanted != found:
        raise RuntimeError(f"gave {sum(found)} tokens, not {sum(wanted)}")


if __name__ == "__main__":
    main()

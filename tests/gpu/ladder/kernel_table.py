"""Kernels of a load by torch's profiler: how many a step launches, how long each takes, how busy the GPU is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine

from .machine import wait_for
from .session import Session
from .workloads import burst

_SHOWN = 16
_WIDTH = 90


async def kernel_table(session: Session, engine: AsyncEngine, name: str, lengths: Sequence[tuple[int, int]]) -> None:
    """Run the load twice, unprofiled and profiled. On a CPU operations stand in for kernels."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = session.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    await burst(engine, [(prompt, min(output, 8)) for prompt, output in lengths], session.seed)
    plain = await burst(engine, lengths, session.seed + 1)
    wait_for(session.device)
    with profile(activities=[activity]) as profiler:
        began = time.perf_counter()
        await burst(engine, lengths, session.seed + 2)
        wait_for(session.device)
        seconds = time.perf_counter() - began
    kinds: Any = torch.autograd
    kind = kinds.DeviceType.CUDA if on_gpu else kinds.DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == kind]
    busy = _union([(event.time_range.start, event.time_range.end) for event in events]) / 1e6
    steps = max(plain.steps, 1)
    if not events:
        session.figure(f"{name}, kernels a step", None, "", note="the profiler saw none")
        return
    aim = 230.0 if name.endswith("streams") else None
    session.figure(
        f"{name}, kernels a step", len(events) / steps, "", aim=aim, at_most=True,
        note=f"{plain.seconds / steps * 1e3:.3f} ms a step, GPU busy {busy / steps * 1e3:.3f} ms = "
        f"{busy / plain.seconds:.0%}, {busy / seconds:.0%} of the profiled run",
    )  # fmt: skip
    by: dict[str, list[float]] = {}
    for event in events:
        by.setdefault(event.name[:_WIDTH], []).append(event.time_range.elapsed_us())
    for kernel, times in sorted(by.items(), key=lambda found: -sum(found[1]))[:_SHOWN]:
        each = sum(times) / len(times)
        session.line(f"{sum(times) / steps:9.1f} us a step, {len(times) / steps:6.1f} x {each:7.1f} us  {kernel}")


def _union(spans: list[tuple[float, float]]) -> float:
    """Time in which at least one of the spans was going on."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        if until > end:
            total += until - max(begin, end)
            end = until
    return total

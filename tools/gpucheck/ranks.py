"""One model over two GPUs (`tensor_parallel=2`): outputs, log-probabilities, and its speed beside that of one GPU."""

from __future__ import annotations

from functools import partial

import torch

from tools.gpucheck.families import families
from tools.gpucheck.greedy import check_family, small_engine
from tools.gpucheck.modes import PLAIN, Bench
from tools.gpucheck.report import Skipped
from tools.gpucheck.session import Session
from tools.gpucheck.shapes import LARGE, TINY
from tools.gpucheck.workloads import burst

SIZE = 2
_FAMILIES = ("llama", "gemma2", "qwen3_moe")
_WAYS = {"one GPU": (1, False), "one GPU with graphs": (1, True), "two GPUs": (SIZE, False)}


def run(session: Session) -> None:
    if session.device.type == "cuda" and ((count := torch.cuda.device_count()) < SIZE or session.device.index):
        raise Skipped(f"needs {SIZE} GPUs, from cuda:0 on; visible here: {count}, and it is {session.device}")
    want = 24 if session.settings.quick else 48
    for family in (each for each in families() if each.name in _FAMILIES):
        for dtype in ("float32", "bfloat16"):
            work = partial(check_family, session, family, dtype, want, tensor_parallel=SIZE)
            session.check(f"{family.name}, {dtype}, against transformers", work)
    bench = Bench(session)
    for kind in bench.kinds:
        session.check(f"{kind}, against one GPU", partial(against_one, bench, kind))
    session.check("speed", partial(speed, session))


async def against_one(bench: Bench, kind: str) -> str:
    asks = bench.kinds[kind]
    expected = await bench.answers(PLAIN, asks)
    return await bench.held_against({**PLAIN, "tensor_parallel": SIZE}, asks, expected)


async def speed(session: Session) -> str:
    """Tokens per second of a random model of 8 billion parameters, in 1 and in 16 streams."""
    on_gpu = session.device.type == "cuda"
    shape, tokens, memory = (LARGE, 128, "4GiB") if on_gpu else (TINY[LARGE.name], 8, "64MiB")
    folder = shape.write(session.folder / "ranks-speed")
    for name, (size, graphs) in _WAYS.items():
        async with small_engine(
            session.settings, folder, dtype="bfloat16", load_format="dummy", kv_cache_memory=memory,
            max_num_batched_tokens=1024, tensor_parallel=size, cuda_graphs=graphs,
        ) as engine:  # fmt: skip
            for count in (1, 16):
                lengths = [(tokens, tokens)] * count
                await burst(engine, lengths, session.settings.seed)
                took = await burst(engine, lengths, session.settings.seed + 1)
                label = f"{shape.name}, {name}, {count} x {tokens}/{tokens}"
                session.figure(label, took.rate, "tokens/s", note=str(took))
    return f"{len(_WAYS)} ways"

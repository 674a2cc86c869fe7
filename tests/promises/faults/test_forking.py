"""A fork of a process with an engine: every use in the child is refused at once, nothing hangs or dies, and the parent
serves on. A fork of a process that has only imported things loads engines of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

if not hasattr(os, "fork"):
    pytest.skip("needs fork", allow_module_level=True)

COMMON = """
import asyncio, multiprocessing, os, select, sys, threading
from asyncengine import AsyncEngine, Engine, SamplingParams, WrongProcess, shared_engine

SMALL = {"num_threads": 1, "kv_cache_memory": "4MiB", "show_progress": False}
PARAMS = SamplingParams(max_tokens=4, temperature=0)

def in_child(work, seconds=60):
    \"\"\"What `work` gave in a forked child, as text; the child is killed if it takes longer.\"\"\"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    if not select.select([read], [], [], seconds)[0]:
        os.kill(pid, 9)
    said = os.read(read, 10000).decode() or "hung or died"
    os.close(read)
    os.waitpid(pid, 0)
    return said

def refused(work):
    said = in_child(work)
    assert said.startswith("WrongProcess: ") and "spawn" in said, said
"""

FAKES = (
    COMMON
    + """
from support.fake_engine import executor_of, greedy, make_engine
long = greedy(400, ignore_eos=True)

untouched, shared = make_engine(hosted=True), shared_engine("demo")
owned = make_engine()

async def main():
    await owned.start()
    stream = owned.stream([2, 3], long)
    await anext(stream)
    refused(lambda: Engine(owned).generate([2, 3], greedy(2)))
    async def read():
        return [chunk async for chunk in stream]
    def on_own_loop(work):
        loop = asyncio.new_event_loop()
        return loop.run_until_complete(work())
    refused(lambda: on_own_loop(read))
    refused(lambda: on_own_loop(stream.result))
    assert in_child(lambda: on_own_loop(owned.aclose)) == "None"
    assert len((await stream.result()).token_ids) == 400  # the parent's engine serves on
    await owned.aclose()

asyncio.run(main())
with Engine(make_engine(hosted=True, pages=2000)) as engine:
    engine.aengine.start_blocking()
    stream = engine.stream([2, 3], greedy(7000, ignore_eos=True))
    next(stream)
    executor_of(engine.aengine).hold()
    refused(lambda: list(stream))
    refused(stream.result)
    refused(lambda: engine.generate([2, 3], greedy(2)))
    refused(engine.stats)
    refused(lambda: engine.load_adapter("name", "path"))
    refused(lambda: asyncio.run(engine.aengine.start()))
    assert in_child(lambda: engine.aengine.alive) == "False"
    assert in_child(engine.close) == "None"
    assert in_child(lambda: asyncio.run(engine.aengine.aclose())) == "None"
    assert in_child(stream.close) == "None"
    assert in_child(lambda: sys.exit(0)) == "SystemExit: 0"
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: sys.exit(7))  # a multiprocessing child ends as it likes
    child.start(); child.join(120)
    assert child.exitcode == 7, child.exitcode
    pid = os.fork()
    if pid == 0:
        sys.exit(5)  # the interpreter's whole way out, with an engine that nobody closed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    executor_of(engine.aengine).release()
    stream.close()
    assert len(engine.generate([2, 3], greedy(2)).token_ids) == 2
# made before the fork, and not started by then: the child may start it
def start():
    untouched.start_blocking()
    done = Engine(untouched).generate([2, 3], greedy(2))
    untouched.close_blocking()
    return len(done.token_ids)
assert in_child(start) == "2"
"""
)

REAL = (
    COMMON
    + """
handle = shared_engine("demo", **SMALL)
import torch
square = torch.randn(600, 600)
(square @ square).sum()  # a program that has used torch, but loaded no engine
import asyncengine.execution.models.loading, transformers

def answer():
    return handle.get().generate("Once upon", PARAMS).text

there = in_child(answer)
assert answer() == there  # here: from now on forks are refused
refused(answer)
refused(lambda: Engine.from_pretrained("demo"))
refused(lambda: asyncio.run(AsyncEngine.from_pretrained("demo", **SMALL)))
refused(lambda: asyncio.run(handle.aget()))
assert in_child(lambda: handle.loaded) == "False"
assert in_child(handle.close) == "None"
assert answer() == there
handle.close()
refused(lambda: Engine.from_pretrained("demo"))  # closing it does not bring back what a fork needs
"""
)


@pytest.mark.parametrize("program", [FAKES, REAL], ids=["running engines", "loading"])
def test_in_a_forked_child(program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr

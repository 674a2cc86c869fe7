"""Programs that end while their engine is at work, in whatever state: at once, with the right status, and nothing is
left of them: no process, no shared memory, no temporary file, no lock."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from support.forked import Forked
from support.long import LONG, TIMES, by_turns

from asyncengine.kernels.cache_folder import VARIABLE

if sys.platform != "linux":
    pytest.skip("forks, and looks into /proc", allow_module_level=True)

LIMIT = 5.0
"""Seconds from the ending to the end."""
ATTEMPTS = 3
"""A busy machine may hold up one program; what waits for something holds up each."""
STATES = ("loading", "compiling a kernel", "compiling a grammar", "generating", "asleep", "profiling", "saving")
ENDINGS = ("return", "exception", "SIGINT", "SIGTERM")
HOSTINGS = ("owned", "hosted", "blocking")

COMMON = """
import asyncio, glob, os, signal, sys, threading, time
from asyncengine import AsyncEngine, Engine, SamplingParams
from asyncengine.grammar import Grammar

state, ending, hosting, closes, folder = sys.argv[1:]
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
LONG = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
SLOW = SamplingParams(max_tokens=40, grammar=Grammar.json_schema({"enum": [f"v{i}" for i in range(60_000)]}))
SETTINGS = {"num_threads": 1, "kv_cache_memory": "16MiB", "show_progress": False}
if hosting != "blocking":
    SETTINGS["hosted"] = hosting == "hosted"
if state == "saving":
    SETTINGS["kv_cache_dir"] = folder
MARK = {
    "compiling a kernel": lambda: glob.glob(os.environ.get("ASYNCENGINE_CACHE", "") + "/kernels/*/*"),
    "loading": lambda: runs("start"), "compiling a grammar": lambda: runs("grammar"),
}

def runs(what):
    return any(each.name.startswith("asyncengine-" + what) for each in threading.enumerate())

def say():
    os.write(1, b"!")
    if ending == "exception":
        raise RuntimeError("the user's own")
"""

ASYNC = """
async def load():
    return await AsyncEngine.from_pretrained("demo", **SETTINGS)

async def reach():
    if state in ("loading", "compiling a kernel"):
        return asyncio.create_task(load())
    engine = await load()
    if closes == "closes":
        await stack.enter_async_context(engine)
    if state == "compiling a grammar":
        return engine, asyncio.create_task(engine.generate("x", SLOW))
    if state == "generating":
        stream = engine.stream("x", LONG)
        await anext(stream)
        return engine, stream
    if state == "asleep":
        await engine.sleep()
    if state == "profiling":
        task = asyncio.create_task(engine.profile(folder))
        await asyncio.sleep(0.1)
        return engine, task
    if state == "saving":
        await engine.generate([7] * 600, SamplingParams(max_tokens=1))
    return engine

async def main():
    global stack
    from contextlib import AsyncExitStack
    async with AsyncExitStack() as stack:
        kept = await reach()
        while not MARK.get(state, lambda: True)():
            await asyncio.sleep(0.005)
        say()
        if ending.startswith("SIG"):
            await asyncio.sleep(60)

asyncio.run(main())
sys.exit(0)
"""

BLOCKING = """
from contextlib import ExitStack, suppress
from asyncengine import EngineClosed
reached = threading.Event()

def work():
    global stack
    with suppress(EngineClosed), ExitStack() as stack:
        engine = Engine.from_pretrained("demo", **SETTINGS)
        if closes == "closes":
            stack.enter_context(engine)
        if state == "generating":
            stream = engine.stream("x", LONG)
            next(stream)
        if state == "asleep":
            engine.sleep()
        if state == "saving":
            engine.generate([7] * 600, SamplingParams(max_tokens=1))
        reached.set()
        if state == "compiling a grammar":
            engine.generate("x", SLOW)
        if state == "generating":
            stream.result()
        if state == "profiling":
            engine.profile(folder)
        while True:  # a signal that comes just before a sleep does not end it
            time.sleep(0.05)

def mark():
    if state not in ("loading", "compiling a kernel"):
        reached.wait()
    while not MARK.get(state, lambda: True)():
        time.sleep(0.005)
    if state == "profiling":
        time.sleep(0.1)
    say()

def start(target):
    threading.Thread(target=target, daemon=True).start()

if ending.startswith("SIG"):
    start(mark)
    work()
else:
    start(work)
    mark()
sys.exit(0)
"""


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    before = {*os.listdir("/dev/shm")}
    yield
    assert not [name for name in {*os.listdir("/dev/shm")} - before if "asyncengine" in name]


def session(pid: int) -> list[str]:
    """The processes of a session, by what they are."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[3]) == pid and after_name[0] != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def ended(code: str, arguments: tuple[str, ...], sent: int) -> tuple[int, str, float]:
    """The status of a program that was ended in a state, what it said on stderr, and the seconds that its end took."""
    with tempfile.TemporaryFile() as errors:
        program = Forked(code, arguments, errors.fileno())
        with program.stdout, open(os.pidfd_open(program.pid), "rb") as life:
            if not (select.select([program.stdout], [], [], 60)[0] and program.stdout.read(1)):
                os.kill(program.pid, signal.SIGABRT)  # the status says so
            began = time.monotonic()
            if sent:
                os.kill(program.pid, sent)
            if not select.select([life], [], [], 60)[0]:
                os.killpg(program.pid, signal.SIGABRT)
        status = program.wait()
        while session(program.pid) and time.monotonic() < began + 60:
            time.sleep(0.02)
        took = time.monotonic() - began
        errors.seek(0)
        return status, errors.read().decode(), took


CASES = [*product(STATES, ENDINGS)]
MANNERS = [("hosted", "closes"), ("blocking", "closes"), ("hosted", "forgets"), ("blocking", "forgets")]
"""Beside engines on the program's own loop; a program that "forgets" has its engine closed by nobody."""


def programs() -> Iterator[tuple[str, str, str, str]]:
    """Each state with each ending for engines on the program's loop, and half of them for the others by turns."""
    for (state, ending), closes in by_turns(CASES, ("closes", "forgets", "forgets")):  # so that each ending has both
        yield state, ending, "owned", closes
    for (state, ending), manner in by_turns(CASES if LONG else CASES[1::3] + CASES[2::5], MANNERS):
        yield state, ending, *manner


@pytest.mark.parametrize(("state", "ending", "hosting", "closes"), [*dict.fromkeys(programs())])
def test_a_program_ends_as_it_wishes(
    state: str, ending: str, hosting: str, closes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, kept = tmp_path / "own", tmp_path / "kept"
    own.mkdir()
    kept.mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    if state == "compiling a kernel":
        monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
        monkeypatch.setenv("OMP_NUM_THREADS", "2")  # by other processes
    code = COMMON + (BLOCKING if hosting == "blocking" else ASYNC)
    sent = signal.Signals[ending] if ending.startswith("SIG") else 0
    for _ in range(ATTEMPTS):
        status, said, took = ended(code, (state, ending, hosting, closes, str(kept)), sent)
        if took < LIMIT:
            break
    expected = {"return": 0, "exception": 1, "SIGINT": -signal.SIGINT, "SIGTERM": -signal.SIGTERM}[ending]
    # Python dies of the signal that it was sent only if no other thread has run source by `exec` since it raised the
    # KeyboardInterrupt, as imports do while a model is loading; else it ends with 1 behind the same traceback
    assert status == expected or (state, ending, status) == ("loading", "SIGINT", 1), said
    assert took < LIMIT
    assert not os.listdir(own)
    last = {"exception": "RuntimeError: the user's own", "SIGINT": "KeyboardInterrupt"}.get(ending)
    assert last in said.splitlines() if last else "Traceback" not in said, said  # torch's profiler says things, too
    for lock in kept.glob("**/*.lock"):
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


GIVEN_UP = """
import asyncio, sys
from asyncengine import AsyncEngine

def load():
    return AsyncEngine.from_pretrained("demo", num_threads=1, kv_cache_memory="16MiB", show_progress=False)

async def main():
    async with await load():
        pass
    try:
        await asyncio.wait_for(load(), float(sys.argv[1]))
    except TimeoutError:
        print("given up", file=sys.stderr)

import os; os.setsid(); os.write(1, b"!")
asyncio.run(main())
sys.exit(0)
"""


def test_a_load_that_was_given_up_aborts_no_program() -> None:
    """torch's C++ is entered by a thread that the interpreter's end would take apart: `std::terminate`."""
    told = ""
    for number in range(4 * TIMES):
        status, said, _ = ended(GIVEN_UP, (str(0.02 * 3 ** (number % 4)),), 0)
        assert status == 0, said
        told += said
    assert "given up" in told

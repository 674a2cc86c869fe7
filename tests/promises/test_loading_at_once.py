"""Any number of loads, from any threads and loops, at once: each gives a whole engine and leaves the process as it was.

The bundled model, in a process of its own: what went wrong went wrong only at first imports, and poisoned the process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from support.fake_engine import make_core, until

from asyncengine import AsyncEngine, Engine, EngineConfig
from asyncengine.engine.process import PROCESS, LoadAttempt
from asyncengine.errors import EngineClosed

PROGRAM = """
import asyncio, threading
from asyncengine import AsyncEngine, Engine, SamplingParams, shared_engine

SMALL = {"num_threads": 1, "kv_cache_memory": "4MiB", "show_progress": False}
PARAMS = SamplingParams(max_tokens=5, temperature=0)
answers, failures = [], []

async def load():
    async with await AsyncEngine.from_pretrained("demo", **SMALL) as engine:
        answers.append((await engine.generate("Once upon", PARAMS)).text)

async def several():
    cancelled = asyncio.create_task(AsyncEngine.from_pretrained("demo", **SMALL))
    loads = asyncio.gather(load(), load())
    await asyncio.sleep(0)
    cancelled.cancel()
    await loads
    assert cancelled.cancelled()

def blocking():
    with Engine.from_pretrained("demo", **SMALL) as engine:
        answers.append(engine.generate("Once upon", PARAMS).text)

def shared(seats):
    handle = shared_engine("demo", max_num_seqs=seats, **SMALL)
    answers.append(handle.get().generate("Once upon", PARAMS).text)
    handle.close()

def guarded(work, *arguments):
    together.wait()
    try:
        work(*arguments)
    except BaseException as error:
        failures.append(error)

calls = [(lambda: asyncio.run(several()),), (blocking,), (shared, 3), (shared, 4)]
together = threading.Barrier(len(calls))
threads = [threading.Thread(target=guarded, args=call) for call in calls]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
assert len(answers) == 5 and len(set(answers)) == 1, answers
blocking()

import sys, torch
assert torch.get_default_dtype() is torch.float32
assert "transformers.modeling_utils" not in sys.modules  # so that none of its models can be left changed
assert torch.nn.init.normal_.__module__ == "torch.nn.init"
"""


def test_loads_from_many_threads_and_loops_at_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


class Rooms:
    """Loads that take turns: how many are inside, and were at most; each waits for `go`."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.order: list[int] = []
        self.go = threading.Event()

    def load(self, number: int, attempt: LoadAttempt) -> None:
        with PROCESS.turn(attempt):
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.order.append(number)
            self.go.wait(120)
            self.inside -= 1


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    """Stands for what `load_frontend` does in its turn."""
    rooms = Rooms()

    def load(model: str, config: EngineConfig, attempt: LoadAttempt):
        rooms.load(int(model), attempt)
        if model == "13":
            raise OSError("broken")
        return make_core()

    monkeypatch.setattr("asyncengine.assembly.wiring.load_frontend", load)
    return rooms


def in_line() -> int:
    """Loads that wait for their turn or have it."""
    return len(PROCESS.line)


async def begun(rooms: Rooms, number: int) -> asyncio.Task[AsyncEngine]:
    """A load that is in line now."""
    waiting = in_line()
    task = asyncio.create_task(AsyncEngine.from_pretrained(str(number)))
    await until(lambda: in_line() == waiting + 1)
    return task


async def test_loads_take_turns_first_come_first_served_and_the_loop_runs_on(rooms: Rooms):
    loads = [await begun(rooms, number) for number in (0, 13, 2, 3)]
    ticks = 0
    for _ in range(20):
        await asyncio.sleep(0)
        ticks += 1
    rooms.go.set()
    engines = await asyncio.gather(*loads, return_exceptions=True)
    assert isinstance(engines.pop(1), OSError)  # and those behind it load all the same
    assert (rooms.order, rooms.most, ticks) == ([0, 13, 2, 3], 1, 20)
    for engine in engines:
        assert isinstance(engine, AsyncEngine)
        await engine.aclose()


async def test_a_cancelled_load_leaves_the_line_or_what_it_loaded(rooms: Rooms):
    first, second, third = [await begun(rooms, number) for number in (1, 2, 3)]
    second.cancel()
    await asyncio.wait([second])
    await until(lambda: in_line() == 2)
    first.cancel()  # in the middle of its load: it cannot be stopped there, and nobody waits for it
    await asyncio.wait([first])
    rooms.go.set()
    engine = await third
    assert rooms.order == [1, 3]
    await engine.aclose()
    await until(lambda: not in_line())


async def test_closing_while_in_line_leaves_it(rooms: Rooms):
    first = await begun(rooms, 1)
    attempt = LoadAttempt()
    engine = AsyncEngine(lambda: rooms.load(2, attempt) or make_core(), attempt=attempt)
    start = asyncio.create_task(engine.start())
    await until(lambda: in_line() == 2)
    await engine.aclose()
    with pytest.raises(EngineClosed, match="while it loaded"):
        await start
    rooms.go.set()
    await (await first).aclose()
    assert rooms.order == [1]


async def test_a_start_left_by_one_goes_on_for_the_next(rooms: Rooms):
    engine = AsyncEngine(lambda: rooms.load(1, LoadAttempt()) or make_core())
    left = asyncio.create_task(engine.start())
    await until(lambda: bool(in_line()))
    left.cancel()
    await asyncio.wait([left])
    rooms.go.set()
    await engine.start()
    assert rooms.order == [1]
    await engine.aclose()


def test_a_load_that_is_given_up_ends_at_its_next_stage():
    """The real model is loaded: nothing of the load is left behind, and the next one is whole."""
    attempt = LoadAttempt()
    stages: list[str] = []

    def give_up(text: str) -> None:
        stages.append(text)
        attempt.give_up()

    from asyncengine.assembly.wiring import load_frontend
    from asyncengine.execution.models.progress import LoadProgress

    with pytest.MonkeyPatch.context() as patch:
        stage = LoadProgress.stage
        patch.setattr(LoadProgress, "stage", lambda self, text, total=None: (give_up(text), stage(self, text, total)))
        with pytest.raises(EngineClosed, match="while it loaded"):
            load_frontend("demo", EngineConfig(num_threads=1, kv_cache_memory="4MiB"), attempt)
    assert len(stages) == 1
    with Engine.from_pretrained("demo", num_threads=1, kv_cache_memory="4MiB") as engine:
        assert engine.generate("Hello").token_ids

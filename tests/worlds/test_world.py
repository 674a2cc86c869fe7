"""The production engine in a simulated world (contract lines 1-4, 6, 8-12, 15, 20): would the world notice a bug?

`ASYNCENGINE_LONG=400` lives 3,200 lives; in `tests`, `python -m worlds.world --seeds 5000` so many.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.long import LONG, TIMES
from worlds.plants import Bug, bugs
from worlds.world.__main__ import main
from worlds.world.life import Life
from worlds.world.plan import make_plan
from worlds.world.search import Finding, explore, live, shrink

from asyncengine import AsyncEngine
from asyncengine.engine import inbox, mailbox
from asyncengine.engine.inbox import Inbox
from asyncengine.engine.mailbox import Mailbox
from asyncengine.testing.world import Stuck, World, simulate

LIVES = 8 * TIMES
ROOT = Path(__file__).resolve().parents[2]


def test_lives_go_right() -> None:
    total = explore(range(LIVES))
    assert total.lives == LIVES
    assert total.calls > 5 * LIVES
    assert total.virtual_seconds > 300 * LIVES


def test_a_seed_is_one_run_in_any_process() -> None:
    """The process may have done anything before, and hash its strings in any way."""
    probe = (
        "from worlds.world.life import Life; from worlds.world.plan import make_plan\n"
        "for seed in (3, 5, 8): life = Life(make_plan(seed)); life.run(); print(life.world.digest, life.world.ticks)"
    )
    hashing = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", probe]
    there = subprocess.run(command, env={**os.environ, **hashing}, capture_output=True, check=True)
    here = []
    for seed in (3, 5, 8):
        life = Life(make_plan(seed))
        life.run()
        here.append(f"{life.world.digest} {life.world.ticks}")
    assert there.stdout.decode().splitlines() == here
    other = Life(make_plan(3), order=1)
    other.run()
    assert f"{other.world.digest} {other.world.ticks}" != here[0]


# ---------------------------------------------------------------- planted bugs


WAKEUPS, (PAGES,) = bugs("wakeups"), bugs("pages of a world")
IN_FLIGHT = "a step in flight names"


@pytest.mark.skipif(not LONG, reason="a wakeup takes hundreds; pages are in the last of these tests")
@pytest.mark.parametrize(("bug", "said"), [*((bug, "stuck") for bug in WAKEUPS), (PAGES, IN_FLIGHT)])
def test_lives_find(bug: Bug, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within a minute; a wakeup is lost in one of some hundred lives."""
    bug.plant(monkeypatch)
    finding = next(filter(None, (live(make_plan(seed)) for seed in range(max(40, LIVES)))), None)
    assert finding is not None, "nobody noticed"
    assert said in finding.problem
    monkeypatch.undo()
    assert live(finding.plan, finding.order) is None, "it was another bug"


def read_a_mailbox(world: World, blocking: bool) -> None:
    """One thread puts tokens, another reads them: few, as a wakeup that is lost matters for the last one only."""
    box, count = Mailbox(), 2

    def put_each() -> None:
        for token in range(count):
            waiter = box.put_token("a", token, 0)
            if waiter is not None:
                mailbox.wake_all([waiter])

    async def read() -> None:
        found = 0
        while found < count:
            found += sum(len(chunk.token_ids) for chunk in await box.receive())

    world.spawn(put_each, "engine")
    if not blocking:
        return asyncio.run(read())
    found = 0
    while found < count:
        found += sum(len(chunk.token_ids) for chunk in box.receive_blocking())
    return None


def read_as_a_task(world: World) -> None:
    read_a_mailbox(world, blocking=False)


def read_as_a_thread(world: World) -> None:
    read_a_mailbox(world, blocking=True)


def read_an_inbox(world: World) -> None:
    """The same of messages to an engine."""
    box, count = Inbox[int](), 2

    def post_each() -> None:
        for number in range(count):
            box.post(number)

    async def read() -> None:
        found = 0
        while found < count:
            found += len(box.take())
            if found < count:
                await box.wait()

    world.spawn(post_each, "caller")
    asyncio.run(read())


READERS = (read_as_a_task, read_as_a_thread, read_an_inbox)


@pytest.mark.parametrize(("bug", "work"), [*zip(WAKEUPS, READERS, strict=True)])
def test_a_small_world_finds(bug: Bug, work: Callable[[World], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(seed: int) -> bool:
        world = World(seed, switching=0.5)
        world.interrupt_lines_of([mailbox.__file__, inbox.__file__, __file__], 0.5)
        try:
            simulate(world, lambda: work(world), shuffled=True)
        except Stuck:
            return True
        return False

    assert not any(map(stuck, range(100)))
    bug.plant(monkeypatch)
    assert any(map(stuck, range(300))), "nobody noticed"


def test_a_finding_is_made_small_and_lives_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PAGES.plant(monkeypatch)
    finding = next(filter(None, map(live, map(make_plan, (16, *range(40))))))  # the first shows it, to be quick
    assert IN_FLIGHT in finding.problem
    small = shrink(finding, most=12)
    assert len(small.plan.calls) < len(finding.plan.calls)
    assert len(small.plan.faults) <= len(finding.plan.faults)
    arguments = small.replay.split("worlds.world ", 1)[1].split()
    assert main(arguments) == 1
    again = Finding(small.plan, small.order, small.problem)
    assert str(again) in capsys.readouterr().out
    monkeypatch.undo()
    assert main(arguments) == 0


# ---------------------------------------------------------------- the world itself


def in_world(work: Callable[[World], object], seed: int = 1, **settings: float) -> World:
    world = World(seed, **settings)
    simulate(world, lambda: work(world), shuffled=True, delay=1.0)
    return world


def test_a_deadlock_names_who_waits() -> None:
    def work(world: World) -> None:
        one, two = mailbox.threading.Lock(), mailbox.threading.Lock()

        def take(first: Any, second: Any) -> None:
            with first:
                world.sleep(1)
                with second:
                    pass

        for order in ((one, two), (two, one)):
            mailbox.threading.Thread(target=take, args=order, name="taker").start()
        world.wait_until(lambda: False)

    with pytest.raises(Stuck, match=r"wait for each other[\s\S]*taker: [\s\S]*taker: "):
        in_world(work)


def test_an_hour_in_which_nothing_happens_is_one_jump() -> None:
    world = in_world(lambda world: world.sleep(3600.0))
    assert (world.now, world.ticks) == (3600.0, world.ticks)
    assert world.switches == 0


def test_threads_outside_of_the_world_have_real_things() -> None:
    found: list[object] = []

    def outside() -> None:
        found.extend([mailbox.threading.Event(), mailbox.threading.get_ident() == threading.get_ident()])

    def work(world: World) -> None:
        inside = mailbox.threading.Event()
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
        found.append(inside)

    in_world(work)
    assert isinstance(found[0], threading.Event)
    assert found[1] is True
    assert not isinstance(found[2], threading.Event)
    assert mailbox.threading is threading


def test_what_nobody_handles_is_noted() -> None:
    async def fail() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    world = in_world(lambda world: asyncio.run(fail()))
    assert "ZeroDivisionError" in "".join(world.complaints)
    world = in_world(lambda world: (world.spawn(lambda: 1 / 0, "broken"), world.sleep(1)))
    assert "thread broken" in world.complaints[0]


def test_queues_and_timeouts_take_the_world_s_time() -> None:
    def work(world: World) -> None:
        made = sys.modules["asyncengine.engine.device_thread"].queue.SimpleQueue()
        with pytest.raises(queue.Empty):
            made.get(timeout=5.0)
        assert world.now >= 5.0
        assert not mailbox.threading.Event().wait(7.0)
        assert world.now >= 12.0
        mailbox.threading.Thread(target=lambda: made.put("there"), name="putter").start()
        assert made.get() == "there"

    in_world(work, stalling=0.2)


def test_engines_say_where_threads_and_time_come_from() -> None:
    """Engines name the three modules that a world exchanges: nothing of them is imported by itself."""
    wrong = re.compile(r"^\s*(from (threading|queue|time) import|import (threading|queue|time) as)", re.MULTILINE)
    folders = [ROOT / folder for folder in ("asyncengine", "grammar", "lora", "integrations")]
    assert not [path for folder in folders for path in folder.rglob("*.py") if wrong.search(path.read_text("utf-8"))]


def test_what_is_first_asked_for_in_a_world_has_its_threads() -> None:
    """The root imports its names when they are asked for."""
    probe = (
        "import threading; from asyncengine.testing.world import World, simulate\n"
        "def work(): from asyncengine import shared; print(shared.threading is threading)\n"
        "simulate(World(0), work)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_an_engine_can_be_simulated_by_hand() -> None:
    """There is no plan: an application's test would do the same."""
    from support.fake_engine import GREEDY, make_core

    from asyncengine.testing import FakeExecutor

    def work(world: World) -> None:
        class Slow(FakeExecutor):
            def execute(self, batch: Any) -> Any:
                world.sleep(10.0)
                return super().execute(batch)

        async def ask() -> list[int]:
            engine = AsyncEngine(lambda: make_core(Slow(64, 4)), hosted=True)
            async with engine:
                return (await engine.generate([5, 6], GREEDY.replace(max_tokens=30, seed=0))).token_ids

        assert asyncio.run(ask()) == FakeExecutor().model.oracle([5, 6], 30, 0, (1,))

    assert in_world(work).now >= 290.0

"""Leaving costs nothing: whatever way a consumer goes, everything is back within three steps (contract 2)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading

import anyio
import pytest
from support.fake_engine import PATIENCE, executor_of, greedy, idle, in_thread, make_engine, num_in_line, oracle, until

from asyncengine import AsyncEngine, Completion, TokenStream
from asyncengine.events import StepDone
from asyncengine.options import RequestOptions
from asyncengine.testing.leaks import assert_nothing_held

HOSTINGS = [pytest.param(False, id="owned"), pytest.param(True, id="hosted")]
LONG = greedy(300, ignore_eos=True)


@pytest.fixture(autouse=True)
def only_ours_is_collected() -> None:
    """A dropped stream may be of any generation by then; the modules' objects need not be looked at each time."""
    gc.collect()
    gc.freeze()


async def leave_by_cancel(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    task = asyncio.create_task(engine.generate(prompt, LONG))
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def read(stream: TokenStream, chunks: int) -> bool:
    """Reads some chunks. False: a starved reader gets all there is in fewer, and nothing is left to leave."""
    for _ in range(chunks):
        try:
            await anext(stream)
        except StopAsyncIteration:
            return False
    return True


def assert_left(completion: Completion) -> None:
    """It was aborted, unless a starved reader came to it after its last token."""
    assert completion.finish_reason == ("length" if len(completion.token_ids) == LONG.max_tokens else "abort")


async def leave_by_break(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    async for _ in engine.stream(prompt, LONG):
        after -= 1
        if after <= 0:
            break


async def leave_by_aclose(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    stream = engine.stream(prompt, LONG)
    await read(stream, after)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_stream_abort(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    async with engine.stream(prompt, LONG) as stream:
        if not await read(stream, after):
            return
        stream.abort()
        stream.abort()
        result = await stream.result()
        assert_left(result)
        assert result.token_ids == oracle(engine, prompt, 300)[: len(result.token_ids)]


async def leave_by_label(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    label = f"job-{prompt}"
    async with engine.stream(prompt, LONG, request_id=label) as stream:
        if await read(stream, after) and engine.abort(label):  # False: it has just ended
            assert_left(await stream.result())


async def leave_by_garbage(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    stream = engine.stream(prompt, LONG)
    await read(stream, max(1, after))
    cycle = [stream]
    cycle.append(cycle)  # type: ignore[arg-type]


async def leave_by_timeout_scope(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after / 2000):
            await engine.generate(prompt, LONG)


async def leave_by_anyio_scope(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    with anyio.CancelScope() as scope:
        async with engine.stream(prompt, LONG) as stream:
            async for _ in stream:
                after -= 1
                if after <= 0:
                    scope.cancel()


WAYS = [
    leave_by_cancel, leave_by_break, leave_by_aclose, leave_by_stream_abort, leave_by_label, leave_by_garbage,
    leave_by_timeout_scope, leave_by_anyio_scope,
]  # fmt: skip


@pytest.mark.parametrize("hosted", HOSTINGS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_everything_is_back_within_three_steps(hosted: bool, way):
    async with make_engine(hosted=hosted, pages=600) as engine:
        for after in range(6):
            await way(engine, [3, 4, 5 + after], after)
            gc.collect()
            steps = engine.stats().steps
            await idle(engine)
            assert engine.stats().steps - steps <= 3
        assert_nothing_held(engine.core)


def wait_for_readers(engine: AsyncEngine) -> None:
    """Makes a step end only when this loop has turned: no reader is so late that the last token is there before it."""
    loop, turned = asyncio.get_running_loop(), threading.Event()

    def hook(event: object) -> None:
        if isinstance(event, StepDone):
            turned.clear()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(PATIENCE)

    engine.on_event(hook)


@pytest.mark.parametrize(("hosted", "depth"), [(False, 1), (True, 2)], ids=["owned", "hosted"])
async def test_leavers_at_random_points_disturb_nobody(hosted: bool, depth: int):
    rng = random.Random(7)
    async with make_engine(hosted=hosted, pages=300, max_steps_in_flight=depth, max_num_seqs=32) as engine:
        if hosted:  # else it is on this loop, and waits for its readers anyway
            wait_for_readers(engine)

        async def stay(i: int) -> None:
            done = await engine.generate([9, 8, 2 + i], greedy(40))
            assert done.token_ids == oracle(engine, [9, 8, 2 + i], 40)

        async def leave(i: int) -> None:
            await asyncio.sleep(0)
            await rng.choice(WAYS)(engine, [2 + i % 90, 3, 4], rng.randrange(8))

        for _ in range(3):  # waves, so that leavers meet every state: waiting, prefilling, decoding
            await asyncio.gather(*(leave(i) for i in range(84)), *(stay(i) for i in range(10)))
        gc.collect()
        await idle(engine)
        assert_nothing_held(engine.core)
        assert engine.stats().finished["abort"] > 100  # about 200; some leave before they have asked


async def test_leaving_never_awaits():
    """Inside a cancelled scope an await in a cleanup raises again; so there is none."""
    async with make_engine() as engine:
        stream = engine.stream([2, 3], LONG)
        await anext(stream)
        with pytest.raises(StopIteration):
            stream.aclose().send(None)
        other = engine.stream([2, 3], LONG)
        await anext(other)
        with pytest.raises(StopIteration):
            other.__aexit__(None, None, None).send(None)
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_an_id_reused_at_once_gets_only_its_own_tokens():
    """The ticket rule: outputs are keyed by a ticket that is never reused; the id is a label."""
    async with make_engine(max_steps_in_flight=2) as engine:
        for i in range(40):
            stream = engine.stream([50, 2 + i], LONG, request_id="same")
            await anext(stream)
            await stream.aclose()
            done = await engine.generate([3, 2 + i], greedy(5), request_id="same")
            assert done.token_ids == oracle(engine, [3, 2 + i], 5)
            assert done.request_id == "same"


async def test_abort_by_label_is_exact_and_idempotent_and_from_any_thread():
    async with make_engine() as engine:
        executor_of(engine).hold(after=3)
        one = engine.stream([2, 3], LONG, request_id="job-1")
        ten = engine.stream([4, 5], greedy(60), request_id="job-10")
        await anext(one)
        await anext(ten)
        assert await in_thread(lambda: engine.abort("job-1"))
        executor_of(engine).release()
        assert (await one.result()).finish_reason == "abort"
        assert not engine.abort("job-1")
        assert not engine.abort("job")
        assert not engine.abort("nobody")
        assert (await ten.result()).token_ids == oracle(engine, [4, 5], 60)


async def test_a_request_can_be_aborted_as_soon_as_it_is_posted_even_out_of_order():
    """Tickets are drawn before the queue is entered, so a later one may be opened first."""
    async with make_engine() as engine:
        core = engine.core
        early = core.prepare([2, 3], LONG, RequestOptions(request_id="early"))
        async with engine.stream([4, 5], LONG) as later:
            await anext(later)
            core.loop.queue_limit.enter(1, 2)
            assembler = core.post(early)
            assert engine.abort("early")
            chunks = await assembler.prepared.mailbox.receive()
            assert chunks[-1].finish_reason == "abort"


async def test_aborting_all_samples_of_a_request():
    async with make_engine() as engine:
        stream = engine.stream([2, 3], LONG.replace(n=3), request_id="x")
        await anext(stream)
        assert engine.abort("x")
        result = await stream.result()
        assert [s.finish_reason for s in result.samples] == ["abort"] * 3
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_a_stream_left_while_it_waits_for_a_place_never_runs():
    async with make_engine(max_queued_requests=1, when_full="wait", max_num_seqs=1) as engine:
        executor = executor_of(engine)
        executor.hold()
        running, queued = engine.stream([2, 3], greedy(3)), engine.stream([4, 5], greedy(3))
        await running.__aenter__()
        await in_thread(executor.entered.wait)
        await queued.__aenter__()
        left = engine.stream([6, 7], LONG)
        reading = asyncio.create_task(left.result())
        await until(lambda: bool(num_in_line(engine)))
        left.abort()
        executor.release()
        assert (await reading).finish_reason == "abort"
        await running.result()
        await queued.result()
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_ids_of_ended_requests_do_not_pile_up():
    async with make_engine() as engine:
        for i in range(400):
            await engine.generate([2 + i % 90], greedy(1), request_id=str(i))
        delivery = engine.core.loop.delivery
        assert not delivery.expected
        assert not delivery.streams
        assert not engine.abort("2")


async def test_a_dropped_stream_may_be_collected_while_its_thread_posts():
    """A finalizer runs wherever an allocation happens, so also while the inbox's own lock is held."""
    async with make_engine() as engine:
        inbox = engine.core.loop.inbox
        stream = engine.stream([2, 3], LONG)
        await anext(stream)

        def post_while_locked() -> None:
            nonlocal stream
            with inbox._lock:
                del stream

        worker = threading.Thread(target=post_while_locked, daemon=True)
        worker.start()
        await in_thread(lambda: worker.join(120))
        assert not worker.is_alive(), "the finalizer waits for the lock its own thread holds"
        await idle(engine)
        assert_nothing_held(engine.core)

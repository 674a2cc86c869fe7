"""The inbox of an engine's loop: nothing that is posted is waited for in vain, lost, or taken twice."""

from __future__ import annotations

import asyncio

from asyncengine.engine.inbox import Inbox


async def test_what_was_posted_before_the_reader_waits_is_not_waited_for() -> None:
    """The post comes between the reader's look and its wait: it finds nobody to wake then."""
    inbox: Inbox[int] = Inbox()
    assert inbox.take() == []
    assert inbox.post(1, 2)
    await asyncio.wait_for(inbox.wait(), 30)
    assert inbox.take() == [1, 2]
    assert inbox.take() == []


async def test_a_closed_inbox_is_not_waited_for_and_hands_back_what_nobody_took() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.post(1)
    assert inbox.close() == [1]
    await asyncio.wait_for(inbox.wait(), 30)
    assert not inbox.post(2)
    assert inbox.take() == inbox.close() == []


async def test_a_post_of_any_thread_wakes_the_reader_and_a_wait_ends_by_its_timeout() -> None:
    inbox: Inbox[int] = Inbox()
    await asyncio.wait_for(inbox.wait(0.001), 30)
    for post in (inbox.post, lambda item: asyncio.get_running_loop().run_in_executor(None, inbox.post, item)):
        waiting = asyncio.create_task(inbox.wait())
        await asyncio.sleep(0)
        post(3)
        await asyncio.wait_for(waiting, 10)
        assert inbox.take() == [3]

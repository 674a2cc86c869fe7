"""Many requests, a limited number at a time: each result comes as soon as it is there, and only running rows are
held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from asyncengine.checks import as_integer
from asyncengine.errors import InvalidParameter

if TYPE_CHECKING:
    from asyncengine.async_engine import AsyncEngine
    from asyncengine.outputs import Completion

Item = TypeVar("Item")
Result = TypeVar("Result")


async def as_completed(
    items: Iterable[Item], run: Callable[[Item], Awaitable[Result]], most: int
) -> AsyncGenerator[tuple[Item, Result | Exception], None]:
    """(item, the result of `run` or the error that it raised) in order of completion, `most` at a time. An item is
    taken when there is room for it. Leaving the iterator cancels what runs, and awaits nothing."""
    source, running = iter(items), dict[asyncio.Future[Result], Item]()
    try:
        while True:
            for item in islice(source, most - len(running)):
                running[asyncio.ensure_future(run(item))] = item
            if not running:
                return
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                item, error = running.pop(task), task.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield item, task.result() if error is None else error
    finally:
        for task in running:
            task.cancel()


async def batch(
    engine: AsyncEngine, rows: Iterable[Mapping[str, Any]], *, in_flight: int | None = None
) -> AsyncGenerator[tuple[int, Completion | Exception], None]:
    """Answer many `rows`, of any number: (number of the row, its completion or its error) in order of completion.

    A row has the arguments of `chat` ("messages") or `generate` ("prompt") by name: "params", "adapter", "priority".
    `in_flight`: rows that are submitted at a time, and taken from `rows`; None: as many as the engine runs
    (`max_num_seqs`). Leaving the iterator aborts them. Raises `InvalidParameter`, and gives it for a row that is none.
    """
    if not isinstance(rows, Iterable):
        raise InvalidParameter("rows", "must be an iterable of mappings", rows)
    most = engine.core.config.max_num_seqs if in_flight is None else as_integer("in_flight", in_flight, 1)

    async def run(numbered: tuple[int, Mapping[str, Any]]) -> Completion:
        number, row = numbered
        if not isinstance(row, Mapping) or not row.keys() & {"messages", "prompt"}:
            raise InvalidParameter(f"rows[{number}]", 'must be a mapping with "messages" or "prompt"', row)
        call: Any = engine.chat if "messages" in row else engine.generate
        return await call(**{str(name): value for name, value in row.items()})

    async for (number, _), outcome in as_completed(enumerate(rows), run, most):
        yield number, outcome

"""Engines on a fake runner whose answers depend on what the adapter slots of its device really hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.fake_adapters import FakeLoader, digest_of
from support.fake_engine import SteppedExecutor, greedy, idle, in_thread, make_core, until

from asyncengine import AdapterInfo, AsyncEngine, Engine
from asyncengine.engine.frontend import Frontend
from asyncengine.lora.admission import AdapterSlots
from asyncengine.lora.registry import AdapterRegistry
from asyncengine.outputs import Completion
from asyncengine.step import AdapterSwap, Batch, Row, StepResult
from asyncengine.testing import FakeModel
from asyncengine.testing.leaks import assert_nothing_held

EOS = 1


class AdapterExecutor(SteppedExecutor):
    """An executor whose cells in pages, and hence all answers, depend on the content a slot got from the swaps.

    So a swap that was lost, a slot overwritten too early, a row with another's slot and a prefix computed under another
    adapter all change the output. `adapter_oracle` says what is right.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[int, int] = {}
        """Slot -> key of what it holds."""

    def execute(self, batch: Batch) -> StepResult:
        for swap in batch.swaps:
            self.held[swap.slot] = key_of(_digest(swap))
        return super().execute(batch._replace(rows=tuple(self._under_adapter(row) for row in batch.rows)))

    def _under_adapter(self, row: Row) -> Row:
        key = self.key_in_slot(row)
        return row._replace(tokens=[_cell(token, key, self.model) for token in row.tokens]) if key else row

    def key_in_slot(self, row: Row) -> int:
        if not row.adapter_slot:
            return 0
        if row.adapter_slot not in self.held:
            raise AssertionError(f"row {row.spec.ticket} uses adapter slot {row.adapter_slot}, which is empty")
        return self.held[row.adapter_slot]

    def sample(self, index: int, row: Row, result: StepResult) -> None:
        super().sample(index, row, result)
        if result.tokens[index] >= 0:  # the input of the next step, if that is launched before this one is read
            self.last_token[row.slot] = _cell(result.tokens[index], self.key_in_slot(row), self.model)


def _digest(swap: AdapterSwap) -> str:
    """Digest of the adapter that is really copied; a replay copies nothing."""
    return swap.digest if swap.weights is None else str(swap.weights.digest)


def key_of(digest: str) -> int:
    """Number of an adapter's content; 0 is no adapter."""
    return 1 + int(digest[:6], 16) if digest else 0


def _cell(token: int, key: int, model: FakeModel) -> int:
    return token + key * model.vocab_size


def adapter_oracle(
    model: FakeModel,
    prompt: Sequence[int],
    max_tokens: int,
    digest: str = "",
    seed: int = 0,
    stop_ids: Sequence[int] = (EOS,),
    allowed: Sequence[int] = (),
) -> list[int]:
    """The one right output for `prompt` under the adapter of that content; `allowed` ids only, if there are any."""
    key = key_of(digest)
    cells = [_cell(token, key, model) for token in prompt]
    tokens: list[int] = []
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop_ids):
        token = model.next_token(cells, seed)
        while allowed and token not in allowed:  # as the fake runner chooses: upwards, in a circle
            token = (token + 1) % model.vocab_size
        tokens.append(token)
        cells.append(_cell(token, key, model))
    return tokens


def slots_of(core: Frontend) -> AdapterSlots:
    adapters = core.loop.scheduler.roster.slots.adapters
    assert isinstance(adapters, AdapterSlots)
    return adapters


class Lab:
    """One engine, its loader and its registry. Start it with `async with lab.engine`."""

    def __init__(
        self,
        *,
        hosted: bool = False,
        room: int = 4,
        workers: int = 2,
        passes: int = 64,
        pages: int = 128,
        wiring: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.loader = FakeLoader()
        room *= self.loader.nbytes
        self.registry = AdapterRegistry(self.loader, max_bytes=room, workers=workers, max_passes=passes)
        self.executor = AdapterExecutor(pages, settings.setdefault("page_size", 4))
        self._wiring = {**(wiring or {}), "adapters": self.registry}
        self._settings = settings
        self.engine = AsyncEngine(self._build, hosted=hosted)

    def _build(self) -> Frontend:
        return make_core(self.executor, wiring=self._wiring, **self._settings)

    async def load(self, *names: str) -> None:
        """Each from a "file" of its own name, which is its content unless the loader says otherwise."""
        for name in names:
            await self.engine.load_adapter(name, name)

    def expected(self, prompt: Sequence[int], max_tokens: int, content: str | None = None, seed: int = 0) -> list[int]:
        digest = "" if content is None else digest_of(content)
        return adapter_oracle(self.executor.model, prompt, max_tokens, digest, seed)

    def right(self, completion: Completion, prompt: Sequence[int], max_tokens: int, content: str | None = None) -> bool:
        assert completion.finish_reason in ("length", "stop"), completion
        return completion.token_ids == self.expected(prompt, max_tokens, content)

    @property
    def slots(self) -> AdapterSlots:
        return slots_of(self.engine.core)

    @property
    def claims(self) -> int:
        return len(self.registry.claims.by_ticket)

    @property
    def waiting_claims(self) -> int:
        """Claims that wait for memory."""
        return sum(map(len, self.registry.claims.waiting.values()))

    async def settled(self) -> None:
        """Wait until nothing runs or is read: then nothing is claimed, in use or reserved, and memory is as is said."""
        await idle(self.engine)
        loop, store = self.engine.core.loop, self.registry.store
        await until(lambda: not (loop.delivery.streams or loop.queue_limit.waiting), "that everybody is told")
        await until(lambda: not (self.claims or self.registry.reading or store.reserved), "that all is given back")
        assert_nothing_held(self.engine.core)
        self.registry.check()
        self.slots.check()
        assert not self.slots.in_use
        assert (self.claims, self.waiting_claims) == (0, 0)
        assert not store.held
        infos = self.engine.adapters()
        assert all(info.requests == 0 for info in infos)
        known = {info.digest: info.nbytes for info in infos if info.in_memory}
        assert sum(known.values()) == self.registry.counts()["nbytes"]


PROMPT = [5, 6, 7, 8, 9]
ENDLESS = 12_000
"""Tokens that take a fake engine longer than any thread is kept waiting by others. Pages of 64 have room for them."""


class Face(Lab):
    """An engine as one kind of caller sees it: on its own loop, from another one, or from a plain thread."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__(hosted=kind != "owned", **settings)
        self.blocking = Engine(self.engine) if kind == "blocking" else None

    async def load_adapter(self, name: str, path: Any, **options: Any) -> AdapterInfo:
        if (face := self.blocking) is not None:
            info: AdapterInfo = await in_thread(lambda: face.load_adapter(name, path, **options))
            return info
        return await self.engine.load_adapter(name, path, **options)

    async def unload_adapter(self, name: str, **options: Any) -> None:
        if (face := self.blocking) is not None:
            await in_thread(lambda: face.unload_adapter(name, **options))
        else:
            await self.engine.unload_adapter(name, **options)

    def names(self) -> list[str]:
        return [info.name for info in (self.blocking or self.engine).adapters()]

    async def running(self, name: str, max_tokens: int = ENDLESS) -> Any:
        """A request that runs until it is left."""
        stream = self.engine.stream(PROMPT, greedy(max_tokens, ignore_eos=True), adapter=name)
        await anext(stream)
        return stream

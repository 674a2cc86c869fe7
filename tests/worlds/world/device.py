"""A device and a library of grammars that take the world's time, and fail when the plan says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from worlds.world.plan import VOCABULARY, Fault, Setup

from asyncengine.config import EngineConfig
from asyncengine.errors import GrammarError
from asyncengine.grammar.shared_masks import Mask
from asyncengine.grammar.spec import Grammar
from asyncengine.seams import StepHandle
from asyncengine.step import Batch, FinishedStep, StepResult
from asyncengine.testing.fake_runner import FakeExecutor, FakeModel
from asyncengine.testing.world import World

BRIEF = 6
"""Most tokens of a step that an engine's own loop computes."""


class VirtualDevice(FakeExecutor):
    """The fake executor, on a device that computes while others run."""

    def __init__(self, world: World, setup: Setup, faults: Iterable[Fault]) -> None:
        model = FakeModel(eos_every=setup.eos_every)
        super().__init__(setup.num_pages, setup.config.page_size, model, setup.num_states)
        self.world = world
        self.failed: set[str] = set()
        """Labels of requests whose rows were made to fail."""
        self.updates: list[tuple[float, int]] = []
        """(moment, number of the weights), in order."""
        self._setup = setup
        self._faults = deque(sorted(faults, key=lambda fault: fault.at))
        self._due = 0.0

    @property
    def asynchronous(self) -> bool:
        return self._setup.device == "asynchronous"

    def is_brief(self, batch: Batch) -> bool:
        return self.asynchronous or (self._setup.device == "brief" and batch.num_tokens <= BRIEF)

    def launch(self, batch: Batch) -> StepHandle:  # type: ignore[override]
        world, hard_limit = self.world, self._setup.config.step_hard_limit
        late = self._faults and self._faults[0].at <= world.now
        fault = self._faults.popleft().kind if late else ""
        seconds = self._setup.pace * world.rng.expovariate(1.0)
        seconds += hard_limit * {"slow": 0.7, "hang": 1.5}.get(fault, 0.0)
        if self.asynchronous:
            self._due = max(self._due, world.now) + seconds
            return _RunningStep(self, batch, self._due, fault)
        world.sleep(seconds / 2)
        result = self.compute(batch, fault)
        world.sleep(seconds / 2)
        return FinishedStep(result)

    def compute(self, batch: Batch, fault: str) -> StepResult:
        """The step's result, with `fault` in it."""
        if fault == "dies":
            raise RuntimeError("the device died, as planned")
        if fault == "row":
            spec = batch.rows[self.world.rng.randrange(len(batch.rows))].spec
            self.fail_tickets[spec.ticket] = "a planned fault"
            self.failed.add(spec.request_id)
        return self.execute(batch)

    def prepare_update(self, weights: int, config: EngineConfig, partial: bool) -> Callable[[], None]:
        """Look at other weights, which takes a while; what gives them to the model, which takes another."""
        self.world.sleep(self._setup.pace)

        def write() -> None:
            self.world.sleep(self._setup.pace)
            self.update(weights)
            self.updates.append((self.world.now, weights))

        return write


class _RunningStep(NamedTuple):
    """A `StepHandle` of a step that the device computes by itself."""

    device: VirtualDevice
    batch: Batch
    due: float
    fault: str

    @property
    def ready(self) -> bool:
        return self.device.world.now >= self.due

    def block(self) -> None:
        self.device.world.sleep(self.due - self.device.world.now)

    def wait(self) -> StepResult:
        self.block()
        return self.device.compute(self.batch, self.fault)


def allowed_letters(remainder: int, place: int) -> list[int]:
    """Tokens that a grammar of letters allows in a place: those of one remainder; every fourth leaves no choice."""
    return [10 + remainder] if place % 4 == 3 else [token for token in range(2, VOCABULARY) if token % 5 == remainder]


class LettersTemplate:
    """A compiled grammar of so many letters. One output's state in it, and the nearest end, are as simple as it is."""

    nbytes = 1000
    position = None
    reach = 0
    """No logits are kept for it: where a letter does not fit, the nearest end is taken."""
    far = 0
    """Costs are known from the beginning, for every budget, so that closings are made before any token."""
    tokens: Sequence[int] = ()

    def __init__(self, remainder: int, length: int) -> None:
        self.min_tokens = length
        self._remainder = remainder
        self._taken = 0

    def has_costs(self, left: int, soon: bool = False) -> bool:
        return True

    def new_state(self) -> LettersTemplate:
        return LettersTemplate(self._remainder, self.min_tokens)

    def new_closing(self, tokens: Sequence[int]) -> LettersTemplate:
        return self.new_state()

    def fill(self, mask: Mask) -> None:
        bits = np.zeros(len(mask) * 32, np.uint8)
        bits[allowed_letters(self._remainder, self._taken)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token: int) -> bool:
        fits = self.cost > 0 and token in allowed_letters(self._remainder, self._taken)
        self._taken += fits
        return fits

    def rollback(self, num_tokens: int) -> None:
        self._taken -= num_tokens

    def forced(self) -> list[int]:
        return [self.first()] if self._taken % 4 == 3 and self.cost else []

    def is_terminated(self) -> bool:
        return self.cost == 0

    is_accepting = is_terminated

    @property
    def cost(self) -> int:
        return self.min_tokens - self._taken

    def first(self) -> int:
        return allowed_letters(self._remainder, self._taken)[0]

    def advance(self, token: int, at_most: int) -> bool:
        return self.cost - 1 <= at_most and self.consume(token)


class LettersBackend:
    """A library that compiles such grammars: at once, slowly, or not at all, as their text says."""

    def __init__(self, world: World, timeout: float) -> None:
        self._world = world
        self._timeout = timeout

    def compile(self, grammar: Grammar, checkpoint: Callable[[], None]) -> LettersTemplate:
        remainder, length, kind = grammar.text.split("-")
        self._world.sleep(self._timeout * 2 if kind == "slow" else self._world.rng.random())
        checkpoint()
        if kind == "broken":
            raise GrammarError("grammar", "is broken, as planned")
        return LettersTemplate(int(remainder), int(length))

    def close(self) -> None:
        return

"""The plug points: what the engine expects of parts it does not know.

`build.py` is the only place that wires concrete parts to these. A new backend, policy or grammar library implements
one of these and touches nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asyncengine.sampling_params import OnBudget

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy.typing import NDArray

    from asyncengine.step import AdapterSwap, Batch, StepResult


class Clock(Protocol):
    """The only source of time. Tests use a manual one."""

    def now(self) -> float:
        """Seconds on a monotonic scale."""
        ...


class StepHandle(Protocol):
    """A launched step."""

    @property
    def ready(self) -> bool:
        """True: `wait` does not block."""
        ...

    def wait(self) -> StepResult:
        """The result. Called once, in launch order, on any thread."""
        ...


class Executor(Protocol):
    """Runs steps, one after another, on whatever thread calls it. Holds weights, KV memory and per-slot state."""

    @property
    def num_pages(self) -> int:
        """Pages of KV memory, page 0 included. Page 0 is padding and never handed out."""
        ...

    @property
    def page_size(self) -> int: ...

    def launch(self, batch: Batch) -> StepHandle:
        """Hand one step to the device and return without waiting for it, if the device is not the CPU.

        A fault of one row goes into `StepResult.errors`; raising, here or in `wait`, kills the engine.
        """
        ...

    def close(self) -> None:
        """Free everything. Called once, on the thread that executed."""
        ...


class Runner(Protocol):
    """Launches steps without blocking the event loop; results come back in launch order."""

    def launch(self, batch: Batch) -> asyncio.Future[StepResult]: ...

    async def aclose(self) -> None:
        """Stop after the current step and leave nothing behind. Idempotent."""
        ...

    def close_soon(self) -> None:
        """The same without waiting, from any thread: the event loop that launched is closed."""
        ...


class GrammarMatcher(Protocol):
    """State of one constrained output. Lives with its request; used by one thread at a time, that of its row's step."""

    steered: bool
    """True once a token was put in the place of a sampled one so that the output is complete within its budget."""

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write the packed bitmask of allowed next tokens into `mask` (shape [ceil(vocab / 32)], lowest bit first)."""
        ...

    def accept(self, token_id: int, jump: bool = True) -> list[int]:
        """Move past a sampled token. Returns what the output grows by: that token, or the one that steering puts in
        its place, then (`jump`) the tokens after it that the grammar leaves no choice about. Raises `GrammarError`."""
        ...

    def is_terminated(self) -> bool:
        """True: the output is complete and nothing may follow."""
        ...

    def fresh(self) -> GrammarMatcher:
        """An equal matcher at its beginning, whatever this one has been through: a replay needs one of its own. Any
        thread may ask for it. Raises `GrammarError` if its compiled grammar broke meanwhile."""
        ...

    def overrun(self) -> str | None:
        """Asked when the budget is spent: why that is an error, or None if the output may end there."""
        ...


class GrammarCompiler(Protocol):
    """The grammar queue's worker: compiles off the event loop and reports through `done`."""

    def check(self, grammar: Any, budget: int, on_budget: OnBudget) -> Any:
        """What to compile for `grammar`. Refuses at submit what can be seen to be wrong at once, on any thread.

        Raises `GrammarError`, `BudgetTooSmall`, `QueueFull`.
        """
        ...

    def text_check(self, grammar: Any) -> Callable[[str], str | None] | None:
        """What finds the fault of a finished text, where compiling `grammar` (as `check` returned it) enforces only a
        part; None where it enforces all."""
        ...

    def start(self, ticket: int, order: GrammarOrder, done: GrammarDone) -> None:
        """Begin compiling for `ticket`; call `done(ticket, matcher or error)` once, from any thread."""
        ...

    def cancel(self, ticket: int) -> None:
        """Nobody waits for `ticket` any more. Idempotent."""
        ...

    def close(self) -> None: ...


class GrammarOrder(NamedTuple):
    """What a request wants of the compiler."""

    grammar: Any
    """What `check` returned."""
    budget: int
    """Output tokens at most."""
    on_budget: OnBudget


GrammarDone = Callable[[int, GrammarMatcher | Exception], None]


class AdapterAdmission(Protocol):
    """Which adapters share a batch. Pure; the scheduler calls it while admitting (S-LoRA; vLLM's `max_loras`)."""

    def fits(self, digest: str) -> bool:
        """Would `admit` find a slot now? Changes nothing."""
        ...

    def admit(self, digest: str, running: Sequence[str]) -> int | None:
        """Device slot for `digest` beside the adapters of all `running` requests, or None: skip for now."""
        ...

    def release(self, digest: str) -> None:
        """No running request and no step in flight names `digest` through one admission any more."""
        ...

    def take_swaps(self) -> tuple[AdapterSwap, ...]:
        """Slots whose content has changed since the last call: the next step carries them to the device."""
        ...

    def check(self) -> None:
        """Raises `InvariantViolation` if the books do not balance."""
        ...


class AdapterStore(Protocol):
    """Adapters by name, in host memory. Every request that names one has a claim on it, by ticket."""

    def find(self, name: str) -> object:
        """Raises `AdapterNotFound` if no adapter has that name now."""
        ...

    def claim(self, tickets: Sequence[int], name: str) -> str:
        """The digest all `tickets` will use, whatever becomes of the name. Raises `AdapterNotFound`."""
        ...

    def start(self, ticket: int, done: AdapterDone) -> None:
        """Call `done(ticket, None)` once the claimed adapter is in memory and stays there, or `done(ticket, error)`:
        perhaps at once, on any thread."""
        ...

    def cancel(self, ticket: int) -> None:
        """`ticket` has ended: give back what it claimed. Idempotent."""
        ...

    def check(self) -> None:
        """Raises `InvariantViolation` if the books do not balance."""
        ...

    def close(self) -> None: ...


AdapterDone = Callable[[int, Exception | None], None]


class Policy(Protocol):
    """Order of the waiting queue. Small, stateless objects."""

    name: str
    dynamic: bool
    """True: keys change between steps, the queue is sorted anew each time."""

    def key(self, request: Any) -> Any:
        """Sort key, smallest first. Must be a total order: end it with the request's ticket."""
        ...


class EvictionStrategy(Protocol):
    """Which cached page goes first when memory is needed. Smallest key is evicted first."""

    name: str

    def key(self, node: Any) -> Any: ...

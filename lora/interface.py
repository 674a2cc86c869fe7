"""Interfaces of adapter storage for the engine and its scheduler: by name in host memory, by slot on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from asyncengine.step import AdapterSwap

LONG = 24
"""Neighbouring rows of one adapter from which on matrix products are faster on a CPU, measured with bf16 and two
threads. Their sums are not those of a row alone."""


class ModuleDims(NamedTuple):
    """One module that an adapter may change."""

    inputs: int
    """Features in; rows of the table for an embedding."""
    outputs: int
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    """conv1d: GPT-2's linear, stored transposed. Its adapters look like any linear's."""
    scale: float = 1.0
    """The module's own factor of its output (Gemma 3's embedding): what adapters add must be multiplied as well."""


class AdapterAdmission(Protocol):
    """Choice of the adapters that share a batch. Pure; the scheduler calls it while it admits (S-LoRA; vLLM's
    `max_loras`)."""

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
        """Call `done(ticket, digest)` once the claimed adapter is in memory and stays there, or `done(ticket, error)`:
        perhaps at once, on any thread."""
        ...

    def cancel(self, ticket: int) -> None:
        """`ticket` has ended: give back what it claimed. Idempotent."""
        ...

    def check(self) -> None:
        """Raises `InvariantViolation` if the books do not balance."""
        ...

    def close(self) -> None: ...


AdapterDone = Callable[[int, str | Exception], None]
"""Called with a ticket and the digest of its adapter, or why there is none."""

"""Device rows of running requests, and the adapters they bring. Both obey the retire rule (`kvcache.retiring`)."""

from __future__ import annotations

from collections.abc import Iterable

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.retiring import Retiring
from asyncengine.scheduler.request import Request
from asyncengine.seams import AdapterAdmission
from asyncengine.step import AdapterSwap


class Slots:
    """Hands every running request a slot in [0, total), and its adapter a device slot if it has one.

    A slot returns when the last launched step that names it has retired.
    """

    def __init__(self, total: int, adapters: AdapterAdmission | None) -> None:
        self.total = total
        self.adapters = adapters
        self._free = list(range(total - 1, -1, -1))
        self._retiring: Retiring[tuple[int, str]] = Retiring(self._return)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def retiring(self) -> list[str]:
        """The adapters, "" for none, of requests whose slots, and all else they had, are on their way back."""
        return [adapter for _, adapter in self._retiring]

    def adapter_fits(self, request: Request) -> bool:
        """Whether the adapter of `request`, if it has one, could run beside those of the running requests."""
        if not request.adapter_digest:
            return True
        if self.adapters is None:
            raise InvariantViolation(f"{request} names an adapter, but there is no adapter admission")
        return self.adapters.fits(request.adapter_digest)

    def acquire(self, request: Request, running: Iterable[Request]) -> None:
        """Give `request`, whose adapter fits, its slots."""
        if request.adapter_digest:
            assert self.adapters is not None
            beside = [other.adapter_digest for other in running if other.adapter_digest]
            adapter_slot = self.adapters.admit(request.adapter_digest, beside)
            if adapter_slot is None:
                raise InvariantViolation(f"{request}: its adapter fits, and has no slot")
            request.adapter_slot = adapter_slot
        request.slot = self._free.pop()

    def take_swaps(self) -> tuple[AdapterSwap, ...]:
        """Adapters that the next step must copy to the device before it runs."""
        return self.adapters.take_swaps() if self.adapters is not None else ()

    def release(self, request: Request, fence: int) -> None:
        """Take the slots of `request`; they return when step `fence` has retired."""
        slots, request.slot, request.adapter_slot = (request.slot, request.adapter_digest), -1, 0
        self._retiring.add(slots, fence)

    def retire(self, step: int) -> None:
        self._retiring.retire(step)

    def _return(self, slots: tuple[int, str]) -> None:
        slot, adapter = slots
        self._free.append(slot)
        if adapter and self.adapters is not None:
            self.adapters.release(adapter)

    def check(self, running: Iterable[Request]) -> None:
        """Each slot is free, used by one running request, or retiring. Raises `InvariantViolation`."""
        slots = sorted(self._free + [r.slot for r in running] + [slot for slot, _ in self._retiring])
        if slots != list(range(self.total)):
            raise InvariantViolation(f"slots out of balance: {slots}")
        if self.adapters is not None:
            self.adapters.check()

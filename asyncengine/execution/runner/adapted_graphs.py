"""Graphs of steps with adapters, beside those of steps without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from asyncengine.execution.device.memory import is_out_of_memory
from asyncengine.lora.layers.slots import LoraLayers

logger = logging.getLogger("asyncengine")

G = TypeVar("G")


class AdaptedGraphs(Generic[G]):
    """Graphs by size. They are captured with the others where memory of adapters was allocated by then, else when first
    needed; those of an allocation that has changed since are thrown away."""

    def __init__(self, lora: LoraLayers | None, steps: str) -> None:
        """`steps`: the kind of steps, for the log."""
        self._lora, self._steps = lora, steps
        self._graphs: dict[int, G] = {}
        self._version = -1

    def capture_all(
        self, capture: Callable[[int, LoraLayers], G], sizes: Sequence[int], report: Callable[[], None]
    ) -> None:
        """Capture every size, largest first, where there is memory already: nobody has to wait for that later."""
        if self._lora is None or not self._lora.nbytes:
            return
        self._version = self._lora.version
        try:
            for size in reversed(sizes):
                self._graphs[size] = capture(size, self._lora)
                report()
        except Exception as error:
            self._give_up(error)

    def find(self, capture: Callable[[int, LoraLayers], G], size: int, slots: Sequence[int]) -> G | None:
        """The graph of this size for a step whose rows use `slots`, 0 for none. None: it cannot be captured.

        `capture` is the owner's; it is not kept, or the two would refer to each other.

        Raises `InvariantViolation` for an empty slot, and whatever says that memory is short.
        """
        if self._lora is None:
            return None
        self._lora.check_slots(slots)
        if self._lora.version != self._version:  # its memory lies elsewhere now
            self._graphs.clear()
            self._version = self._lora.version
        if size not in self._graphs:
            try:
                self._graphs[size] = capture(size, self._lora)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._give_up(error)
                return None
        return self._graphs[size]

    def close(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s with adapters run without CUDA graphs: %s", self._steps, error)
        self._graphs.clear()
        self._lora = None

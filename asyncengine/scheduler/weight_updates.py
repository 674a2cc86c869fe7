"""Updates of the model's weights that have been asked for, and which requests they make wait.

An update takes place between two steps, with none in flight. Requests that came before it are answered by the old
weights to their end ("wait"), or go on with the new ones, which compute again what the old had ("recompute"). Those
that come after it are held until it has happened, and are answered by the new ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncengine.scheduler.messages import UpdateMode
from asyncengine.scheduler.request import Request


class WeightUpdates:
    """Weight updates in the order in which they were asked for. `held`: requests that wait for one and nothing else."""

    def __init__(self) -> None:
        self.held: dict[int, Request] = {}
        self._pending: dict[int, tuple[int, UpdateMode]] = {}
        """Place of an update in the order of all of them, and its mode, by its number."""
        self._asked = 0

    def add(self, number: int, mode: UpdateMode) -> None:
        self._asked += 1
        self._pending[number] = (self._asked, mode)

    def remove(self, number: int) -> list[Request]:
        """It has happened, or is not wanted any more. Returns who need not wait any longer; unknown numbers change
        nothing."""
        self._pending.pop(number, None)
        freed = [request for request in self.held.values() if not self.is_before(request)]
        for request in freed:
            del self.held[request.ticket]
        return freed

    def note_arrival(self, request: Request) -> None:
        """`request` has come: after every update asked for so far."""
        request.num_updates = self._asked

    def is_before(self, request: Request) -> bool:
        """Whether an update that `request` came after has yet to happen."""
        return any(place <= request.num_updates for place, _ in self._pending.values())

    @property
    def stop_steps(self) -> bool:
        """The next update does not wait for anybody: no further step is launched before it."""
        return any(mode == "recompute" for _, mode in list(self._pending.values())[:1])

    def due(self, requests: Mapping[int, Request]) -> int | None:
        """The number of the update that may happen as soon as no step is in flight. `requests`: all there are, in order
        of arrival."""
        if not self._pending:
            return None
        number, first = next(iter(self._pending)), next(iter(requests.values()), None)
        return number if self.stop_steps or first is None or self.is_before(first) else None

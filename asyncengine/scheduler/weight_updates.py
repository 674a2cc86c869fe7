"""Updates of the model's weights that have been asked for, and which requests they make wait.

An update takes place between two steps, with none in flight. Requests that came before it are answered by the old
weights to their end ("wait"), or go on with the new ones, which compute again what the old had ("recompute"). Those
that come after it are held until it has happened, and are answered by the new ones alone.

A pause is an update that goes on until the engine resumes. Updates asked for meanwhile wait for no request.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncengine.scheduler.messages import UpdateMode
from asyncengine.scheduler.request import Request


class WeightUpdates:
    """Weight updates in the order in which they were asked for. `held`: requests that wait for an update alone."""

    def __init__(self) -> None:
        self.held: dict[int, Request] = {}
        self.pending: dict[int, tuple[int, UpdateMode]] = {}
        """Place of an update in the order of all of them, and its mode, by its number."""
        self._asked = 0
        self._paused: int | None = None
        """The number of the pause that has begun, which is among those pending."""

    def add(self, number: int, mode: UpdateMode) -> None:
        self._asked += 1
        self.pending[number] = (self._asked, mode)

    def remove(self, number: int) -> list[Request]:
        """It has happened, or is not wanted any more. Returns who need not wait any longer; unknown numbers change
        nothing."""
        self.pending.pop(number, None)
        freed = [request for request in self.held.values() if not self.is_before(request)]
        for request in freed:
            del self.held[request.ticket]
        return freed

    def pause(self, number: int) -> bool:
        """Pause `number` begins. False: there is one already, which is as good."""
        first, self._paused = self._paused is None, number if self._paused is None else self._paused
        return first

    def resume(self) -> int | None:
        """The pause ends. Returns its number, to be removed; None: there was none."""
        number, self._paused = self._paused, None
        return number

    def note_arrival(self, request: Request) -> None:
        """`request` has come: after every update asked for so far."""
        request.num_updates = self._asked

    def is_before(self, request: Request) -> bool:
        """Whether an update that `request` came after has yet to happen."""
        return any(place <= request.num_updates for place, _ in self.pending.values())

    @property
    def stop_steps(self) -> bool:
        """The next update waits for no request: no further step is launched before it."""
        return self._paused is not None or any(mode == "recompute" for _, mode in list(self.pending.values())[:1])

    def due(self, requests: Mapping[int, Request]) -> int | None:
        """The number of the update that may happen as soon as no step is in flight. `requests`: all there are, in order
        of arrival."""
        number = next((each for each in self.pending if each != self._paused), None)
        if number is None:
            return None
        first = next(iter(requests.values()), None)
        return number if self.stop_steps or first is None or self.is_before(first) else None

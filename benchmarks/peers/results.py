"""Measurements, kept value by value; medians and ratios are taken of it when they are asked for."""

from __future__ import annotations

import statistics
from typing import Any


class Results:
    """Values by figure, system and repetition."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._values: dict[str, dict[str, dict[int, float]]] = {}
        self._outcomes: dict[tuple[str, str], str] = {}

    def add(self, figure: str, system: str, repetition: int, value: float) -> None:
        self._values.setdefault(figure, {}).setdefault(system, {})[repetition] = value

    def say(self, figure: str, system: str, outcome: str) -> None:
        """Why there is no value: "failed", or "-" for what is not asked of the system."""
        self._outcomes[figure, system] = outcome

    def outcome(self, figure: str, system: str) -> str:
        return self._outcomes.get((figure, system), "-")

    def runs(self, figure: str, system: str) -> int:
        return len(self._values.get(figure, {}).get(system, {}))

    def median(self, figure: str, system: str) -> float | None:
        found = self._values.get(figure, {}).get(system)
        return statistics.median(found.values()) if found else None

    def largest(self, figure: str) -> float | None:
        """Over all systems and repetitions."""
        found = [value for values in self._values.get(figure, {}).values() for value in values.values()]
        return max(found, default=None)

    def advantage(self, figure: str, system: str, base: str, lower_is_better: bool) -> float | None:
        """Advantage of `base` over `system`, as a factor: the median of the ratios within each repetition."""
        mine, theirs = (self._values.get(figure, {}).get(name, {}) for name in (base, system))
        ratios = [
            (theirs[turn] / mine[turn] if lower_is_better else mine[turn] / theirs[turn])
            for turn in mine
            if turn in theirs and mine[turn] and theirs[turn]
        ]
        return statistics.median(ratios) if ratios else None

    def as_json(self) -> dict[str, Any]:
        return {
            figure: {
                system: {"median": statistics.median(values.values()), "runs": values}
                for system, values in systems.items()
            }
            for figure, systems in self._values.items()
        }

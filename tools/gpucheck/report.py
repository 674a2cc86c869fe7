"""What a run found: checks that pass or fail, figures with what they aim at, and facts about the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "skip"]
Verdict = Literal["met", "missed", "absent", "no aim"]

FORMAT = 1
"""Of the JSON. Raised when a name or a meaning changes."""


class CheckFailed(Exception):
    """What was checked does not hold; the message says what and by how much."""


class Skipped(Exception):
    """It cannot be told here; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    section: str
    name: str
    status: Status
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity; `value` None: it was not to be had, and `note` says why."""

    section: str
    name: str
    value: float | None
    unit: str
    aim: float | None = None
    """On an H200."""
    at_most: bool = False
    """The aim is an upper limit."""
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "absent"
        if self.aim is None:
            return "no aim"
        reached = self.value <= self.aim if self.at_most else self.value >= self.aim
        return "met" if reached else "missed"


@dataclass(slots=True)
class Report:
    """Everything one run found."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Versions, device, seed, date."""
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    """The run came to its end."""

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    @property
    def exit_code(self) -> int:
        """0 if no check failed; aims that were missed are no failures, for they hold for one kind of GPU."""
        return 1 if self.failed else 0

    def figure(self, name: str) -> float | None:
        """Value of the figure called `name`; None if there is none."""
        return next((figure.value for figure in self.figures if figure.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: nothing but plain data."""
        return {
            "format": FORMAT,
            "complete": self.complete,
            "passed": self.complete and not self.failed,
            "seconds": round(self.seconds, 1),
            "facts": self.facts,
            "checks": [asdict(check) for check in self.checks],
            "figures": [{**asdict(figure), "verdict": figure.verdict} for figure in self.figures],
        }

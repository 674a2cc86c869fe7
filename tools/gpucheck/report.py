"""Findings of a run: checks that pass or fail, figures with what they aim at, lines of tables, facts of the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "skip"]
Verdict = Literal["met", "missed", "absent", "no aim"]

FORMAT = 2
"""Version of the JSON. Raised when a name or a meaning changes."""


class CheckFailed(Exception):
    """A check does not hold; the message says what and by how much."""


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

    def __str__(self) -> str:
        return f"{self.status}  {self.section}: {self.name}: {self.detail} ({self.seconds:.1f} s)"


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

    def __str__(self) -> str:
        value = "absent" if self.value is None else f"{number(self.value)} {self.unit}"
        aim = "" if self.aim is None else f" (aim {'<=' if self.at_most else '>='} {number(self.aim)}: {self.verdict})"
        return f"{self.section}: {self.name}: {value}{aim}{'; ' if self.note else ''}{self.note}"


def number(value: float) -> str:
    """Three significant digits or all whole ones: 0.123, 12.3, 12,345."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


@dataclass(slots=True)
class Report:
    """Everything one run found."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Versions, device, seed, date."""
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Lines of tables: kernels of a step, the longest steps."""
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
            "lines": self.lines,
        }

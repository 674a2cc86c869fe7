"""One run of the ladder: its clock, its scratch folder, and what its sections find.

Whatever is found is printed at once. Time is bounded twice: a section begins nothing once its own time or that of the
run is up, and what it awaits is cancelled then.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.peers.table import number


class Skipped(Exception):
    """Something cannot be measured here; the message says why."""


class Section(NamedTuple):
    """A part of the run that can be asked for or left out by name."""

    name: str
    about: str
    seconds: float
    """At most, and within what the run has left."""
    run: Callable[[], None]


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
    def verdict(self) -> str:
        if self.value is None or self.aim is None:
            return "absent" if self.value is None else "no aim"
        return "met" if (self.value <= self.aim if self.at_most else self.value >= self.aim) else "missed"

    def __str__(self) -> str:
        value = "absent" if self.value is None else f"{number(self.value)} {self.unit}"
        aim = "" if self.aim is None else f" (aim {'<=' if self.at_most else '>='} {number(self.aim)}: {self.verdict})"
        return f"{self.section}: {self.name}: {value}{aim}{'; ' if self.note else ''}{self.note}"


class Session:
    """The object that sections get: where they run, and where they tell what they find."""

    def __init__(
        self, folder: Path, device: str, backend: str, *, quick: bool = False, seed: int = 0, seconds: float = 600.0
    ) -> None:
        """`folder`: scratch space. `backend`: of attention. `seconds`: of the whole run."""
        self.folder, self.backend, self.quick, self.seed = folder, backend, quick, seed
        self.device = torch.device(device)
        self.facts: dict[str, Any] = {}
        """Versions, device, seed, date, seconds of each section."""
        self.figures: list[Figure] = []
        self.failed: list[str] = []
        """Sections that failed or were skipped, each with the reason."""
        self.lines: list[str] = []
        """Lines of tables: kernels of a step, the longest steps."""
        self.complete = False
        self._began, self._section, self._seconds, self._until = time.monotonic(), "", seconds, seconds

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that the section has left."""
        return self._until - self.seconds

    def run(self, sections: Iterable[Section], file: Path | None = None) -> None:
        """`file` is written after each section: a run that is killed was not for nothing."""
        for section in sections:
            began = self.seconds
            self._section, self._until = section.name, min(self._seconds, began + section.seconds)
            if self.left <= 0:
                self._fail("not begun: time was up")
                continue
            print(f"--- {section.name}: {section.about}", flush=True)
            try:
                section.run()
            except Skipped as reason:
                self._fail(f"skipped: {reason}")
            except Exception as error:
                traceback.print_exception(error)
                self._fail(f"failed: {type(error).__name__}: {error}")
            release(self.device)
            self.facts.setdefault("section_seconds", {})[section.name] = round(self.seconds - began, 1)
            self.write(file)
        self.complete = True
        self.write(file)

    def write(self, file: Path | None) -> None:
        """All that was found so far, as JSON; None: nowhere."""
        if file is None:
            return
        figures = [{**asdict(each), "verdict": each.verdict} for each in self.figures]
        found = {name: getattr(self, name) for name in ("facts", "failed", "lines", "complete")}
        file.write_text(json.dumps({**found, "figures": figures}, indent=1) + "\n", encoding="utf-8")

    def figure(
        self, name: str, value: float | None, unit: str, *, aim: float | None = None, at_most: bool = False,
        note: str = "",
    ) -> None:  # fmt: skip
        aim = None if self.quick else aim  # of a whole load, not of a shortened one
        self.figures.append(Figure(self._section, name, value, unit, aim, at_most, note))
        print(self.figures[-1], flush=True)

    def value_of(self, name: str) -> float | None:
        """Value of the figure called `name`; None if there is none."""
        return next((figure.value for figure in self.figures if figure.name == name), None)

    def line(self, text: str) -> None:
        """Print one line of a table."""
        self.lines.append(text)
        print(f"    {text}", flush=True)

    def _fail(self, why: str) -> None:
        self.failed.append(f"{self._section}: {why}")
        print(self.failed[-1], flush=True)


def choose(sections: Sequence[Section], only: Sequence[str], skip: Sequence[str]) -> list[Section]:
    """The sections asked for, in the order of `only` if that names any. Raises `ValueError` for a name that is none."""
    known = {section.name: section for section in sections}
    for name in (*only, *skip):
        if name not in known:
            raise ValueError(f"no section {name!r}; there are {', '.join(known)}")
    return [known[name] for name in only or known if name not in skip]


def release(device: torch.device) -> None:
    """Free what nobody refers to any more, cycles through tracebacks and engines included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

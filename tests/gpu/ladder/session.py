"""One run of the ladder: its clock, its scratch folder, and what its sections find.

Whatever is found is printed at once. Time is bounded twice: a section begins nothing once its own time or that of the
run is up, and what it awaits is cancelled then.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.execution.attention.flashinfer import load_flashinfer
from benchmarks.peers.table import number


class Skipped(Exception):
    """Something cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choice of the device and of the load."""

    device: str = "cuda:0"
    backend: str = "flashinfer"
    """Attention backend."""
    quick: bool = False
    seed: int = 0
    seconds: float = 600.0
    """Time of the whole run, in seconds."""


class Section(NamedTuple):
    """A part of the run that can be asked for or left out by name."""

    name: str
    about: str
    seconds: float
    """At most, and within what the run has left."""
    run: Callable[[Session], None]


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


@dataclass(slots=True)
class Report:
    """Everything one run found."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Versions, device, seed, date, seconds of each section."""
    figures: list[Figure] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Sections that failed or were skipped, each with the reason."""
    lines: list[str] = field(default_factory=list)
    """Lines of tables: kernels of a step, the longest steps."""
    complete: bool = False
    """The run came to its end."""

    def figure(self, name: str) -> float | None:
        """Value of the figure called `name`; None if there is none."""
        return next((figure.value for figure in self.figures if figure.name == name), None)

    def write(self, file: Path) -> None:
        plain = {**asdict(self), "figures": [{**asdict(each), "verdict": each.verdict} for each in self.figures]}
        file.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


class Session:
    """The object that sections get."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """`folder`: scratch space."""
        self.settings, self.folder = settings, folder
        self.device = torch.device(settings.device)
        self.report = Report()
        self._began = time.monotonic()
        self._section, self._until = "", settings.seconds

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that the section has left."""
        return self._until - self.seconds

    def run(self, sections: Iterable[Section], file: Path | None = None) -> Report:
        """`file` is written after each section: a run that is killed was not for nothing."""
        for section in sections:
            began = self.seconds
            self._section, self._until = section.name, min(self.settings.seconds, began + section.seconds)
            if self.left <= 0:
                self._fail("not begun: time was up")
                continue
            print(f"--- {section.name}: {section.about}", flush=True)
            try:
                section.run(self)
            except Skipped as reason:
                self._fail(f"skipped: {reason}")
            except Exception as error:
                traceback.print_exception(error)
                self._fail(f"failed: {type(error).__name__}: {error}")
            release(self.device)
            self.report.facts.setdefault("section_seconds", {})[section.name] = round(self.seconds - began, 1)
            if file is not None:
                self.report.write(file)
        self.report.complete = True
        if file is not None:
            self.report.write(file)
        return self.report

    def figure(
        self, name: str, value: float | None, unit: str, *, aim: float | None = None, at_most: bool = False,
        note: str = "",
    ) -> None:  # fmt: skip
        aim = None if self.settings.quick else aim  # of a whole load, not of a shortened one
        self.report.figures.append(Figure(self._section, name, value, unit, aim, at_most, note))
        print(self.report.figures[-1], flush=True)

    def line(self, text: str) -> None:
        """Print one line of a table."""
        self.report.lines.append(text)
        print(f"    {text}", flush=True)

    def _fail(self, why: str) -> None:
        self.report.failed.append(f"{self._section}: {why}")
        print(self.report.failed[-1], flush=True)


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


def flashinfer_missing() -> str | None:
    """Say why FlashInfer cannot be imported; None: it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'asyncengine[cuda]'"
    try:
        load_flashinfer()
    except Exception as error:  # it touches compilers, drivers and the home directory on import
        return f"importing flashinfer failed: {type(error).__name__}: {error}"
    return None

"""One run: what it was asked for, its clock, its scratch folder, and the only way for sections to report.

Whatever is found is printed at once. Time is bounded twice: a section begins nothing once its own time or that of the
run is up, and what it awaits is cancelled then.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.execution.attention.flashinfer import load_flashinfer
from tools.gpucheck.report import Check, CheckFailed, Figure, Report, Skipped, Status


@dataclass(frozen=True, slots=True)
class Settings:
    """Choice of checks, and of the device."""

    device: str = "cuda:0"
    backend: str = "flashinfer"
    """Attention backend under test in half precision; float32 always runs on torch."""
    quick: bool = False
    seed: int = 0
    seconds: float = 600.0
    """Time of the whole run, in seconds."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


class Section(NamedTuple):
    """A part of the run that can be asked for or left out by name."""

    name: str
    about: str
    seconds: float
    """At most, and within what the run has left."""
    run: Callable[[Session], None]
    checks: bool = True
    """Whether it proves something: left out for lack of time, it then counts as failed."""


class Session:
    """The object that sections get."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        say: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: scratch space; `say`: told of everything that is found, a line at a time."""
        self.settings = settings
        self.device = settings.torch_device
        self.folder = folder
        self.report = Report()
        self.say = say
        self.compiling: list[Future[None]] = []
        """Compilations in the background (`kernels.run_compile`)."""
        self._now = now
        self._began = now()
        self._section = Section("", "", settings.seconds, lambda _: None)
        self._until = settings.seconds

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self._now() - self._began

    @property
    def left(self) -> float:
        """Seconds that the section has left."""
        return self._until - self.seconds

    def run(self, sections: Iterable[Section], after: Callable[[Report], object] = lambda _: None) -> Report:
        """`after` is told what there is so far after each section: a run that is killed was not for nothing."""
        for section in sections:
            self._section, self._until = section, self.settings.seconds
            if self._time_is_up("time"):
                continue
            self.say(f"--- {section.name}: {section.about}")
            began = self.seconds
            self._until = min(self.settings.seconds, began + section.seconds)
            self._guard(section.about, lambda section=section: section.run(self))  # type: ignore[misc]
            self.report.facts.setdefault("section_seconds", {})[section.name] = round(self.seconds - began, 1)
            self.report.seconds = self.seconds
            after(self.report)
        self.report.seconds = self.seconds
        self.report.complete = True
        return self.report

    def check(self, name: str, work: Callable[[], str | Coroutine[Any, Any, str]]) -> bool:
        """Report whether `work` passes: it returns what it found, raises `CheckFailed`, `Skipped`, or crashes. What it
        returns may have to be awaited."""
        return not self._time_is_up(name) and self._guard(name, lambda: self._passed(name, work))

    def figure(
        self, name: str, value: float | None, unit: str, *, aim: float | None = None, at_most: bool = False,
        note: str = "",
    ) -> None:  # fmt: skip
        aim = None if self.settings.quick else aim  # of a whole load, not of a shortened one
        figure = Figure(self._section.name, name, value, unit, aim, at_most, note)
        self.report.figures.append(figure)
        self.say(str(figure))

    def line(self, text: str) -> None:
        """One line of a table."""
        self.report.lines.append(text)
        self.say(f"    {text}")

    def _passed(self, name: str, work: Callable[[], str | Coroutine[Any, Any, str]]) -> None:
        began = self.seconds
        found = work()
        detail = found if isinstance(found, str) else asyncio.run(self.bounded(found))
        self._add(name, "pass", detail, began)

    async def bounded(self, work: Coroutine[Any, Any, str]) -> str:
        """Await `work` as long as the section has time. Raises `CheckFailed` when that is over."""
        try:
            async with asyncio.timeout(max(0.0, self.left)) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise CheckFailed("cut: its time was up") from None

    def _time_is_up(self, name: str) -> bool:
        """Whether there is none left for `name`, which is reported then."""
        if self.left > 0:
            return False
        self._add(name, "fail" if self._section.checks else "skip", "not begun: time was up", self.seconds)
        return True

    def _guard(self, name: str, work: Callable[[], None]) -> bool:
        """False, and a failed check, if `work` raises. Device memory it held is free again afterwards."""
        began = self.seconds
        try:
            work()
        except Skipped as reason:
            self._add(name, "skip", str(reason), began)
            return True
        except Exception as error:
            told = str(error)
            if not isinstance(error, CheckFailed):
                told = f"crashed: {type(error).__name__}: {error}"
                self.say("".join(traceback.format_exception(error)))
            self._add(name, "fail", told, began)
            return False
        finally:
            release(self.device)
        return True

    def _add(self, name: str, status: Status, detail: str, began: float) -> None:
        check = Check(self._section.name, name, status, detail, self.seconds - began)
        self.report.checks.append(check)
        self.say(str(check))


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
    """Why FlashInfer cannot be imported; None: it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'asyncengine[cuda]'"
    try:
        load_flashinfer()
    except Exception as error:  # it touches compilers, drivers and the home directory on import
        return f"importing flashinfer failed: {type(error).__name__}: {error}"
    return None

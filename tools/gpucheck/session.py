"""One run: what it was asked for, its clock, its scratch folder, and the only way for sections to report."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from asyncengine.attention.flashinfer import load_flashinfer
from tools.gpucheck.report import Check, CheckFailed, Figure, Report, Skipped, Status


@dataclass(frozen=True, slots=True)
class Settings:
    """What to check, and where."""

    device: str = "cuda:0"
    backend: str = "flashinfer"
    """Attention backend under test in half precision; float32 always runs on torch."""
    quick: bool = False
    seed: int = 0
    budget: float = 480.0
    """Seconds for the whole run; sections that would begin later are not begun."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


class Section(NamedTuple):
    """A part of the run that can be asked for or left out by name."""

    name: str
    about: str
    seconds: float
    """What it may take on an H200; reported when exceeded."""
    run: Callable[[Session], None]
    checks: bool = True
    """Whether it proves something: left out for lack of time, it then counts as failed."""


class Session:
    """What sections get."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        say: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: scratch space; `say`: told what is going on."""
        self.settings = settings
        self.device = settings.torch_device
        self.folder = folder
        self.report = Report()
        self._say = say
        self._now = now
        self._began = now()
        self._section = ""

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self._now() - self._began

    def run(self, sections: Iterable[Section], after: Callable[[Report], object] = lambda _: None) -> Report:
        """`after` is told what there is so far after each section: a run that is killed was not for nothing."""
        for section in sections:
            self._section = section.name
            if self.seconds >= self.settings.budget:
                reason = f"not begun: the {self.settings.budget:.0f} s of the whole run are used up"
                status: Status = "fail" if section.checks else "skip"
                self.report.checks.append(Check(section.name, "time", status, reason, 0.0))
                continue
            self._say(section.about)
            began = self.seconds
            failed = len(self.report.failed)
            self._guard(section.about, lambda section=section: section.run(self))  # type: ignore[misc]
            taken = self.seconds - began
            self.report.facts.setdefault("section_seconds", {})[section.name] = round(taken, 1)
            if taken > section.seconds and len(self.report.failed) == failed:
                self._say(f"{section.name} took {taken:.0f} s, more than the {section.seconds:.0f} s it should")
            self.report.seconds = self.seconds
            after(self.report)
        self.report.seconds = self.seconds
        self.report.complete = True
        return self.report

    def check(self, name: str, work: Callable[[], str]) -> bool:
        """Report whether `work` passes: it returns what it found, raises `CheckFailed`, `Skipped`, or crashes."""
        self._say(name)
        return self._guard(name, lambda: self._passed(name, work))

    def figure(
        self, name: str, value: float | None, unit: str, *, aim: float | None = None, at_most: bool = False,
        note: str = "",
    ) -> None:  # fmt: skip
        self.report.figures.append(Figure(self._section, name, value, unit, aim, at_most, note))

    def _passed(self, name: str, work: Callable[[], str]) -> None:
        began = self.seconds
        detail = work()
        self.report.checks.append(Check(self._section, name, "pass", detail, self.seconds - began))

    def _guard(self, name: str, work: Callable[[], None]) -> bool:
        """False, and a failed check, if `work` raises. Device memory it held is free again afterwards."""
        began = self.seconds
        try:
            work()
        except Skipped as reason:
            self.report.checks.append(Check(self._section, name, "skip", str(reason), self.seconds - began))
            return True
        except Exception as error:
            told = str(error) if isinstance(error, CheckFailed) else f"crashed: {type(error).__name__}: {error}"
            self.report.checks.append(Check(self._section, name, "fail", told, self.seconds - began))
            return False
        finally:
            release(self.device)
        return True


def choose(sections: Sequence[Section], only: Sequence[str], skip: Sequence[str]) -> list[Section]:
    """The sections asked for, in their own order. Raises `ValueError` for a name that is none."""
    known = [section.name for section in sections]
    for name in (*only, *skip):
        if name not in known:
            raise ValueError(f"no section {name!r}; there are {', '.join(known)}")
    return [section for section in sections if (not only or section.name in only) and section.name not in skip]


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

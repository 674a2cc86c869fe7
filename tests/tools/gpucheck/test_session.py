"""A run: checks that fail or crash do not stop the others, and time is finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.gpucheck.report import CheckFailed, Report, Skipped
from tools.gpucheck.session import Section, Session, Settings, choose

CPU = Settings("cpu", "torch")


def fails() -> str:
    raise CheckFailed("off by one")


def crashes() -> str:
    return ""[1]


def skips() -> str:
    raise Skipped("no such kernel")


def run(tmp_path: Path, *sections: Section, budget: float = 480.0, clock: list[float] | None = None) -> Report:
    ticks = clock or [0.0]
    settings = Settings("cpu", "torch", budget=budget)
    return Session(settings, tmp_path, now=lambda: ticks.pop(0) if len(ticks) > 1 else ticks[0]).run(sections)


def test_each_check_stands_alone(tmp_path: Path) -> None:
    def work(session: Session) -> None:
        assert session.check("good", lambda: "found it")
        assert not session.check("bad", fails)
        assert not session.check("broken", crashes)
        assert session.check("away", skips)
        session.figure("speed", 3.0, "m/s", aim=2.0)
        raise KeyError("the section itself")

    report = run(
        tmp_path, Section("one", "first", 9, work), Section("two", "second", 9, lambda s: s.figure("x", 1, ""))
    )
    assert [(check.name, check.status) for check in report.checks] == [
        ("good", "pass"), ("bad", "fail"), ("broken", "fail"), ("away", "skip"), ("first", "fail"),
    ]  # fmt: skip
    assert [check.detail for check in report.checks] == [
        "found it", "off by one", "crashed: IndexError: string index out of range", "no such kernel",
        "crashed: KeyError: 'the section itself'",
    ]  # fmt: skip
    assert [(figure.section, figure.name) for figure in report.figures] == [("one", "speed"), ("two", "x")]
    assert report.exit_code == 1
    assert report.figure("speed") == 3.0
    assert report.figure("nothing") is None


def test_what_time_leaves_out_is_not_passed(tmp_path: Path) -> None:
    """A check that was not made fails; a figure that was not taken is only missing."""
    sections = [Section("proof", "p", 1, lambda _: None), Section("figures", "f", 1, lambda _: None, checks=False)]
    assert run(tmp_path, *sections).exit_code == 0
    report = run(tmp_path, *sections, budget=10, clock=[0.0, 11.0])
    assert [(check.section, check.status) for check in report.checks] == [("proof", "fail"), ("figures", "skip")]
    assert "not begun" in report.checks[0].detail


def test_sections_by_name() -> None:
    sections = [Section(name, name, 1, lambda _: None) for name in "abc"]

    def names(only: list[str], skip: list[str]) -> str:
        return "".join(section.name for section in choose(sections, only, skip))

    assert names([], []) == "abc"
    assert names(["c", "a"], []) == "ac"
    assert names([], ["b"]) == "ac"
    assert names(["a", "b"], ["a"]) == "b"
    with pytest.raises(ValueError, match="no section 'd'; there are a, b, c"):
        names([], ["d"])

"""A run: checks that fail or crash do not stop the others, and time is finite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tools.gpucheck import ranks
from tools.gpucheck.report import CheckFailed, Figure, Report, Skipped
from tools.gpucheck.session import Section, Session, Settings, choose

CPU = Settings("cpu", "torch")


def fails() -> str:
    raise CheckFailed("off by one")


def crashes() -> str:
    return ""[1]


def skips() -> str:
    raise Skipped("no such kernel")


def run(tmp_path: Path, *sections: Section, seconds: float = 480.0, clock: list[float] | None = None) -> Report:
    ticks = clock or [0.0]
    settings = Settings("cpu", "torch", seconds=seconds)
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
    report = run(tmp_path, *sections, seconds=10, clock=[0.0, 11.0])
    assert [(check.section, check.status) for check in report.checks] == [("proof", "fail"), ("figures", "skip")]
    assert "not begun" in report.checks[0].detail


def test_sections_by_name() -> None:
    sections = [Section(name, name, 1, lambda _: None) for name in "abc"]

    def names(only: list[str], skip: list[str]) -> str:
        return "".join(section.name for section in choose(sections, only, skip))

    assert names([], []) == "abc"
    assert names(["c", "a"], []) == "ca", "in the order asked for"
    assert names([], ["b"]) == "ac"
    assert names(["a", "b"], ["a"]) == "b"
    with pytest.raises(ValueError, match="no section 'd'; there are a, b, c"):
        names([], ["d"])


def test_what_takes_too_long_is_cut_and_the_next_section_begins(tmp_path: Path) -> None:
    """A section's own time ends what it awaits, and what it would begin afterwards."""
    cancelled = []

    async def endless() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    def work(session: Session) -> None:
        assert not session.check("endless", endless)
        assert not session.check("never", lambda: "begun")

    said: list[str] = []
    session = Session(CPU, tmp_path, said.append)
    sections = [Section("one", "first", 0.01, work), Section("two", "second", 9, lambda s: s.figure("x", 1, "m"))]
    report = session.run(sections)
    assert [(check.name, check.status) for check in report.checks] == [("endless", "fail"), ("never", "fail")]
    assert cancelled == [True]
    assert [figure.section for figure in report.figures] == ["two"]
    assert any("endless: cut: its time was up" in line for line in said)
    assert "two: x: 1.00 m" in said


def test_a_timeout_of_its_own_is_a_crash(tmp_path: Path) -> None:
    async def times_out() -> str:
        async with asyncio.timeout(0):
            await asyncio.get_running_loop().create_future()
        return ""

    report = run(tmp_path, Section("one", "first", 9, lambda session: session.check("late", times_out) and None))
    assert report.checks[0].detail.startswith("crashed: TimeoutError")


def test_one_gpu_is_too_few_for_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    report = Session(Settings("cuda:0"), tmp_path).run([Section("ranks", "a model over two GPUs", 9, ranks.run)])
    assert [(check.status, check.detail[:12]) for check in report.checks] == [("skip", "needs 2 GPUs")]


def test_verdicts_of_figures() -> None:
    for value, aim, at_most, verdict in (
        (812.0, 700.0, False, "met"), (12_345.6, 20_000.0, False, "missed"), (0.4, 1.0, True, "met"),
        (1.1, 1.0, True, "missed"), (None, None, False, "absent"), (None, 1.0, False, "absent"),
        (4300.0, None, False, "no aim"),
    ):  # fmt: skip
        assert Figure("speed", "f", value, "ms", aim, at_most=at_most).verdict == verdict

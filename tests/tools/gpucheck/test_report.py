"""Verdicts and exit status."""

from __future__ import annotations

import pytest

from tools.gpucheck.report import Check, Figure, Report


def filled(*statuses: str) -> Report:
    report = Report({"device": "a GPU", "seed": 7, "section_seconds": {"kernels": 1.5}}, seconds=12.34, complete=True)
    report.checks = [Check("kernels", f"check {n}", status, f"[detail] {n}", 0.5) for n, status in enumerate(statuses)]  # type: ignore[arg-type]
    report.figures = [
        Figure("speed", "fast", 812.0, "tokens/s", 700.0),
        Figure("speed", "slow", 12_345.6, "tokens/s", 20_000.0),
        Figure("speed", "host", 0.4, "ms", 1.0, at_most=True),
        Figure("speed", "vllm", None, "tokens/s", note="not installed"),
        Figure("environment", "copy bandwidth", 4300.0, "GB/s"),
    ]
    return report


def test_verdicts() -> None:
    assert [figure.verdict for figure in filled().figures] == ["met", "missed", "met", "absent", "no aim"]
    assert Figure("s", "host", 1.1, "ms", 1.0, at_most=True).verdict == "missed"
    assert Figure("s", "gone", None, "ms", 1.0).verdict == "absent", "an aim does not make a figure"


@pytest.mark.parametrize(("statuses", "status"), [(("pass", "skip"), 0), (("pass", "fail"), 1), ((), 0)])
def test_exit_status(statuses: tuple[str, ...], status: int) -> None:
    assert filled(*statuses).exit_code == status

"""A report for people."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table

from tools.gpucheck.report import Figure, Report

_COLOURS = {"pass": "green", "fail": "bold red", "skip": "yellow", "met": "green", "missed": "red", "absent": "yellow"}


def show(report: Report, console: Console) -> None:
    facts = Table(title="machine", title_justify="left", show_header=False)
    for name, value in report.facts.items():
        if not isinstance(value, dict):
            facts.add_row(name, str(value))
    console.print(Group(facts, _checks(report), _figures(report)))
    counts = {status: sum(check.status == status for check in report.checks) for status in ("pass", "fail", "skip")}
    console.print(
        f"{counts['pass']} checks passed, {counts['fail']} failed, {counts['skip']} skipped, in {report.seconds:.0f} s"
    )


def _checks(report: Report) -> Table:
    table = Table(title="checks", title_justify="left")
    for name in ("section", "check", "", "found", "s"):
        table.add_column(name, justify="right" if name == "s" else "left", overflow="fold")
    for check in report.checks:
        status = f"[{_COLOURS[check.status]}]{check.status}[/]"
        table.add_row(check.section, check.name, status, _plain(check.detail), f"{check.seconds:.1f}")
    return table


def _figures(report: Report) -> Table:
    table = Table(title="figures", title_justify="left", caption="aims are for an H200", caption_justify="left")
    for name in ("section", "figure", "value", "unit", "aim", "", "note"):
        table.add_column(name, justify="right" if name in ("value", "aim") else "left", overflow="fold")
    for figure in report.figures:
        value = "absent" if figure.value is None else number(figure.value)
        table.add_row(
            figure.section, figure.name, value, figure.unit, _aim(figure), _verdict(figure), _plain(figure.note)
        )
    return table


def _aim(figure: Figure) -> str:
    if figure.aim is None:
        return ""
    return ("<= " if figure.at_most else ">= ") + number(figure.aim)


def _verdict(figure: Figure) -> str:
    verdict = figure.verdict
    return "" if verdict == "no aim" else f"[{_COLOURS[verdict]}]{verdict}[/]"


def _plain(text: str) -> str:
    """Not to be read as markup."""
    return text.replace("[", r"\[")


def number(value: float) -> str:
    """Three significant digits or all whole ones: 0.123, 12.3, 12,345."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"

"""The report for people: one table, with every peer beside this engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.results import Results
from benchmarks.peers.workloads import Figure


def number(value: float) -> str:
    """Three significant digits or all whole ones: 0.123, 12.3, 12,345."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def cell(results: Results, figure: str, system: str, lower_is_better: bool, base: str) -> str:
    """Value, and how many times better this engine is; "*": measured once only, "-": not measured."""
    value = results.median(figure, system)
    if value is None:
        return results.outcome(figure, system)
    mark = "*" if results.runs(figure, system) < results.repeats else ""
    ratio = None if system == base else results.advantage(figure, system, base, lower_is_better)
    return f"{number(value)}{mark}" + (f" ({ratio:.2f}x)" if ratio is not None else "")


def rows(results: Results, figures: Sequence[tuple[str, Figure]], names: Sequence[str], base: str) -> list[list[str]]:
    """Title and a cell for each system, of each figure that anybody has."""
    found = []
    for key, figure in figures:
        if any(results.median(key, name) is not None for name in names):
            cells = [cell(results, key, name, figure.lower_is_better, base) for name in names]
            found.append([f"{figure.title}, {figure.unit}", *cells])
    return found


def show(console: Console, title: str, heads: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> None:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", show_lines=True)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    made = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in made)


def absent(reasons: Mapping[str, Any]) -> list[str]:
    return [f"{title}: absent: {reason}" for title, reason in reasons.items()]

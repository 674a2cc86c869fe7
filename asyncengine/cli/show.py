"""The output of the demo: titled scenes, a live board of streams, and a copy of it all for the picture."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from asyncengine.cli.text import printable

FRAME = 0.1
"""Seconds between two frames of a live board."""
WIDTH = 100


class Show:
    """Prints to a terminal or a pipe; `quiet` prints nothing. `picture` keeps a copy that becomes an SVG."""

    def __init__(self, *, quiet: bool = False, picture: Path | None = None) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        if not self.console.is_terminal or self.console.width > WIDTH:
            self.console.width = WIDTH
        self._picture = picture
        self._copy: Console | None = None
        if picture is not None:
            self._copy = Console(
                record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor",
                highlight=False,
            )  # fmt: skip

    def print(self, *what: RenderableType) -> None:
        self.console.print(*what)
        if self._copy is not None:
            self._copy.print(*what)

    def scene(self, title: str, story: str) -> None:
        """A title, and what there is to see in a sentence or two."""
        self.print("", Rule(f"[bold]{title}[/bold]", align="left", style="cyan"), f"[dim]{story}[/dim]")

    def outcome(self, text: str) -> None:
        self.print(f"[green]→[/green] {text}")

    @contextlib.asynccontextmanager
    async def live(self, draw: Callable[[], RenderableType]) -> AsyncIterator[None]:
        """Show `draw()` again and again while the block runs (on a terminal), then print its last state."""
        if not self.console.is_terminal or self.console.quiet:
            yield
        else:
            with Live(console=self.console, auto_refresh=False, transient=True) as screen:

                async def animate() -> None:
                    while True:
                        screen.update(draw(), refresh=True)
                        await asyncio.sleep(FRAME)

                task = asyncio.create_task(animate())
                try:
                    yield
                finally:
                    task.cancel()
        self.print(draw())

    def save(self) -> None:
        """Write the picture, if one was asked for. Raises `OSError`."""
        if self._copy is None or self._picture is None:
            return
        svg = self._copy.export_svg(title="asyncengine demo")
        # rich links a web font; a picture in a README should fetch nothing.
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
        self._picture.write_text(svg, encoding="utf-8")


class Line:
    """One question and as much of its answer as there is."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.answer = ""
        self.right: bool | None = None
        self.note = ""

    def mark(self) -> str:
        return {None: "[dim]…[/dim]", True: "[green]✓[/green]", False: "[red]✗[/red]"}[self.right]


def board(lines: list[Line], *, shown: int, note: str = "") -> Table:
    """The first `shown` lines as a table; the others are counted."""
    table = Table(box=None, padding=(0, 1), show_header=False, expand=True)
    table.add_column(width=1)
    table.add_column(ratio=4, style="cyan", no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=5, no_wrap=True, overflow="ellipsis")
    if note:
        table.add_column(width=17, style="dim", no_wrap=True)
    for line in lines[:shown]:
        answer = Text(printable(" ".join(line.answer.split())))
        cells: list[RenderableType] = [line.mark(), escape(line.question), answer]
        table.add_row(*cells, *([line.note] if note else []))
    if len(lines) > shown:
        done = sum(line.right is not None for line in lines[shown:])
        table.add_row("", f"[dim]and {len(lines) - shown} more[/dim]", f"[dim]{done} of them done[/dim]")
    return table


def side_by_side(rows: list[list[Line]], voices: Sequence[str]) -> Table:
    """A row for each question, and what each voice answers to it."""
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column(ratio=3, style="cyan")
    for voice in voices:
        table.add_column(voice, ratio=4, overflow="fold")
    for row in rows:
        answers = [Text.from_markup(f"{line.mark()} ").append(printable(" ".join(line.answer.split()))) for line in row]
        table.add_row(escape(row[0].question), *answers)
    return table

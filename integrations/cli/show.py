"""The output of the demo: titled scenes, boards of requests that fill while they run, and a copy for a picture."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from asyncengine.async_engine import AsyncEngine
from asyncengine.integrations.cli.text import printable
from asyncengine.outputs import Usage
from asyncengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from asyncengine.integrations.fleet import Fleet

ROWS, WIDTH = 12, 100
"""Requests that a board shows (the others are counted), and columns of the output."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)


@dataclass(slots=True, eq=False)
class Line:
    """One request on a board: a question, the words that its right answer holds, and the answer as far as it is."""

    question: str
    expected: str
    note: str = ""
    answer: str = ""
    right: bool | None = None
    """None: it has not ended."""

    def check(self) -> None:
        """Compare the answer: whole words, ignoring case, for a river Askena is not the Asken."""
        self.right = re.search(rf"(?<!\w){re.escape(self.expected)}(?!\w)", self.answer, re.IGNORECASE) is not None


Ask = Callable[[Line], Awaitable[object]]
"""Asks a line's question and fills in its answer."""


async def answer(engine: AsyncEngine | Fleet, line: Line, text: str = "", adapter: str | None = None) -> Usage:
    """Stream the answer to the line's question, about `text`, into the line. Returns its token counts."""
    messages = [{"role": "system", "content": f"Answer from this text:\n\n{text}"}] if text else []
    chat = [*messages, {"role": "user", "content": line.question}]
    async with engine.stream_chat(chat, GREEDY, adapter=adapter) as stream:
        async for chunk in stream:
            line.answer += chunk.text
        return (await stream.result()).usage


class Show:
    """Prints to a terminal or a pipe; `quiet` prints nothing. `picture` names an SVG file of what is printed."""

    def __init__(self, *, quiet: bool = False, picture: Path | None = None) -> None:
        file = io.StringIO() if quiet else None  # a console that is `quiet` would record nothing either
        self.console = Console(file=file, highlight=False, record=picture is not None)
        if not self.console.is_terminal or self.console.width > WIDTH:
            self.console.width = WIDTH
        # A board that is drawn again and again would be in the picture each time.
        self._watched = self.console.is_terminal and picture is None
        self._picture = picture
        self.print = self.console.print

    def busy(self, text: str) -> contextlib.AbstractContextManager[object]:
        """A spinner on a terminal."""
        return self.console.status(text) if self._watched else contextlib.nullcontext()

    def title(self, title: str, story: str) -> None:
        self.print("", Rule(f"[bold]{title}[/bold]", align="left", style="cyan"), f"[dim]{story}[/dim]")

    async def scene(self, title: str, story: str, lines: Sequence[Line], ask: Ask) -> dict[str, Any]:
        """Ask all questions at once, under a title and a story, on a board that is live on a terminal. Its figures."""

        async def asked(line: Line) -> None:
            await ask(line)
            line.check()

        self.title(title, story)
        began = time.perf_counter()
        live = Live(console=self.console, get_renderable=lambda: board(lines), refresh_per_second=10, transient=True)
        with live if self._watched else contextlib.nullcontext():
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(asked(line))
        self.print(board(lines))
        return {"seconds": time.perf_counter() - began, "answers": [asdict(line) for line in lines]}

    def outcome(self, text: str, lines: Sequence[Line]) -> None:
        """The scene's result in a sentence, and the number of right answers."""
        right = sum(line.right is True for line in lines)
        self.print(f"[green]→[/green] {text} {right} of {len(lines)} answers are right.")

    def save(self) -> None:
        """Write the picture, if one was asked for. Raises `OSError`."""
        if self._picture is not None:
            svg = self.console.export_svg(title="asyncengine demo")
            # rich links a web font; a picture in a README should fetch nothing.
            svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
            self._picture.write_text(svg, encoding="utf-8")


def board(lines: Sequence[Line]) -> Table:
    """The first lines as a table; the others are counted."""
    asked = Column(ratio=4, style="cyan", no_wrap=True, overflow="ellipsis")
    answered = Column(ratio=5, no_wrap=True, overflow="ellipsis")
    columns = Column(width=1), asked, answered, Column(style="dim", no_wrap=True)
    table = Table(*columns, box=None, padding=(0, 1), show_header=False, expand=True)
    marks = {None: "[dim]…[/dim]", True: "[green]✓[/green]", False: "[red]✗[/red]"}
    for line in lines[:ROWS]:
        question, answer = (" ".join(text.split()) for text in (line.question, line.answer))
        table.add_row(marks[line.right], escape(question), Text(printable(answer)), line.note)
    if rest := lines[ROWS:]:
        done = sum(line.right is not None for line in rest)
        table.add_row("", f"[dim]and {len(rest)} more[/dim]", f"[dim]{done} of them done[/dim]")
    return table

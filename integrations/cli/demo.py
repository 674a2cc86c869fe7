"""`asyncengine demo`: the engine on its bundled models, as a short story in six scenes and a table.

With `--fleet N`: the generating model in N processes behind one engine's methods, in three scenes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import io
import re
import time
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from asyncengine.async_engine import AsyncEngine
from asyncengine.checks import as_integer
from asyncengine.config import EngineConfig
from asyncengine.integrations.cli.exits import FAILED, CliError
from asyncengine.integrations.cli.loading import on_thread, open_async_engine
from asyncengine.integrations.cli.options import engine_config
from asyncengine.integrations.cli.text import printable, write_json
from asyncengine.outputs import Usage
from asyncengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from asyncengine.integrations.fleet import Fleet

_WORDS = tomllib.loads((resources.files(__package__) / "story.toml").read_text(encoding="utf-8"))
SCENES, DOCUMENTS = _WORDS["scenes"], _WORDS["documents"]
ARCHIVE = "\n".join(DOCUMENTS[name] for name in _WORDS["archive"])
ABOUT_ARCHIVE, FOR_RETRIEVAL, SMALL_JOBS = _WORDS["questions"].values()

# The output of the demo: titled scenes, boards of requests that fill while they run, and a copy for a picture.

ROWS, WIDTH = 12, 100
"""Requests that a board shows (the others are counted), and columns of the output."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)


@dataclass(slots=True, eq=False)
class Line:
    """One request on a board: a question, the words that a right answer has, and the answer as far as it has come."""

    question: str
    expected: str
    note: str = ""
    answer: str = ""
    right: bool | None = None
    """Whether the answer is right; None until it has ended."""

    def check(self) -> None:
        """Compare the answer: whole words, ignoring case, for a river Askena is not the Asken."""
        self.right = re.search(rf"(?<!\w){re.escape(self.expected)}(?!\w)", self.answer, re.IGNORECASE) is not None


def counting(index: int) -> tuple[str, str]:
    """One of many questions that differ, and its answer."""
    low, high = index % 13, index % 13 + 4 + index % 5
    return f"Count from {low} to {high}.", ", ".join(str(n) for n in range(low, high + 1))


Ask = Callable[[Line], Awaitable[object]]
"""Asks a line's question and fills in its answer."""


async def answer(engine: AsyncEngine | Fleet, line: Line, text: str = "", **options: Any) -> Usage:
    """Stream the answer to the line's question about `text`, or its tool calls, into the line. Returns its token
    counts."""
    messages = [{"role": "system", "content": f"Answer from this text:\n\n{text}"}] if text else []
    chat = [*messages, {"role": "user", "content": line.question}]
    async with engine.stream_chat(chat, GREEDY, **options) as stream:
        async for chunk in stream:
            line.answer += chunk.text
        done = await stream.result()
        line.answer += ", ".join(f"{call.name}({call.arguments})" for call in done.tool_calls)
        return done.usage


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

    def title(self, scene: str, number: str = "", **figures: Any) -> str:
        """Begin a scene of story.toml. Returns its title."""
        title, story = (SCENES[scene][name].format_map(figures) for name in ("title", "story"))
        self.print("", Rule(f"[bold]{number}{title}[/bold]", align="left", style="cyan"), f"[dim]{story}[/dim]")
        return title

    async def ask(self, lines: Sequence[Line], ask: Ask) -> dict[str, Any]:
        """Ask all questions at once, on a board that is live on a terminal. Returns figures."""

        async def asked(line: Line) -> None:
            await ask(line)
            line.check()

        began = time.perf_counter()
        live = Live(console=self.console, get_renderable=lambda: board(lines), refresh_per_second=10, transient=True)
        with live if self._watched else contextlib.nullcontext():
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(asked(line))
        self.print(board(lines))
        return {"seconds": time.perf_counter() - began, "answers": [asdict(line) for line in lines]}

    def outcome(self, scene: str, figures: dict[str, Any], lines: Sequence[Line] = ()) -> None:
        """End a scene with its result in a sentence, and the number of right answers where `lines` were asked."""
        right = f" {sum(line.right is True for line in lines)} of {len(lines)} answers are right." if lines else ""
        self.print(f"[green]→[/green] {SCENES[scene]['outcome'].format_map(figures)}{right}")

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


ADAPTERS = {"pirate": "demo/pirate", "json": "demo/json"}
DEFAULTS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "32MiB", "show_progress": False}
"""One thread: matrices this small gain nothing from a second one. A small cache: its pages can be counted by eye."""
LEAVERS = 16
SOON = 0.002
"""Seconds between two checks of the page counts."""
STORIES, LONG = 12, SamplingParams(temperature=1.0, seed=7, max_tokens=400, ignore_eos=True)
"""Answers that are under way when a replica is killed, and their parameters."""


def run(args: argparse.Namespace) -> int:
    as_integer("streams", args.streams, 1)
    show = Show(quiet=args.json, picture=args.export_svg)
    if args.fleet is None:
        summary = asyncio.run(_story(show, engine_config(args, **DEFAULTS, adapters=ADAPTERS), args.streams))
    else:
        replicas = as_integer("fleet", args.fleet, 2)  # one of them is killed
        summary = asyncio.run(fleet_story(show, engine_config(args, **DEFAULTS), replicas, args.streams))
    if args.json:
        write_json(summary)
    try:
        show.save()
    except OSError as error:
        raise CliError(f"export_svg: {error}", FAILED) from error
    return 0


async def _story(show: Show, config: EngineConfig, streams: int) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        with show.busy("importing torch and loading the models"):
            engine = await stack.enter_async_context(open_async_engine("demo", config))
            like = EngineConfig(device=config.device, num_threads=config.num_threads, show_progress=False)
            embedder = await stack.enter_async_context(open_async_engine("demo-embed", like))
        info = engine.info
        show.print(
            f"[bold]asyncengine[/bold] has loaded its bundled model into this process: {info.weight_bytes / 1e6:.1f} "
            f"MB of {info.dtype} on {info.device}, {info.num_pages - 1} KV pages of {info.page_size} tokens. No "
            "server, no network."
        )
        scenes = Scenes(show, engine)
        await scenes.many_streams(streams)
        await scenes.shared_prefix()
        await scenes.retrieval(embedder)
        await scenes.forms()
        await scenes.three_voices()
        await scenes.cancellation()
        summary = _summary(engine, scenes.figures)
        show.title("figures")
        show.print(_table(summary))
        show.print("", "Next: [bold]asyncengine chat demo[/bold], or any Hugging Face model in place of demo.")
        return summary


class Scenes:
    """The scenes, on one engine. Each prints its board and outcome, and adds to `figures`."""

    def __init__(self, show: Show, engine: AsyncEngine) -> None:
        self.show, self.engine = show, engine
        self.figures: list[dict[str, Any]] = []

    async def _play(self, scene: str, lines: list[Line], ask: Ask, **more: Any) -> None:
        """Play a scene of story.toml. `more`: figures for its texts; a dict among them may be filled meanwhile."""
        before = self.engine.stats()
        title = self.show.title(scene, f"{len(self.figures) + 1}  ", count=len(lines), **more)
        figures = await self.show.ask(lines, ask)
        after = self.engine.stats()
        counts = ("generated_tokens", "steps", "cached_tokens", "prompt_tokens")
        counted = {name: getattr(after, name) - getattr(before, name) for name in counts}
        tokens = counted.pop("generated_tokens")
        rates = {"output_tokens": tokens, "rate": tokens / figures["seconds"]}
        self.figures.append({"scene": title, **figures, **more, **counted, **rates})
        self.show.outcome(scene, self.figures[-1], lines)

    async def many_streams(self, streams: int) -> None:
        model: Any = None
        with self.show.busy("importing LangChain"), contextlib.suppress(ImportError):
            importing = on_thread(lambda: importlib.import_module("asyncengine.integrations.langchain"))
            chat_engine = (await asyncio.wrap_future(importing)).ChatAsyncEngine
            model = chat_engine(engine=self.engine, temperature=0.0, max_tokens=GREEDY.max_tokens)

        async def ask(line: Line) -> None:
            if model is None:
                await answer(self.engine, line)
            else:
                async for piece in model.astream(line.question):
                    line.answer += piece.text

        questions = [*SMALL_JOBS, *map(counting, range(streams))][:streams]
        through = "the plain API" if model is None else "LangChain"
        await self._play("many_streams", [Line(*each) for each in questions], ask, through=through)

    async def shared_prefix(self) -> None:
        async def ask(line: Line) -> None:
            usage = await answer(self.engine, line, ARCHIVE)
            line.note = f"{usage.cached_tokens} of {usage.prompt_tokens} cached"

        await self._play("shared_prefix", [Line(*each) for each in ABOUT_ARCHIVE], ask)

    async def retrieval(self, embedder: AsyncEngine) -> None:
        vectors = (await embedder.embed(list(DOCUMENTS.values()), prompt_name="document")).vectors

        async def ask(line: Line) -> None:
            query = await embedder.embed(line.question, prompt_name="query")
            line.note = list(DOCUMENTS)[int((vectors @ query.vectors[0]).argmax())]
            await answer(self.engine, line, DOCUMENTS[line.note])

        await self._play("retrieval", [Line(*each) for each in FOR_RETRIEVAL], ask)

    async def forms(self) -> None:
        options = {Line(*each["line"]): each["options"] for each in SCENES["forms"]["asked"]}
        await self._play("forms", list(options), lambda line: answer(self.engine, line, **options[line]))

    async def three_voices(self) -> None:
        questions = ABOUT_ARCHIVE[1], ABOUT_ARCHIVE[8], SMALL_JOBS[1], SMALL_JOBS[2]

        async def ask(line: Line) -> None:
            text = ARCHIVE if line.question in dict(ABOUT_ARCHIVE) else ""
            await answer(self.engine, line, text, adapter=line.note if line.note in ADAPTERS else None)

        lines = [Line(question, right, voice) for question, right in questions for voice in ("base", *ADAPTERS)]
        await self._play("three_voices", lines, ask)

    async def cancellation(self) -> None:
        under_way = asyncio.Barrier(LEAVERS)
        pages = {"before": self._pages_in_use()}

        async def read(index: int) -> None:
            chat = [{"role": "user", "content": f"Tell me a story about a cat named Lio{index}."}]
            async with self.engine.stream_chat(chat, GREEDY.replace(max_tokens=1024, ignore_eos=True)) as stream:
                await anext(stream)
                await under_way.wait()
                pages["reading"] = self._pages_in_use()
                for reader in readers:
                    reader.cancel()

        async def ask(line: Line) -> None:
            await answer(self.engine, line)
            while self._pages_in_use():  # noqa: ASYNC110  # to see pages return is the point of the scene
                await asyncio.sleep(SOON)
            pages["after"] = self._pages_in_use()

        readers = [asyncio.create_task(read(index)) for index in range(LEAVERS)]
        lines = [Line(*SMALL_JOBS[index]) for index in (2, 3, 5, 10)]
        await self._play("cancellation", lines, ask, pages=pages, cancelled=LEAVERS)

    def _pages_in_use(self) -> int:
        pages = self.engine.stats().pages
        return pages.held + pages.shared + pages.retiring


def _summary(engine: AsyncEngine, scenes: list[dict[str, Any]]) -> dict[str, Any]:
    stats, answers = engine.stats(), [line for scene in scenes for line in scene["answers"]]
    times = {"first_token": stats.first_token, "inter_token": stats.inter_token, "step": stats.step}
    counts = ("finished", "prompt_tokens", "cached_tokens", "hit_rate", "preemptions", "tokens_per_pass")
    tokens, seconds = stats.generated_tokens, sum(scene["seconds"] for scene in scenes)
    return {
        "model": engine.info.name, "dtype": engine.info.dtype, "requests": sum(stats.finished.values()),
        **{name: getattr(stats, name) for name in counts},
        "right_answers": sum(line["right"] for line in answers), "checked_answers": len(answers),
        "output_tokens": tokens, "tokens_per_second": tokens / seconds,
        **{f"{name}_ms": {"p50": summary.p50 * 1000, "p99": summary.p99 * 1000} for name, summary in times.items()},
        "scenes": scenes,
    }  # fmt: skip


def _table(summary: dict[str, Any]) -> Table:
    columns = Column(style="cyan"), Column(style="bold", justify="right"), Column(style="dim")
    table = Table(*columns, box=None, padding=(0, 2), show_header=False)
    ended = ", ".join(f"{count} {reason}" for reason, count in summary["finished"].items())
    for row in SCENES["figures"]["rows"]:
        table.add_row(*(cell.format_map({**summary, "ended": ended}) for cell in row))
    return table


async def fleet_story(show: Show, config: EngineConfig, replicas: int, streams: int) -> dict[str, Any]:
    """Play the scenes of `--fleet`. Raises `FleetError` where no process can be started."""
    from asyncengine.integrations.fleet import Fleet

    with show.busy(f"starting {replicas} processes with the model"):
        fleet = await Fleet.from_pretrained("demo", config=config, replicas=replicas, address="local", on_loss="resume")
    async with fleet:
        show.print(f"[bold]asyncengine[/bold] has loaded its bundled model into {replicas} processes of this machine.")
        lines = [Line(*SMALL_JOBS[index % len(SMALL_JOBS)]) for index in range(streams)]
        show.title("replicas", count=streams, replicas=replicas)
        many = await show.ask(lines, lambda line: answer(fleet, line))
        shares = [sum(stats.finished.values()) for stats in (await fleet.replica_stats()).values()]
        show.outcome("replicas", {"listed": ", ".join(map(str, shares))}, lines)

        show.title("one_prefix")
        about = [Line(*question) for question in ABOUT_ARCHIVE[:6]]
        cached = [(await answer(fleet, line, ARCHIVE)).cached_tokens for line in about]
        show.outcome("one_prefix", {"listed": ", ".join(map(str, cached))})

        show.title("killing", count=STORIES)
        texts = [f"Tell me a story about a cat named Lio{index}." for index in range(STORIES)]
        undisturbed = await asyncio.gather(*(fleet.generate(text, LONG) for text in texts))
        begun = [fleet.stream(text, LONG) for text in texts]
        for stream in begun:
            await anext(stream)
        killed = await fleet.kill_one()
        ended = await asyncio.gather(*(stream.result() for stream in begun))
        same = sum(first.token_ids == second.token_ids for first, second in zip(undisturbed, ended, strict=True))
        loss = {"resumed": fleet.stats().resumed, "same": same, "of": STORIES}
        show.outcome("killing", {"killed": killed, **loss})
        streamed, prefixes = {**many, "shares": shares}, {"cached_tokens": cached}
        return {"replicas": replicas, "streams": streamed, "prefixes": prefixes, "loss": loss}

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
from asyncengine.checks import as_integer
from asyncengine.config import EngineConfig
from asyncengine.integrations.cli import documents
from asyncengine.integrations.cli.errors import FAILED, CliError
from asyncengine.integrations.cli.loading import on_thread, open_async_engine
from asyncengine.integrations.cli.options import engine_config
from asyncengine.integrations.cli.text import printable, write_json
from asyncengine.outputs import Usage
from asyncengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from asyncengine.integrations.fleet import Fleet

# The output of the demo: titled scenes, boards of requests that fill while they run, and a copy for a picture.

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


ADAPTERS = {"pirate": "demo/pirate", "json": "demo/json"}
DEFAULTS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "32MiB", "show_progress": False}
"""One thread: matrices this small gain nothing from a second one. A small cache: its pages can be counted by eye."""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the current weather for a city.", "parameters": CITY}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}
LEAVERS = 16
SOON = 0.002
"""Seconds between two looks at the page counts."""
STORIES, LONG = 12, SamplingParams(temperature=1.0, seed=7, max_tokens=400, ignore_eos=True)
"""Answers that are under way when a replica is killed, and their parameters."""
FIGURES = (
    ("requests", "{requests}", "{ended}"),
    ("right answers", "{right_answers} of {checked_answers}", "by the words that they must hold"),
    ("output tokens", "{output_tokens}", "{tokens_per_second:.0f} per second"),
    ("tokens per pass", "{tokens_per_pass:.2f}", "of one request: above 1 where guesses came true"),
    ("prompt tokens", "{prompt_tokens}", "{hit_rate:.0%} from the prefix cache"),
    ("first token", "{first_token_ms[p50]:.1f} / {first_token_ms[p99]:.1f} ms", "p50 / p99, from submit"),
    ("between tokens", "{inter_token_ms[p50]:.1f} / {inter_token_ms[p99]:.1f} ms", "p50 / p99"),
    ("one step", "{step_ms[p50]:.1f} / {step_ms[p99]:.1f} ms", "p50 / p99, a forward pass for all"),
    ("preemptions", "{preemptions}", "requests that gave way and resumed"),
)


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
        show.title("In figures", "Everything above, in one process.")
        show.print(_table(summary))
        show.print("", "Next: [bold]asyncengine chat demo[/bold], or any Hugging Face model in place of demo.")
        return summary


class Scenes:
    """The scenes, on one engine. Each prints what there is to see, and adds to `figures`."""

    def __init__(self, show: Show, engine: AsyncEngine) -> None:
        self.show, self.engine = show, engine
        self.figures: list[dict[str, Any]] = []

    async def _play(self, title: str, story: str, lines: list[Line], ask: Ask, outcome: str, **more: Any) -> None:
        """Play a scene, and print its `outcome` with its figures filled in."""
        before = self.engine.stats()
        figures = await self.show.scene(f"{len(self.figures) + 1}  {title}", story, lines, ask)
        after = self.engine.stats()
        tokens, steps = after.generated_tokens - before.generated_tokens, after.steps - before.steps
        more |= {"output_tokens": tokens, "steps": steps, "cached_tokens": after.cached_tokens - before.cached_tokens}
        more |= {"prompt_tokens": after.prompt_tokens - before.prompt_tokens, "rate": tokens / figures["seconds"]}
        self.figures.append({"scene": title, **figures, **more})
        self.show.outcome(outcome.format_map(self.figures[-1]), lines)

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

        questions = [
            *documents.SMALL_JOBS,
            *map(documents.counting, range(max(0, streams - len(documents.SMALL_JOBS)))),
        ][:streams]
        through = "the plain API" if model is None else "LangChain"
        story = f"Each line is a request of its own through {through}. They share every forward pass."
        outcome = "{output_tokens} tokens in {seconds:.1f} s: [bold]{rate:.0f} tokens/s[/bold]."
        lines = [Line(*question) for question in questions]
        await self._play(f"{streams} streams at once", story, lines, ask, outcome, through=through)

    async def shared_prefix(self) -> None:
        async def ask(line: Line) -> None:
            usage = await answer(self.engine, line, documents.ARCHIVE)
            line.note = f"{usage.cached_tokens} of {usage.prompt_tokens} cached"

        story = "The same text stands before every question. The engine computes it once and keeps its pages."
        outcome = "{prompt_tokens} prompt tokens, [bold]{cached_tokens} from the prefix cache[/bold]."
        await self._play(
            "One text, many questions", story, [Line(*each) for each in documents.ABOUT_ARCHIVE], ask, outcome
        )

    async def retrieval(self, embedder: AsyncEngine) -> None:
        vectors = (await embedder.embed(list(documents.DOCUMENTS.values()), prompt_name="document")).vectors

        async def ask(line: Line) -> None:
            found = await embedder.embed(line.question, prompt_name="query")
            line.note = list(documents.DOCUMENTS)[int((vectors @ found.vectors[0]).argmax())]
            await answer(self.engine, line, documents.DOCUMENTS[line.note])

        story = "A second engine finds the document nearest to each question; the first one answers from it."
        lines = [Line(*question) for question in documents.FOR_RETRIEVAL]
        await self._play("Answers from documents", story, lines, ask, "Two models in one process.")

    async def forms(self) -> None:
        call = Line("What is the weather in Oslo?", 'get_weather({"city": "Oslo"})', "tool call")
        text = "Extract the name and age as JSON.\n\nIda Lund is 34 years old."
        lines = [call, Line(text, '{"name": "Ida Lund", "age": 34}', "JSON schema")]

        async def ask(line: Line) -> None:
            messages = [{"role": "user", "content": line.question}]
            if line is call:
                done = await self.engine.chat(messages, GREEDY, tools=[{"type": "function", "function": WEATHER}])
                line.answer = ", ".join(f"{each.name}({each.arguments})" for each in done.tool_calls)
            else:
                line.answer = (await self.engine.chat(messages, GREEDY, response_format=PERSON)).text

        story = "A grammar holds each answer to its form, token by token, in the same batch as free text."
        outcome = "Valid whatever the model would have liked to write."
        await self._play("Tool calls, and JSON that always ends", story, lines, ask, outcome)

    async def three_voices(self) -> None:
        asked = documents.ABOUT_ARCHIVE[1], documents.ABOUT_ARCHIVE[8], documents.SMALL_JOBS[1], documents.SMALL_JOBS[2]

        async def ask(line: Line) -> None:
            text = documents.ARCHIVE if line.question in dict(documents.ABOUT_ARCHIVE) else ""
            await answer(self.engine, line, text, line.note if line.note in ADAPTERS else None)

        story = f"The base model and its LoRA adapters {' and '.join(ADAPTERS)} answer the same questions."
        lines = [Line(*question, voice) for question in asked for voice in ("base", *ADAPTERS)]
        outcome = "{output_tokens} tokens in {steps} forward passes."
        await self._play("One model, three voices in one batch", story, lines, ask, outcome)

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
        lines = [Line(*documents.SMALL_JOBS[index]) for index in (2, 3, 5, 10)]
        story = f"{LEAVERS} readers ask for long stories and are cancelled in the middle; others read to the end."
        outcome = "{pages[reading]} pages in use while all read, then {pages[after]}."
        await self._play("Leaving costs nothing", story, lines, ask, outcome, pages=pages, cancelled=LEAVERS)

    def _pages_in_use(self) -> int:
        pages = self.engine.stats().pages
        return pages.held + pages.shared + pages.retiring


def _summary(engine: AsyncEngine, scenes: list[dict[str, Any]]) -> dict[str, Any]:
    stats, answers = engine.stats(), [line for scene in scenes for line in scene["answers"]]
    times = {"first_token": stats.first_token, "inter_token": stats.inter_token, "step": stats.step}
    return {
        "model": engine.info.name,
        "dtype": engine.info.dtype,
        "requests": sum(stats.finished.values()),
        "finished": stats.finished,
        "right_answers": sum(line["right"] for line in answers),
        "checked_answers": len(answers),
        "output_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "hit_rate": stats.hit_rate,
        "tokens_per_second": stats.generated_tokens / sum(scene["seconds"] for scene in scenes),
        **{f"{name}_ms": {"p50": one.p50 * 1000, "p99": one.p99 * 1000} for name, one in times.items()},
        "preemptions": stats.preemptions,
        "tokens_per_pass": stats.tokens_per_pass,
        "scenes": scenes,
    }


def _table(summary: dict[str, Any]) -> Table:
    columns = Column(style="cyan"), Column(style="bold", justify="right"), Column(style="dim")
    table = Table(*columns, box=None, padding=(0, 2), show_header=False)
    ended = ", ".join(f"{count} {reason}" for reason, count in summary["finished"].items())
    for row in FIGURES:
        table.add_row(*(cell.format_map({**summary, "ended": ended}) for cell in row))
    return table


async def fleet_story(show: Show, config: EngineConfig, replicas: int, streams: int) -> dict[str, Any]:
    """Play the scenes of `--fleet`. Raises `FleetError` where no process can be started."""
    from asyncengine.integrations.fleet import Fleet

    with show.busy(f"starting {replicas} processes with the model"):
        fleet = await Fleet.from_pretrained("demo", config=config, replicas=replicas, address="local", on_loss="resume")
    async with fleet:
        show.print(f"[bold]asyncengine[/bold] has loaded its bundled model into {replicas} processes of this machine.")
        lines = [Line(*documents.SMALL_JOBS[index % len(documents.SMALL_JOBS)]) for index in range(streams)]
        title = f"1  {streams} streams over {replicas} replicas"
        caption = "Each goes where there is least to do."
        many = await show.scene(title, caption, lines, lambda line: answer(fleet, line))
        shares = [sum(stats.finished.values()) for stats in (await fleet.replica_stats()).values()]
        show.outcome(f"The replicas answered {', '.join(map(str, shares))} of them.", lines)

        show.title("2  A prefix is computed once", "Questions about one text go where its keys and values are.")
        about = [Line(*question) for question in documents.ABOUT_ARCHIVE[:6]]
        cached = [(await answer(fleet, line, documents.ARCHIVE)).cached_tokens for line in about]
        show.print(f"[green]→[/green] Prompt tokens found in a cache: {', '.join(map(str, cached))}.")

        show.title("3  A replica is killed", f"{STORIES} long answers are under way. Those of the lost one go on.")
        texts = [f"Tell me a story about a cat named Lio{index}." for index in range(STORIES)]
        undisturbed = await asyncio.gather(*(fleet.generate(text, LONG) for text in texts))
        begun = [fleet.stream(text, LONG) for text in texts]
        for stream in begun:
            await anext(stream)
        killed = await fleet.kill_one()
        ended = await asyncio.gather(*(stream.result() for stream in begun))
        same = sum(one.token_ids == other.token_ids for one, other in zip(undisturbed, ended, strict=True))
        loss = {"resumed": fleet.stats().resumed, "same": same, "of": STORIES}
        result = "{resumed} answers went on elsewhere; {same} of {of} are, token for token, what they are undisturbed."
        show.print(f"[green]→[/green] {killed} is gone. {result.format_map(loss)}")
        streamed, prefixes = {**many, "shares": shares}, {"cached_tokens": cached}
        return {"replicas": replicas, "streams": streamed, "prefixes": prefixes, "loss": loss}

"""`asyncengine embed`: a vector for each line of stdin, to a .npy file or as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from numpy.lib.format import write_array_header_1_0

from asyncengine.checks import as_integer
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.cli.exits import CliError
from asyncengine.integrations.cli.loading import open_engine
from asyncengine.integrations.cli.options import engine_config
from asyncengine.outputs import Embeddings
from asyncengine.sync_engine import Engine

KEYWORDS = ("prompt_name", "prompt", "dimensions", "normalize", "truncate")
"""Flags that are keywords of `Engine.embed`."""
CHUNK_LINES = 2048
"""Lines in memory at once, with their vectors: enough for many batches."""
CHUNK_CHARACTERS = 4_000_000
"""Most characters in memory at once, for long lines; a chunk ends with the line that passes this."""
Sink = Callable[[Embeddings], None]
"""Takes the vectors of one chunk after another."""


def run(args: argparse.Namespace) -> int:
    path = _output(args.output)
    if args.dimensions is not None:
        as_integer("dimensions", args.dimensions, 1)
    config = engine_config(args, show_progress=sys.stderr.isatty())
    lines = _lines()
    with open_engine(args.model, config) as engine, _sink(path, engine) as sink, _progress() as advance:
        done, cut = 0, 0
        for texts in chunks(lines):
            embeddings = _embedded(engine, texts, done, args)
            sink(embeddings)
            done, cut = done + len(texts), cut + len(embeddings.truncated)
            advance(len(texts))
    if cut:
        print(f"{cut} of {done} texts were longer than the model reads and have been cut", file=sys.stderr)
    return 0


def _embedded(engine: Engine, texts: list[str], before: int, args: argparse.Namespace) -> Embeddings:
    """The texts' vectors. `before`: number of lines before them. Raises `CliError` for a line that is refused."""
    try:
        return engine.embed(texts, show_progress=False, **{name: getattr(args, name) for name in KEYWORDS})
    except InvalidParameter as error:
        index = re.fullmatch(r"texts\[(\d+)\]", error.field)
        if index is None:
            raise
        raise CliError(f"line {before + int(index[1]) + 1}: {error.limit}") from error


def _output(name: str) -> Path | None:
    """The file to write; None for stdout. Raises `CliError`."""
    if name == "-":
        return None
    path = Path(name)
    if path.suffix not in (".npy", ".jsonl"):
        raise CliError(f'output: must end in .npy or .jsonl, or be "-" for JSON lines on stdout, got {name}')
    if not path.absolute().parent.is_dir():
        raise CliError(f"output: there is no folder {path.parent}")
    return path


def _lines() -> Iterator[str]:
    """Lines of stdin without their ends. Raises `CliError` where they are no text."""
    number = 0
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
            number += 1
    except UnicodeDecodeError as error:
        raise CliError(f"stdin: line {number + 1} or one soon after it is not {error.encoding}") from error


def chunks(lines: Iterator[str]) -> Iterator[list[str]]:
    """Lists of lines within the limits of one chunk."""
    chunk, characters = list[str](), 0
    for line in lines:
        chunk.append(line)
        characters += len(line)
        if len(chunk) == CHUNK_LINES or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


@contextlib.contextmanager
def _sink(path: Path | None, engine: Engine) -> Iterator[Sink]:
    """The sink of the vectors. A file appears under its name once it is complete."""
    if path is None:
        yield json_lines(sys.stdout.write)
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        if path.suffix == ".npy":
            with partial.open("wb") as file, npy_file(file, engine.info.dimensions or 0) as rows:
                yield rows
        else:
            with partial.open("w", encoding="utf-8") as text:
                yield json_lines(text.write)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def json_lines(write: Callable[[str], Any]) -> Sink:
    """Write one object for each text: its index, its vector, and whether it was cut."""
    count = itertools.count()

    def sink(embeddings: Embeddings) -> None:
        cut = set(embeddings.truncated)
        for index, vector in enumerate(embeddings.vectors):
            # nine digits name a float32 exactly; the digits of the float64 that Python makes of it say no more
            numbers = [float(f"{number:.9g}") for number in vector.tolist()]
            more = {"truncated": True} if index in cut else {}
            write(json.dumps({"index": next(count), "embedding": numbers, **more}) + "\n")

    return sink


@contextlib.contextmanager
def npy_file(file: BinaryIO, columns: int) -> Iterator[Sink]:
    """A .npy file that grows row by row: its header, in which NumPy leaves room for any number of rows, is written
    again at the end. `columns`: number of columns that a file without rows states."""
    rows = 0

    def header() -> None:
        file.seek(0)
        write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)})

    def sink(embeddings: Embeddings) -> None:
        nonlocal rows, columns
        columns = embeddings.vectors.shape[1]
        file.write(embeddings.vectors.astype("<f4").tobytes())
        rows += len(embeddings.vectors)

    header()
    yield sink
    header()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show a count and a rate if stderr is a terminal, with a bar if stdin is a file, whose size is known."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    size, done = None, 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a test's stdin is no real file
        status = os.fstat(sys.stdin.fileno())
        size = status.st_size if stat.S_ISREG(status.st_mode) else None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("0 texts", total=size)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            at = sys.stdin.buffer.tell() if size is not None else None
            bar.update(
                task, completed=at, description=f"{done} texts, {done / max(bar.tasks[0].elapsed or 0, 1e-3):.0f}/s"
            )

        yield advance

"""`asyncengine cache`: list, verify or clear a prefix cache on a disk. No model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from asyncengine.assembly.stores import folder_of
from asyncengine.integrations.cli.exits import FAILED, CliError
from asyncengine.integrations.cli.text import write, write_json
from asyncengine.integrations.placement.nodes import size
from asyncengine.kvcache.store.disk import SystemDisk
from asyncengine.kvcache.store.survey import ModelRecords, clear, survey


def run(args: argparse.Namespace) -> int:
    folder = folder_of(args.folder or True)
    if not folder.is_dir():
        raise CliError(f"FOLDER: must be a folder of prefixes, and there is none at {folder}")
    try:
        return _clear(folder, args.json) if args.action == "clear" else _show(folder, args)
    except OSError as error:
        raise CliError(f"FOLDER: {folder}: {error}", FAILED) from None


def _show(folder: Path, args: argparse.Namespace) -> int:
    models = survey(SystemDisk(), str(folder), verify=args.action == "verify")
    broken = any(model.damaged or model.unreadable for model in models)
    if args.json:
        write_json({"folder": str(folder), "models": [asdict(model) for model in models]})
    else:
        _print(folder, models)
        if args.action == "verify":
            write(
                "Some records are damaged; engines compute instead of using them.\n" if broken else "All are whole.\n"
            )
    return FAILED if broken and args.action == "verify" else 0


def _print(folder: Path, models: Sequence[ModelRecords]) -> None:
    names = ("bytes", "segments", "records", "tokens", "damaged", "unreadable")
    columns: list[Column | str] = ["model", *(Column(name, justify="right") for name in names), ""]
    table = Table(*columns, title=f"{folder}: {size(sum(model.bytes for model in models))}", title_justify="left")
    for model in models:
        figures = model.segments, model.records, model.tokens, model.damaged, model.unreadable
        written = "an engine writes it" if model.being_written else ""
        table.add_row(model.fingerprint[:12], size(model.bytes), *map(str, figures), written)
    Console(width=100).print(table)


def _clear(folder: Path, as_json: bool) -> int:
    removed, kept = clear(SystemDisk(), str(folder))
    if as_json:
        write_json({"folder": str(folder), "bytes_removed": removed, "kept": kept})
    else:
        write(f"Removed {size(removed)} from {folder}.\n")
        for fingerprint in kept:
            write(f"{fingerprint[:12]} stays: an engine writes it. Close that one first.\n")
    return FAILED if kept else 0

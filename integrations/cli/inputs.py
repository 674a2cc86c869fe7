"""Files on a command line: LoRA adapters, of which one answers, and pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from asyncengine.config import AdapterSettings
from asyncengine.demo import resolve_adapter
from asyncengine.errors import AdapterError
from asyncengine.info import ModelInfo
from asyncengine.integrations.cli.exits import CliError
from asyncengine.lora.checkpoint.files import find_folder, read_config


def name_and_path(text: str) -> tuple[str, str]:
    """The value of `--adapter` in two parts. The path may hold "=", the name cannot."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, path


def given_adapters(args: argparse.Namespace) -> dict[str, str]:
    """Name -> folder of every `--adapter`. Raises `CliError` for a name that is there twice."""
    adapters: dict[str, str] = {}
    for name, path in args.adapter:
        if name in adapters:
            raise CliError(f"adapter: {name!r} is given twice")
        adapters[name] = path
    return adapters


def chosen_adapter(args: argparse.Namespace) -> str | None:
    """The name of the adapter that answers: `--use`, or the only one given. None: the base model alone.

    Raises `CliError` for several without `--use`, and for a name that no adapter has.
    """
    names = list(given_adapters(args))
    if args.use is None:
        if len(names) > 1:
            raise CliError(f"use: several adapters are given; choose with --use: {', '.join(names)}")
        return names[0] if names else None
    if args.use == args.model:
        return None
    if args.use not in names and not hasattr(args, "adapter_root"):
        listed = ", ".join(map(repr, names)) or "none is given: add --adapter NAME=PATH"
        raise CliError(f"use: must be the name of an adapter ({listed}), got {args.use!r}")
    return str(args.use)


def check_adapters(config: AdapterSettings) -> None:
    """Refuse wrong paths at once, for importing torch and loading the model take seconds. Raises `CliError`."""
    root = None if config.adapter_root is None else Path(config.adapter_root).expanduser().resolve()
    if root is not None and not root.is_dir():
        raise CliError(f"adapter_root: is no folder, got {config.adapter_root!r}")
    for name, path in dict(config.adapters).items():
        try:
            read_config(find_folder(resolve_adapter(path, config.adapter_root), root), root)
        except AdapterError as error:
            raise CliError(f"adapter {name!r}: {error}") from error


def image_part(path: str | Path, most: int) -> dict[str, Any]:
    """The content part of a picture. Its file is read now, so that a later change of it does not change the
    conversation; at most one byte over the engine's limit of `most`, which refuses it then. Raises `CliError`."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return {"type": "image", "image": file.read(most + 1)}
    except (OSError, ValueError, RuntimeError) as error:
        raise CliError(f"image: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def check_reads_images(info: ModelInfo) -> None:
    """Raises `CliError` for a model that reads no pictures."""
    if info.no_images is not None:
        raise CliError(f"image: {info.name} takes no pictures: {info.no_images}")

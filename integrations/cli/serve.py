"""`asyncengine serve`: models over HTTP, for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncengine.config import EngineConfig
from asyncengine.engine_group import EngineGroup
from asyncengine.execution.models.hub import short_name
from asyncengine.integrations.cli.exits import FAILED, INTERRUPTED, CliError
from asyncengine.integrations.cli.inputs import given_adapters
from asyncengine.integrations.cli.loading import check_paths
from asyncengine.integrations.cli.options import given
from asyncengine.integrations.http.settings import ServerSettings

log = logging.getLogger("asyncengine.serve")
TABLES = ("server", "engine", "models", "aliases", "keys")
KEEP_ALIVE = "5m"
"""The `keep_alive` of models of a configuration file that sets none."""


@dataclass(slots=True)
class Plan:
    """A server as flags and a configuration file describe it."""

    settings: ServerSettings
    models: dict[str, dict[str, Any]]
    aliases: dict[str, str] = field(default_factory=dict)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Named keys, with their settings."""
    preload: list[str] = field(default_factory=list)
    """Models with `keep_alive` that are loaded at the start, and not at their first request."""


def run(args: argparse.Namespace) -> int:
    plan = read_plan(args)
    try:
        from asyncengine.integrations.http import asgi, requests, server  # noqa: F401

        if plan.settings.telemetry:
            import asyncengine.integrations.opentelemetry  # noqa: F401
    except ImportError as error:
        lacking = (error.name or "").partition(".")[0]  # empty if our own code raised it, with the extra in its text
        message = f'serve needs {lacking}: pip install "asyncengine[serve]"' if lacking else str(error)
        raise CliError(message, FAILED) from error
    keys = plan.settings.keys(plan.keys)
    check_models(plan)
    logging.basicConfig(level=plan.settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if plan.settings.log_json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(requests.JsonLines())
    if plan.settings.insecure:
        print("asyncengine: --insecure: everybody who reaches this server may use it", file=sys.stderr)
    server.allow_many_connections()
    listener = server.bind(plan.settings)
    try:
        number = asyncio.run(_serve(plan, keys, listener))
    finally:
        listener.close()
    print("stopped", file=sys.stderr)
    return INTERRUPTED if number == signal.SIGINT else 0


def check_models(plan: Plan) -> None:
    """Refuse wrong paths and settings at once. Raises as `check_paths`."""
    for setup in plan.models.values():
        config = {name: value for name, value in setup.items() if name not in ("model", "keep_alive")}
        check_paths(setup["model"], EngineConfig.from_dict(config))


async def _serve(plan: Plan, keys: tuple[str, ...], listener: Any) -> int:
    from asyncengine.integrations.http import app, server

    settings = plan.settings
    log.info("loading %s", ", ".join(plan.models))
    async with await EngineGroup.from_pretrained(plan.models, memory=settings.memory, policy="priority") as group:
        for name in plan.preload:
            async with group.using(name):
                pass
        served = app(
            group, api_keys=keys, keys=plan.keys, aliases=plan.aliases, strict=settings.strict, hosts=settings.hosts,
            max_body=settings.max_body, response_memory=int(settings.response_memory), cors=settings.cors,
            allow_adapters=settings.allow_adapters or settings.insecure, telemetry=settings.telemetry,
            batch_dir=settings.batch_dir,
        )  # fmt: skip
        address = server.address_of(listener, "https" if settings.ssl_certfile else "http")
        ready = f"serving {', '.join(group)} at {address} (Ctrl-C stops it)"
        running = server.Server(served, settings, lambda: print(ready, flush=True))
        return await server.until_stopped(running, listener, group)


def read_plan(args: argparse.Namespace) -> Plan:
    """The plan of a command line, over that of its configuration file. Raises `CliError`, `InvalidParameter`."""
    written = {} if args.config is None else _read_file(args.config)
    settings = ServerSettings.from_dict({**written.get("server", {}), **given(args, ServerSettings)})
    keep_alive = settings.keep_alive if args.config is None or settings.keep_alive is not None else KEEP_ALIVE
    common = {**written.get("engine", {}), **given(args, EngineConfig)}
    plan = Plan(settings, {}, dict(written.get("aliases", {})), dict(written.get("keys", {})))
    for name, setup in written.get("models", {}).items():
        _add(plan, name, {"keep_alive": keep_alive, **common, **setup})
    for text in args.models:
        name, _, model = text.partition("=")
        if not model or "/" in name or os.path.exists(text):
            name, model = short_name(text), text
            plan.aliases |= {text: name} if text != name else {}
        _add(plan, name, {"keep_alive": keep_alive, **common, "model": model})
    if not plan.models:
        raise CliError("models: name a MODEL, or several, or a --config FILE with [models.NAME]")
    plan.aliases |= dict(args.alias) | ({"": settings.default_model} if settings.default_model else {})
    if adapters := given_adapters(args):
        if len(plan.models) > 1:
            raise CliError("adapter: say in a --config FILE to which of several models it belongs")
        setup = next(iter(plan.models.values()))
        setup["adapters"] = {**setup.get("adapters", {}), **adapters}
    names = list(plan.models)
    for setup in plan.models.values():
        names += adapter_table if isinstance(adapter_table := setup.get("adapters"), Mapping) else ()
    for name, meant in plan.aliases.items():
        if meant not in names:
            title = f"alias {name!r}" if name else "default_model"
            raise CliError(f"{title}: must be another name of {' or '.join(map(repr, names))}, got {meant!r}")
    return plan


def _add(plan: Plan, name: str, setup: dict[str, Any]) -> None:
    if name in plan.models:
        raise CliError(f"models: {name!r} is there twice: name them apart, NAME=MODEL")
    aliases = setup.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise CliError(f"models.{name}.aliases: must be a list of names")
    plan.aliases |= dict.fromkeys(aliases, name)
    if setup.pop("preload", False):
        plan.preload.append(name)
    if not isinstance(setup.get("model"), str):
        raise CliError(f"models.{name}.model: must be a folder, a file, a hub id or an address")
    plan.models[name] = {key: value for key, value in setup.items() if value is not None}


def _read_file(path: str) -> Mapping[str, Any]:
    """The tables of a configuration file. Raises `CliError` for one that is no such file."""
    try:
        tables = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"config: {path}: {error.strerror}") from error
    except ValueError as error:
        raise CliError(f"config: {path}: {error}") from error
    for name, table in tables.items():
        if name not in TABLES:
            raise CliError(f"config: {path}: has no use for [{name}]; known: {', '.join(TABLES)}")
        outer = name in ("models", "keys")
        inner = table.values() if outer and isinstance(table, dict) else ()
        if not all(isinstance(value, dict) for value in (table, *inner)):
            raise CliError(f"config: {path}: {name} must be a table" + (" of tables" if outer else ""))
    return tables

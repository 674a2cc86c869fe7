"""Parts that the suites share: the demo model behind an app, other projects' sources, and environments for them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvicorn

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app
from asyncengine.integrations.http.server import address_of, bind
from asyncengine.integrations.http.settings import ServerSettings

Wrap = Callable[[Any], Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every suite has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--source", type=Path, help="a copy of the project at hand, instead of fetching it")
    made.add_argument("--work", type=Path, default=Path("suites-work"), help="folder for what is fetched and installed")
    return made


@contextlib.contextmanager
def demo_server(
    wrap: Wrap = lambda made: made,
    model: Mapping[str, Any] | None = None,
    others: Mapping[str, Mapping[str, Any]] = MappingProxyType({"text-embedding-3-small": {"model": "demo-embed"}}),
    **settings: Any,
) -> Iterator[str]:
    """Base URL of an app that answers every model's name with the demo model, but those of `others` with engines of
    their own (that of OpenAI's small embedder with the demo embedder). `wrap`: what is put around the app.

    `model`: settings of the demo model's engine; "model" among them is another one. `others` are such settings by
    names. `settings` are keywords of `asyncengine.integrations.http.app`.
    """
    listener = bind(ServerSettings(port=0))
    started, servers = threading.Event(), list[uvicorn.Server]()

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            engines = {}
            for name, given in {"demo": {"model": "demo", **(model or {})}, **others}.items():
                engine = await AsyncEngine.from_pretrained(**{"show_progress": False, **given})
                engines[name] = await stack.enter_async_context(engine)
            made = wrap(app(engines, aliases={"*": "demo"}, **settings))
            server = uvicorn.Server(uvicorn.Config(made, log_level="error"))
            servers.append(server)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            started.set()
            await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="demo-server")
    thread.start()
    started.wait()
    try:
        yield address_of(listener)
    finally:
        servers[0].should_exit = True
        thread.join()


def source(given: Path | None, repository: str, reference: str, work: Path) -> Path:
    """The folder of a project's source: the copy `given`, or `reference` (a tag or branch) fetched into `work`."""
    if given is not None:
        return given.resolve()
    folder = (work / repository.rpartition("/")[2]).resolve()
    if not folder.exists():
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", reference, f"https://github.com/{repository}"]
        subprocess.run([*command, str(folder)], check=True)
    return folder


def sdist(given: Path | None, name: str, version: str, work: Path) -> Path:
    """The folder of a package's source: the copy `given`, or what its index has of that version."""
    if given is not None:
        return given.resolve()
    folder = (work / f"{name}-{version}").resolve()
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
        subprocess.run([*command, f"{name}=={version}", "--dest", str(work)], check=True)
        with tarfile.open(work / f"{name}-{version}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    return folder


def unbuilt(given: Path | None, name: str, version: str, work: Path) -> Path:
    """The same of a package that cannot even be asked for its metadata without a GPU's tools: what pip has unpacked
    when it fails."""
    folder = (work / f"{name}-{version}").resolve() if given is None else given.resolve()
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=work) as own:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-clean", "--no-build-isolation"]
            command += ["--no-deps", "--no-binary", name, f"{name}=={version}", "--dest", own]
            subprocess.run(command, check=False, capture_output=True, env={**os.environ, "TMPDIR": own})
            (found,) = Path(own).glob(f"pip-*/{name}_*/PKG-INFO")
            found.parent.rename(folder)
    return folder


def environment(work: Path, name: str, requirements: Sequence[str]) -> Path:
    """The Python of an environment of its own with some packages."""
    folder = (work / f"{name}-venv").resolve()
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        (folder / "ready").touch()
    return python


def run(command: Sequence[str], **more: Any) -> int:
    """Run a command in the foreground; its exit status."""
    print("+", *command, file=sys.stderr, flush=True)
    return subprocess.run(command, check=False, **more).returncode

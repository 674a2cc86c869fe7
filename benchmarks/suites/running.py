"""Tools of the scripts that run other projects' test suites: an app on a socket, a checkout, a fresh environment."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from asyncengine import AsyncEngine
from asyncengine.serve import app


@contextmanager
def demo_app() -> Iterator[str]:
    """Base URL of an app that answers with the demo model, whatever name it is asked for; "pirate" is its adapter."""
    listener, started, servers = socket.create_server(("127.0.0.1", 0)), threading.Event(), list[uvicorn.Server]()

    async def serve() -> None:
        async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
            await engine.load_adapter("pirate", "demo/pirate")
            server = uvicorn.Server(uvicorn.Config(app(engine, aliases={"*": "demo"}), log_level="warning"))
            servers.append(server)
            started.set()
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join()


def checkout(url: str, source: Path | None, folder: Path) -> Path:
    """A copy of a project in `folder`: of `source`, or cloned from `url`."""
    if source is not None:
        return Path(shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv")))
    subprocess.run(["git", "clone", "--depth", "1", url, str(folder)], check=True)
    return folder


def environment(folder: Path, packages: Sequence[str]) -> Path:
    """The Python of a new environment with these packages."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python

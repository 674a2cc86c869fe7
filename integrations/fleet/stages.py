"""The host of a pipeline's stage on another machine than its engine's: as an actor of a Ray cluster, and as a program.
Does not import Ray."""

from __future__ import annotations

import threading

from asyncengine.execution.runner.stage_host import listen, serve_stages, stage_key


class StageActor:
    """An actor that hosts the stage of one replica until the replica ends it."""

    def listen(self, address: str, key: bytes) -> str:
        """The address "HOST:PORT" at which the host listens from now on, at a port of its own. Raises `OSError`."""
        listening = listen(f"{address}:0")
        threading.Thread(target=serve_stages, args=(listening, key), daemon=True).start()
        return f"{address}:{listening.getsockname()[1]}"


def host_stages(address: str) -> None:
    """Host a stage of one engine after the other at "HOST:PORT", until Ctrl-C. Raises `EngineError` without a key in
    the environment, and `OSError` if it cannot listen at the address."""
    key = stage_key()
    with listen(address) as listening:
        print(f"hosting stages at {address.rpartition(':')[0]}:{listening.getsockname()[1]}", flush=True)
        serve_stages(listening, key)

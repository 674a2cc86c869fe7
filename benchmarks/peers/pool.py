"""Worker processes, one for each system, of which one at a time may run.

A worker is kept over the repetitions, so that loading and warming up are paid once and repetitions of all systems can
take turns closely. Between its turns it is stopped (SIGSTOP, with all that it started): an engine that polls or spins
while it waits takes nothing from the others. What does not fit into memory is ended and loaded anew at its next turn.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers import memory
from benchmarks.peers.drivers.base import Settings
from benchmarks.peers.workloads import Request, Trace

_HOLD, _YIELD = 60.0, 0.2
"""Seconds."""
ROOT = Path(__file__).resolve().parents[2]


class PeerFailed(Exception):
    """A worker answered with an error, ended, or took too long."""


class PeerAbsent(Exception):
    """A worker says that the system cannot run here."""


class Worker:
    """A process with one system in it, loaded."""

    def __init__(self, driver: str, python: str, settings: Settings, log: Path, limit: float) -> None:
        self.facts: dict[str, Any] = {}
        self._log, self._limit, self._rest = log, limit, b""
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.peers.worker", driver, str(orders), str(answers)],
                cwd=ROOT, env=environment, pass_fds=(orders, answers), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        os.close(orders)
        os.close(answers)
        self._settings = settings

    @property
    def leader(self) -> int:
        return self._process.pid

    def load(self) -> None:
        self.facts = self._ask({"do": "load", "settings": asdict(self._settings)})

    def run(self, requests: list[Request], way: str) -> list[Trace]:
        answer = self._ask({"do": "run", "way": way, "requests": [request.as_json() for request in requests]})
        return [Trace(**trace) for trace in answer["traces"]]

    def measure(self) -> dict[str, float]:
        """Figures of the driver `machine`."""
        return self._ask({"do": "measure"})

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.leader, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # a stop takes its time

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Ask it to close, for ten seconds; then end it and all that it started."""
        with suppress(PeerFailed, PeerAbsent, OSError):
            self.resume()
            self._limit = 10.0
            self._ask({"do": "quit"})
        for process in memory.session_members(self.leader):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        os.close(self._orders)
        os.close(self._answers)

    def _signal(self, number: int) -> None:
        for process in memory.session_members(self.leader):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            data = json.dumps(order).encode() + b"\n"
            while data:
                data = data[os.write(self._orders, data) :]
            answer: dict[str, Any] = json.loads(self._line())
        except OSError as error:
            raise PeerFailed(f"{error}; {self._last_words()}") from None
        if "absent" in answer:
            raise PeerAbsent(answer["absent"])
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _line(self) -> bytes:
        until = time.monotonic() + self._limit
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise PeerFailed(f"no answer within {self._limit:.0f} s")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise PeerFailed(f"its process ended; {self._last_words()}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


class Pool:
    """Workers by key. At most one is not stopped."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, key: str) -> Worker:
        return self._workers[key]

    def __contains__(self, key: str) -> bool:
        return key in self._workers

    def add(self, key: str, worker: Worker) -> None:
        self._workers[key] = worker

    def make_room(self, needed: int) -> None:
        """End workers until so many bytes are free. The last one used goes first: turns go round, so it is needed
        last.
        """
        while self._workers and memory.available() < needed:
            self.end(next(reversed(self._workers)))

    def used(self, key: str) -> None:
        self._workers[key] = self._workers.pop(key)

    def end(self, key: str) -> None:
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.end()

    def end_all(self) -> None:
        for key in list(self._workers):
            self.end(key)


class MachineLock:
    """A lock on a file that jobs of this machine agree on: exclusive for what is measured, shared for other work.

    An exclusive hold lasts over several turns, or taking turns with other jobs would pull a repetition apart; after
    `_HOLD` seconds it is let go before the next turn. Without a path nothing is locked.
    """

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115  # as long as the run
        self._since: float | None = None
        """When the exclusive hold began."""

    def alone(self) -> None:
        if self._file is not None and (self._since is None or time.monotonic() - self._since > _HOLD):
            self.release()
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()

    def shared(self) -> None:
        if self._file is not None:
            self.release()
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = None
            time.sleep(_YIELD)  # or it would be taken again before those who wait for it have woken up

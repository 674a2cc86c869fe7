"""A trace of an engine at work: its loop, the thread that launches its steps, and the kernels of these.

The file is Chrome's JSON of trace events, which Perfetto opens. Operators and kernels of torch come from its own
profiler, on the clock of our spans. A CPU's compiled kernels are no operators: they lie in the parts of a step.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.to_thread

from asyncengine.engine.loop import EngineLoop
from asyncengine.engine.process import EXIT_PATIENCE
from asyncengine.engine.threads import finished
from asyncengine.events import Event, StepDone

MOST_STEPS = 10_000
"""Steps of one profile: its events are kept in memory, and one file of more would open nowhere."""
LOOP_METHODS = ("apply_inbox", "schedule", "deliver", "commit")


class Profile:
    """A recording of an engine from `start` to `stop`. An engine without one pays nothing: timed methods are replaced
    on the engine's objects only while the recording lasts."""

    def __init__(self, loop: EngineLoop, steps: int, free: Callable[[], None]) -> None:
        """`free`: called when the recording has stopped; until then no other may be made."""
        self.done: Future[None] = Future()
        """Set once `steps` steps have retired, or the engine has ended."""
        self._over = threading.Event()
        self._loop, self._left, self._undo = loop, steps, [free]
        self._events: list[dict[str, Any]] = []
        self._kernels: Any = None

    def start(self) -> None:
        """Begin, from any thread. Takes some tens of milliseconds."""
        loop, self._kernels = self._loop, _begin_kernels()
        self._undo.append(loop.hooks.add(self._hear))
        for method in LOOP_METHODS:
            self._time(loop, method)
        self._time(loop, "end_all", self._end)
        for method in ("launch", *loop.runner.executor.traced_parts):
            self._time(loop.runner.executor, method)
        if loop.inbox.closed:
            self._end()

    def _time(self, owner: Any, name: str, then: Callable[[], None] = lambda: None) -> None:
        work, before = getattr(owner, name), vars(owner).get(name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.time_ns()
            try:
                return work(*args, **kwargs)
            finally:
                self._add("X", name.strip("_"), began, dur=(time.time_ns() - began) / 1000)
                then()

        setattr(owner, name, timed)
        self._undo.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            ended, number = time.time_ns(), event.step
            arguments = {"rows": event.rows, "tokens": event.tokens, "running": event.running, "waiting": event.waiting}
            self._add("b", "step", ended - int(event.seconds * 1e9), cat="steps", id=number, args=arguments)
            self._add("e", "step", ended, cat="steps", id=number)
            self._left -= 1
        if self._left == 0:
            self._end()

    def _end(self) -> None:
        with suppress(InvalidStateError):  # its maker has left, or it has ended
            self.done.set_result(None)

    @contextmanager
    def _before_exit(self) -> Iterator[None]:
        """Have the program's exit wait for the block: torch's profiler crashes an interpreter that is torn down."""

        def end() -> None:
            self._end()
            self._over.wait(EXIT_PATIENCE)

        atexit.register(end)
        try:
            yield
        finally:
            self._over.set()
            atexit.unregister(end)

    def _add(self, phase: str, name: str, at: int, **more: Any) -> None:
        thread = {"pid": os.getpid(), "tid": threading.get_native_id(), "cat": "engine"}
        self._events.append({"ph": phase, "name": name, "ts": at, **thread, **more})

    async def run(self, folder: str | os.PathLike[str], model: str, timeout: float) -> Path:
        """Record until it is `done`, for at most `timeout` seconds, and write the trace. Raises `OSError`."""
        with self._before_exit():
            try:
                await anyio.to_thread.run_sync(self.start)
                with anyio.move_on_after(timeout):
                    await finished(self.done)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self.stop)
            return await anyio.to_thread.run_sync(self.write, folder, model)

    def run_blocking(self, folder: str | os.PathLike[str], model: str, timeout: float) -> Path:
        """Record and write as `run` does, on a plain thread."""
        with self._before_exit():
            try:
                self.start()
                wait([self.done], timeout)
            finally:
                self.stop()
            return self.write(folder, model)

    def stop(self) -> None:
        """Time nothing any more. From any thread, once."""
        try:
            if self._kernels is not None:
                self._kernels.__exit__(None, None, None)
        finally:
            for undo in reversed(self._undo):
                undo()

    def write(self, folder: str | os.PathLike[str], model: str) -> Path:
        """Write the trace into `folder`, which is made if need be. Raises `OSError`."""
        trace: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms", "baseTimeNanoseconds": 0}
        if self._kernels is not None:
            with TemporaryDirectory() as temporary:
                self._kernels.export_chrome_trace(f"{temporary}/kernels.json")
                trace = json.loads(Path(temporary, "kernels.json").read_bytes())
        for event in self._events:
            event["ts"] = (event["ts"] - trace["baseTimeNanoseconds"]) / 1000  # microseconds, as torch's
        trace["traceEvents"] += self._events
        for thread in threading.enumerate():
            named = {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": thread.native_id}
            trace["traceEvents"].append({**named, "args": {"name": thread.name}})
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder, f"{model.replace(os.sep, '-')}-{time.time_ns()}.json")
        path.write_text(json.dumps(trace), encoding="utf-8")
        return path


def _begin_kernels() -> Any:
    """Torch's profiler, begun on all threads; None where torch is not loaded or is profiled already."""
    torch = sys.modules.get("torch")
    if torch is None or torch.autograd.profiler._is_profiler_enabled:
        return None
    # torch.profiler.profile does the same after ten seconds of importing its compiler
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    device = "cuda" if torch.cuda.is_available() else None
    kernels = torch.autograd.profiler.profile(use_kineto=True, use_device=device, experimental_config=everywhere)
    return kernels.__enter__()

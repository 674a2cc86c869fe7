"""The run: turns of all systems, workload by workload."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.company import Company
from benchmarks.peers.drivers.base import Settings
from benchmarks.peers.memory import Peak
from benchmarks.peers.mixed_shapes import MixedShape
from benchmarks.peers.pool import MachineLock, PeerAbsent, PeerFailed, Pool, Worker
from benchmarks.peers.results import Results
from benchmarks.peers.shapes import Shape
from benchmarks.peers.systems import Places, System
from benchmarks.peers.workloads import Request, Workload, ids, measure

MACHINE = "machine"
_WARM, _FIRST_WARM = (4, 48, 4), (16, 96, 8)
"""Requests, prompt and output tokens of what a worker runs untimed before each turn, and before its first turn of a
workload, when there may be something to compile. Never more requests than the workload has.
"""
_ALONE, _CHATS, _AGAIN = 1000, 2000, 10_000
"""Added to a repetition for other token ids of the same lengths. Whoever has had a prompt before may find it in its
prefix cache: a single stream's prompt alone, and LangChain's, which has the same engine behind it, and another try.
"""
_TRIES = 3
_SPARE = 2 * 2**30
"""Bytes left to the rest of the machine: with less, workers are ended."""


@dataclass(frozen=True, slots=True)
class Attempt:
    figures: dict[str, float]
    seconds: float
    company: float
    """Cores that others took meanwhile."""
    firsts: list[int]
    """First tokens of the answers."""


@dataclass(slots=True)
class Run:
    shape: Shape | MixedShape
    settings: Settings
    places: Places
    systems: list[System]
    results: Results
    logs: Path
    ggufs: dict[str, str]
    """GGUF file by quantization."""
    lock: MachineLock = field(default_factory=lambda: MachineLock(None))
    limit: float = 600.0
    """Seconds for one answer of a worker."""
    patience: float = 60.0
    """Seconds: what took longer is measured once."""
    company: float = 0.2
    """Cores: with more taken by others a turn is tried again, and the least disturbed try counts."""
    beside: int = 0
    """Busy processes beside every turn."""
    weights: str = "random weights"
    room: int = 0
    """Bytes that must be free before a worker is started."""
    absent: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None
    firsts: dict[str, list[int]] = field(default_factory=dict)
    """First tokens of the answers of a system to the largest workload that all run at once."""
    _pool: Pool | None = None
    _made: int = 0
    _slow: set[tuple[str, str]] = field(default_factory=set)

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            self._pool = Pool()
        return self._pool

    def all(self, chosen: Sequence[Workload], memory: bool) -> None:
        try:
            for repetition in range(self.results.repeats):  # outermost: a run that is cut short has measured all work
                for workload in chosen:
                    self._round(workload, repetition)
                    self.save()
            self.pool.end_all()
            if memory:
                self._memory()
        finally:
            self.pool.end_all()
            self.lock.release()

    def _round(self, workload: Workload, repetition: int) -> None:
        """One turn of every system, in an order that moves on from repetition to repetition."""
        self.pool.make_room(_SPARE)
        self._measure_machine(workload, repetition)
        place = repetition % max(1, len(self.systems))
        for system in [*self.systems[place:], *self.systems[:place]]:
            if system.name in self.absent or (system.name, workload.name) in self._slow:
                continue
            reason = system.refuses(workload)
            if reason is not None:
                continue
            try:
                self._turn(system, workload, repetition)
            except PeerAbsent as error:
                self.absent[system.name] = str(error)
                self.pool.end(system.worker)
            except PeerFailed as error:
                say(f"{workload.name} {repetition}: {system.title} failed: {error}")
                self._slow.add((system.name, workload.name))
                self.pool.end(system.worker)
                for figure in workload.figures:
                    self.results.say(f"{workload.name} {figure.key}", system.name, "failed")

    def _turn(self, system: System, workload: Workload, repetition: int) -> None:
        """One repetition of one system; again, with other token ids, if others were busy beside it."""
        worker = self._worker(system)
        self.facts.setdefault(system.name, {}).update(worker.facts)
        began = time.perf_counter()
        tries: list[Attempt] = []
        while len(tries) < _TRIES and (not tries or tries[-1].company > self.company):
            if tries and tries[-1].seconds > self.patience:
                break
            self.lock.alone()
            with running(worker):
                tries.append(self._attempt(worker, system, workload, repetition + _AGAIN * len(tries)))
        best = min(tries, key=lambda attempt: attempt.company)
        if best.seconds > self.patience:
            self._slow.add((system.name, workload.name))
        for key, value in best.figures.items():
            self.results.add(f"{workload.name} {key}", system.name, repetition, value)
        self.results.add(f"company {workload.name}", system.name, repetition, best.company)
        if workload.name == "conc-16" and repetition == 0 and not system.chat:
            self.firsts[system.name] = tries[0].firsts
        values = ", ".join(f"{key} {value:.1f}" for key, value in best.figures.items())
        beside = ", ".join(f"{attempt.company:.2f}" for attempt in tries)
        seconds = time.perf_counter() - began
        say(f"{workload.name} {repetition}: {system.title}: {values} ({seconds:.0f} s, cores of others {beside})")

    def _attempt(self, worker: Worker, system: System, workload: Workload, repetition: int) -> Attempt:
        streams = system.streams and (workload.stream or workload.alone)
        way = "chat" if system.chat else "stream" if streams else "batch"
        requests = requests_for(system, workload, self.shape.vocab, repetition)
        count, prompt, output = _WARM if repetition else _FIRST_WARM
        count = min(count, len(requests), 2 if system.serial else count)
        worker.run(self._random(count, prompt, output), "batch")
        alone = 0.0
        if workload.alone and not streams:
            (same,) = workload.make(self.shape.vocab, repetition + _ALONE)
            alone = worker.run([replace(same, output=1)], way)[0].end
        with Company(worker.leader, self.beside) as company:
            traces = worker.run(requests, way)
        return Attempt(
            measure(workload, requests, traces, alone), max(trace.end for trace in traces), company.share,
            [token for trace in traces for token in trace.tokens[:1]],
        )  # fmt: skip

    def _random(self, count: int, prompt: int, output: int) -> list[Request]:
        """Requests that were never made before."""
        self._made += 1
        generator = random.Random(f"other {self._made}")
        return [Request(ids(generator, self.shape.vocab, prompt), output) for _ in range(count)]

    def _worker(self, system: System) -> Worker:
        """The system's worker, loaded and stopped."""
        if system.worker in self.pool:
            self.pool.used(system.worker)
            return self.pool[system.worker]
        self.pool.make_room(self.room)
        worker = self._start(system)
        self.pool.add(system.worker, worker)
        return worker

    def _start(self, system: System) -> Worker:
        began = time.perf_counter()
        self.lock.shared()
        worker = self._new(system)
        try:
            worker.load()
        except BaseException:  # an interruption, too, must leave no process behind
            worker.end()
            raise
        worker.pause()
        say(f"{system.title}: loaded in {time.perf_counter() - began:.0f} s; {worker.facts.get('note', '')}")
        return worker

    def _new(self, system: System, kind: str = "") -> Worker:
        file = self.ggufs.get(system.quantization, "") if system.gguf else ""
        settings = replace(self.settings, quantization=system.quantization, gguf=file)
        log = self.logs / f"{system.worker}{kind}.log".replace(" ", "-")
        return Worker(system.driver, self.places.python(system.python), settings, log, self.limit)

    def _measure_machine(self, workload: Workload, repetition: int) -> None:
        if MACHINE not in self.pool:
            worker = Worker("machine", sys.executable, self.settings, self.logs / "machine.log", self.limit)
            worker.load()
            worker.pause()
            self.pool.add(MACHINE, worker)
        self.pool.used(MACHINE)
        worker = self.pool[MACHINE]
        self.lock.alone()
        with running(worker):
            for key, value in worker.measure().items():
                self.results.add(f"machine {key}", workload.name, repetition, value)

    def _memory(self) -> None:
        """Each system once more, in a fresh process that nobody stops: loading and many requests at once."""
        requests = self._random(min(32, self.settings.max_seqs), 128, 32)
        for system in self.systems:
            if system.name in self.absent or system.chat:
                continue
            try:
                self.lock.shared()
                self._measure_memory(system, requests[:2] if system.serial else requests)
            except (PeerFailed, PeerAbsent) as error:
                say(f"memory: {system.title} failed: {error}")
                self.results.say("memory peak", system.name, "failed")
            self.save()

    def _measure_memory(self, system: System, requests: list[Request]) -> None:
        worker = self._new(system, ".memory")
        try:
            with Peak(worker.leader) as peak:
                worker.load()
                worker.run(requests, "batch")
        finally:
            worker.end()
        weights, cache = worker.facts.get("weights"), worker.facts.get("kv")
        self.results.add("memory peak", system.name, 0, peak.bytes / 2**20)
        if weights and cache:
            self.results.add("memory share", system.name, 0, peak.bytes / (weights + cache))
        say(f"memory: {system.title}: {peak.bytes / 2**20:.0f} MiB")


def requests_for(system: System, workload: Workload, vocab: int, repetition: int) -> list[Request]:
    """The same for all, except that LangChain must not be given what its engine has just had."""
    return workload.make(vocab, repetition + (_CHATS if system.chat else 0))


@contextmanager
def running(worker: Worker) -> Iterator[None]:
    """Inside, the worker runs; outside, it is stopped."""
    worker.resume()
    try:
        yield
    finally:
        worker.pause()


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

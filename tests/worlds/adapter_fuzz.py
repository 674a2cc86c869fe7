"""A random life of a whole engine with adapters, small memory and few slots, on a runner whose answers depend on what
its slots and pages really hold. Every token is foretold, and everything given back at the end."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from support.adapter_engine import EOS, adapter_oracle, greedy
from support.fake_adapters import digest_of
from support.plug_points import Letters
from worlds.engine_by_hand import EngineByHand, Sample

from asyncengine.engine.validation import PreparedRequest
from asyncengine.errors import AdapterError, AdapterInUse, AdapterNotFound, QueueFull
from asyncengine.options import RequestOptions
from asyncengine.request_spec import RequestSpec
from asyncengine.testing.leaks import assert_nothing_held

MAX_TURNS = 5_000
LETTERS = range(5, 31)


class AdapterLife(EngineByHand):
    """One seed. `faults=False`: no row fails, files never change in place and nothing is pinned, so that nothing but
    its caller or a deadline keeps a request from its right end; the recording can be replayed."""

    def __init__(self, seed: int, *, faults: bool = True, grammars: bool = True, depth: int | None = None) -> None:
        rng = random.Random(seed)
        super().__init__(rng, grammars=grammars, depth=depth)
        self.seed = seed
        self.tenants = random.Random(seed)
        self.faults = faults
        self.prefixes = [[rng.randrange(2, 97) for _ in range(rng.randrange(14))] for _ in range(3)]
        self.names = [f"n{index}" for index in range(rng.choice([3, 6, 9]))]
        self.means: dict[str, str] = {}
        """Name -> content, as this test believes."""
        self.orders = 0
        self.last_order: dict[str, int] = {}
        self.loads = 0
        self.unloads: list[Future[None]] = []
        self.refused: dict[str, int] = {}
        self.passed: list[PreparedRequest] = []
        """Requests that have passed the gate and are not posted yet."""

    def run(self) -> None:
        """Runs to the end of all requests. Raises with the path of a replay file if anything is not as it must be."""
        try:
            self._live()
            self._check_end()
        except BaseException as error:
            error.add_note(f"seed {self.seed}, {self.core.config}")
            if self.compiler is None:
                path = Path(tempfile.gettempdir()) / f"asyncengine-adapter-fuzz-{self.seed}.jsonl"
                error.add_note(f"replay file: {self.recording.save(path)}")
            raise

    def _live(self) -> None:
        rng, to_come, turns = self.rng, self.rng.randrange(20, 70), 0
        for name in self.names:
            self._load(name, name)
            self.pool.turn(rng)
        while to_come or self.passed or self.busy:
            turns += 1
            assert turns < MAX_TURNS, f"never finish: {self.scheduler.requests}, {self.claims.waiting} wait"
            self.clock.advance(rng.random())
            if to_come:  # in the end nobody helps by leaving
                self._administer()
                self._someone_leaves()
                for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 2, 9])):
                    to_come -= to_come > 0
                    self._arrive()
            self._post_some()
            if rng.random() < 0.6:
                self.pool.turn(rng)
            for ticket in [] if self.compiler is None else list(self.compiler.pending):
                if self.compiler is not None and rng.random() < 0.4:
                    self.compiler.finish(ticket, ValueError("too large") if rng.random() < 0.05 else None)
            self.turn()

    # ---------------------------------------------------------------- callers

    def _arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes) + [rng.randrange(2, 97) for _ in range(rng.choice([1, 1, 3, 9]))]
        name = None if rng.random() < 0.25 else rng.choice(self.names)
        most = min(rng.randrange(1, 30), self.core.info.max_model_len - len(prompt))
        grammar = Letters(LETTERS, rng.randrange(1, 9)) if self.compiler is not None and rng.random() < 0.2 else None
        params = greedy(most, n=1 if grammar else rng.choice([1, 1, 1, 3]), grammar=grammar)
        options = RequestOptions(
            adapter=name,
            priority=rng.randrange(3),
            timeout=rng.random() * 40 if rng.random() < 0.08 else None,
            cache_salt=rng.choice([None, None, "tenant"]),
            tenant=self.tenants.choice([None, "a", "b"]),
        )
        try:
            prepared = self.core.prepare(prompt, params, options)
            self.core.client.enter_blocking(prepared)
        except (QueueFull, AdapterNotFound) as error:
            self._refuse(error, name)
        else:
            assert name is None or name in self.means
            self.passed.append(prepared)

    def _post_some(self) -> None:
        """Some callers are slow between the gate and the inbox: their adapter may be gone, or another one, by then."""
        for prepared in [prepared for prepared in self.passed if self.rng.random() < 0.5]:
            self.passed.remove(prepared)
            try:
                self.core.post(prepared)
            except AdapterNotFound as error:
                self._refuse(error, prepared.spec.options.adapter)
                continue
            name = prepared.spec.options.adapter
            digest = "" if name is None else digest_of(self.means[name])
            self.open[prepared.tickets[0]] = prepared
            for stream in prepared.streams:
                self.samples[stream.spec.ticket] = Sample(self._foretell(stream.spec, digest), digest)

    def _foretell(self, spec: RequestSpec, digest: str) -> list[int]:
        letters, most = spec.params.grammar, spec.params.max_tokens or 0
        allowed = () if letters is None else letters.allowed
        most = most if letters is None else min(most, letters.length)
        return adapter_oracle(self.executor.model, spec.prompt, most, digest, spec.seed, (EOS,), allowed)

    def _someone_leaves(self) -> None:
        rng = self.rng
        if self.open and rng.random() < 0.06:
            self.core.client.abort_tickets(rng.choice(list(self.open.values())).tickets)
        if self.faults and self.scheduler.running and rng.random() < 0.01:
            self.executor.fail_tickets[rng.choice(list(self.scheduler.running))] = "the row failed"

    def _refuse(self, error: BaseException, name: str | None) -> None:
        """Notes a refusal. A name is only refused as not found if it means nothing."""
        kind = type(error).__name__
        assert kind != "AdapterNotFound" or name not in self.means
        self.refused[kind] = self.refused.get(kind, 0) + 1

    # ---------------------------------------------------------------- those who manage adapters

    def _administer(self) -> None:
        rng = self.rng
        missing = [name for name in self.names if name not in self.means]
        name = rng.choice(missing if missing and rng.random() < 0.5 else self.names)
        if rng.random() < 0.2:
            self._load(name, self._content(name))
        elif rng.random() < 0.2 and name in self.means:
            wait = rng.random() < 0.8
            try:
                self.unloads.append(self.registry.unload(name, wait=wait))
            except AdapterInUse as error:
                self._refuse(error, name)
                assert self.claims.users(digest_of(self.means[name])) > 0 == wait
            else:
                del self.means[name]
                self.orders += 1
                self.last_order[name] = self.orders  # what is being read under that name comes too late
        elif self.faults and rng.random() < 0.02:
            self.loader.contents[f"path of {name}"] = rng.choice(["bad", "bug", f"{name} changed unseen"])

    def _content(self, name: str) -> str:
        """The adapter's content as it was, or a new version; sometimes the content of another, or nothing good."""
        version = f"{name} v{self.orders}"
        if name not in self.means:  # what was unloaded, and may be in use still, seldom comes back
            return self.rng.choice([version, version, version, name, "bad"])
        return self.rng.choice([name, name, version, version, "n0", "bad"])

    def _load(self, name: str, content: str) -> None:
        self.orders += 1
        order = self.orders
        path = f"path of {name}" if self.faults else f"path of {content}"
        self.loader.contents[path] = content

        def loaded(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                assert isinstance(error, AdapterError), error
                self._refuse(error, name)
                return
            self.loads += 1
            assert name in self.means or self.last_order.get(name, 0) < order, "it is back after it was unloaded"
            if self.last_order.get(name, 0) < order:
                self.last_order[name] = order
                self.means[name] = self.loader.contents[path]  # as this job read it
                assert future.result().digest == self.registry.find(name).digest == digest_of(self.means[name])

        pinned = self.faults and self.rng.random() < 0.03
        self.registry.load(name, path, pinned=pinned).add_done_callback(loaded)

    # ---------------------------------------------------------------- the end

    def _check_end(self) -> None:
        self.check_samples(self.faults)
        assert_nothing_held(self.core)
        assert not self.core.loop.queue_limit.waiting_tokens
        assert not self.slots.in_use, f"adapters never released: {self.slots.in_use}"
        assert all(future.done() for future in self.unloads), "somebody waits for requests that have ended"
        assert not any((self.claims.by_ticket, self.claims.waiting))
        assert not any((self.store.held, self.store.reserved, self.registry.reading))
        assert sorted(info.name for info in self.registry.list()) == sorted(self.means)
        for name in list(self.means):
            assert self.registry.unload(name).done()
        assert self.registry.counts() == {"loaded": 0, "in_memory": 0, "nbytes": 0}

    def counts(self) -> Counter[str]:
        """Counts of what the life contained; refusals by the names of their errors, ends by their reasons."""
        counters, samples = self.scheduler.counters, self.samples.values()
        found = Counter(
            requests=len(samples),
            with_adapter=sum(bool(sample.digest) for sample in samples),
            constrained=0 if self.compiler is None else len(self.compiler.started),
            preemptions=counters.preemptions,
            cached_tokens=counters.cached_tokens,
            copies=self.slots.copies,
            in_two_slots=sum(len(sample.slots) > 1 for sample in samples),
            read_again=len(self.loader.reads) - self.loads,
            depth2=self.core.config.max_steps_in_flight == 2,
        )
        return found + Counter(self.refused) + Counter(sample.reason for sample in samples)

"""Adapters under fuzz: every token right whatever is loaded, dropped and swapped; all given back; replayable."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from support.adapter_engine import AdapterExecutor, Lab, greedy
from support.fake_engine import make_core
from support.long import TIMES
from worlds.adapter_fuzz import AdapterLife

from asyncengine.errors import AdapterError, AdapterInUse, AdapterNotFound
from asyncengine.lora.admission import AdapterSlots
from asyncengine.testing import FakeModel, Recording, replay

LIVES = 36 * TIMES


LEAST = {
    "requests": 40, "with_adapter": 25, "constrained": 4, "preemptions": 33, "cached_tokens": 65, "copies": 5,
    "in_two_slots": 1 / LIVES, "read_again": 2, "depth2": 1 / 4, "AdapterInUse": 1 / LIVES,
    "AdapterNotFound": 1 / LIVES, "AdapterError": 1 / LIVES, "QueueFull": 1 / LIVES, "stop": 1, "length": 1,
    "abort": 1, "timeout": 1, "error": 1,
}  # fmt: skip
"""Numbers that a life reaches on average at least."""


def test_random_requests_with_adapters() -> None:
    """Loads, reloads, failing files, unloads, little memory, few slots, preemption, leavers, two steps in flight."""
    found = Counter[str]()
    for seed in range(LIVES):
        life = AdapterLife(seed, faults=seed % 2 == 0)
        life.run()
        found += life.counts()
    missed = {name: found[name] / LIVES for name, least in LEAST.items() if found[name] / LIVES < least}
    assert not missed, missed


def test_a_saved_recording_replays_to_the_same_outputs(tmp_path: Path) -> None:
    """A replay needs no files, threads or registry: slots and their contents follow from the messages (contract line
    14). In some recordings adapters failed: an error is saved as its text."""
    failed = 0
    for seed in range(6):
        life = AdapterLife(seed, grammars=False)
        life.run()
        if life.executor.fail_tickets:
            continue  # a fault of the device is not in the recording
        loaded = Recording.load(life.recording.save(tmp_path / f"{seed}.jsonl"))
        outputs = replay(loaded, device_of(life), AdapterSlots(life.slots.max_loras))
        assert replay(life.recording, device_of(life), AdapterSlots(life.slots.max_loras)) == life.outputs
        expected = [output._replace(error=output.error and str(output.error)) for output in life.outputs]
        assert outputs == expected
        failed += sum(output.error is not None for output in outputs)
    assert failed


def device_of(life: AdapterLife) -> AdapterExecutor:
    size, model = life.core.config.page_size, life.executor.model
    return AdapterExecutor(life.recording.num_pages, size, FakeModel(eos_every=model.eos_every))


def test_the_same_seed_lives_the_same_life() -> None:
    one, two = AdapterLife(17, grammars=False), AdapterLife(17, grammars=False)
    one.run()
    two.run()
    assert one.outputs == two.outputs or [o[:4] for o in one.outputs] == [o[:4] for o in two.outputs]
    assert one.loader.reads == two.loader.reads
    assert len(one.outputs) > 50


# ---------------------------------------------------------------- with its own threads


class Traffic:
    """Callers and managers of one engine at once. Names change their meaning at any moment."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.rng = random.Random(seed)
        self.versions: dict[str, list[str]] = {f"n{index}": [f"n{index}"] for index in range(6)}
        """The versions that were to be loaded under a name, in order."""
        self.meant = dict.fromkeys(self.versions, 0)
        """The index of the last version that was to be loaded under a name."""
        self.seen: Counter[str] = Counter()
        self.done = False

    async def caller(self, requests: int) -> None:
        for _ in range(requests):
            name = self.rng.choice([*self.versions, *self.versions, None])
            prompt = [self.rng.randrange(2, 97) for _ in range(self.rng.randrange(1, 12))]
            most = self.rng.randrange(1, 20)
            first = 0 if name is None else self.meant[name]
            leaves = self.rng.random() < 0.15
            tokens: list[int] = []
            try:
                async for chunk in self.lab.engine.stream(prompt, greedy(most), adapter=name):
                    tokens += chunk.token_ids
                    if leaves:
                        break
            except (AdapterNotFound, AdapterError) as error:
                self.seen[type(error).__name__] += 1
                continue
            contents = [None] if name is None else self.versions[name][first:]
            rights = [self.lab.expected(prompt, most, content) for content in contents]
            assert any(tokens == (right[: len(tokens)] if leaves else right) for right in rights), (
                name,
                tokens,
                rights,
            )
            self.seen["left" if leaves else "base" if name is None else "right"] += 1

    async def manager(self) -> None:
        engine, turn = self.lab.engine, 0
        while not self.done:
            turn += 1
            name = self.rng.choice(list(self.versions))
            try:
                if self.rng.random() < 0.3:
                    await engine.unload_adapter(name, wait=self.rng.random() < 0.8)
                    self.seen["unloaded"] += 1
                content = f"{name} v{turn}"
                self.lab.loader.contents[content] = self.rng.choice([content] * 4 + ["bad"])
                self.versions[name].append(content)
                await engine.load_adapter(name, content)
                self.meant[name] = len(self.versions[name]) - 1
                self.seen["loaded"] += 1
            except (AdapterInUse, AdapterNotFound, AdapterError) as error:
                self.seen[type(error).__name__] += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize(("hosted", "depth"), [(False, 1), (True, 2)], ids=["owned", "hosted"])
async def test_callers_and_managers_of_an_engine(hosted: bool, depth: int) -> None:
    lab = Lab(
        hosted=hosted, room=3, workers=3, passes=8, max_steps_in_flight=depth, max_loras=2, max_num_seqs=6,
        preempt_every=5, check_every=1, pages=200,
    )  # fmt: skip
    async with lab.engine:
        await lab.load(*(f"n{index}" for index in range(6)))
        traffic = Traffic(lab, depth)
        callers = asyncio.gather(*(traffic.caller(25) for _ in range(16)))
        callers.add_done_callback(lambda _: setattr(traffic, "done", True))
        await asyncio.gather(callers, traffic.manager())
        await lab.settled()
        for info in lab.engine.adapters():
            await lab.engine.unload_adapter(info.name)
        assert lab.engine.stats().adapters == {"loaded": 0, "in_memory": 0, "nbytes": 0}
    assert min(traffic.seen[kind] for kind in ("right", "base", "left", "loaded", "unloaded")) > 0, traffic.seen


def test_an_engine_wires_its_registry_to_its_slots() -> None:
    """The parts that the fuzz connects by hand are those that `wiring.wire` connects."""
    lab = Lab()
    core = make_core(lab.executor, wiring={"adapters": lab.registry})
    assert core.loop.adapters is core.adapters is core.validator.adapters is lab.registry
    lab.registry.close()

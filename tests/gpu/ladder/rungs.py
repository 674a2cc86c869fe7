"""The ladder of speed: `python -m tests.gpu.ladder` measures what an engine on this GPU does in ten minutes.

Shapes of well-known models with random weights. Each figure is printed as it is taken; a section that fails says so and
the next begins. One engine at a time: sections that use the same one follow each other in the usual order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine
from asyncengine.errors import InvalidParameter, OutOfMemory

from ..engines import GREEDY, backend_of, graphs_of, sampling, small_engine
from . import machine
from .kernel_table import kernel_table
from .machine import BANDWIDTH
from .models import make_adapters, write_fp8, write_mxfp4, write_tokenizer
from .session import Section, Session, Skipped, release
from .shapes import SHAPES, TINY, Shape
from .steps import PARTS, StepClock
from .workloads import Burst, burst, poisson, quantile, random_lengths, random_prompts, single

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LOADS: list[tuple[int, int]] = [(prompt, output) for prompt, output in _TABLES["loads"]]
"""Prompt and output tokens: a chat, a chat with documents, a long document (the means of well-known traces)."""
AIMS: dict[str, dict[str, float]] = _TABLES["aims"]
"""Output tokens per second on an H200, by engine and number of streams of `LOADS[0]`."""
_ADAPTERS = 16
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (shape, _TABLES["settings"][settings] | more) for name, (shape, settings, more) in _TABLES["engines"].items()
}
"""Shapes and settings by name; all compute in bfloat16."""
SCHEMA: dict[str, Any] = _TABLES["schema"]
"""Records of strings and numbers, which constrained requests write."""
STORED = {"large, FP8": write_fp8, "gpt-oss": write_mxfp4}
"""Writers of weights, by name of those engines that read some instead of making them up."""


class Ladder:
    """The sections, over one event loop and one engine at a time. On a CPU the shapes are tiny, to try it out."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._quick, self._seed = session.quick, session.seed
        self._runner = asyncio.Runner()
        self._name = ""
        self._engine: AsyncEngine | None = None

    def __enter__(self) -> Ladder:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):  # an engine that died said so already
            self._runner.run(self._close())
        self._runner.close()

    def sections(self) -> list[Section]:
        """In the order of their worth."""

        def section(name: str, about: str, seconds: float, work: str, arguments: dict[str, Any]) -> Section:
            return Section(name, about, seconds, lambda: self._run(partial(getattr(self, work), **arguments)))

        return [
            Section("environment", "the machine", 15, lambda: machine.run(self._session)),
            *(section(*each) for each in _TABLES["sections"]),
        ]

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One section; an engine that fails in it is not used again."""

        async def bounded() -> None:
            try:
                async with asyncio.timeout(max(0.0, self._session.left)):
                    await work()
            except TimeoutError:
                raise RuntimeError("cut: its time was up") from None

        try:
            self._runner.run(bounded())
        except BaseException:
            with contextlib.suppress(Exception):
                self._runner.run(self._close())
            raise

    # ---------------------------------------------------------------- engines

    async def engine(self, name: str) -> AsyncEngine:
        """The engine called so in `ENGINES`, warmed up."""
        if self._engine is not None and name == self._name:
            return self._engine
        await self._close()
        settings, shape = ENGINES[name][1], self._shape(name)
        on_gpu = self._session.device.type == "cuda"
        folder = shape.write(self._session.folder / name.replace(" ", "-"))
        options = {
            "device": str(self._session.device), "attention_backend": self._session.backend,
            "dtype": "bfloat16", "load_format": "auto" if name in STORED else "dummy", "show_progress": False,
            **settings,
        }  # fmt: skip
        if not on_gpu:
            options = {**options, "kv_cache_memory": "64MiB", "attention_backend": "auto", "max_num_seqs": 8}
        if name.startswith("adapters"):
            options["adapters"] = make_adapters(shape, _ADAPTERS, folder, everywhere=name != "adapters")
        if name in STORED:
            STORED[name](folder, self._session.device)
        if name == "tokenizer":
            write_tokenizer(shape.fields["vocab_size"], folder)
        began = time.perf_counter()
        try:
            engine = await AsyncEngine.from_pretrained(folder, **options)
        except (InvalidParameter, OutOfMemory) as error:  # settings that this device does not have, or cannot hold
            raise Skipped(str(error)) from None
        seconds = time.perf_counter() - began
        self._name, self._engine = name, engine
        graphs: Any = graphs_of(engine)
        note = "no CUDA graphs" if graphs is None else f"{len(graphs.sizes)} CUDA graphs in {graphs.seconds:.1f} s"
        weights = engine.info.weight_bytes / 2**20
        note = f"attention: {backend_of(engine)}; {note}; weights of {weights:.0f} MiB"
        self._session.figure(f"{shape.name}, {name}, loading", seconds, "s", note=note)
        await burst(engine, [(32, 8)] * self._rows(256), self._seed)
        return engine

    def _shape(self, name: str) -> Shape:
        """Shape of that engine, as large as this device can take."""
        return (SHAPES if self._session.device.type == "cuda" else TINY)[ENGINES[name][0]]

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()
            del engine
            release(self._session.device)

    def _rows(self, count: int) -> int:
        return min(count, 4) if self._quick else count

    def _tokens(self, count: int) -> int:
        return max(2, count // 16) if self._quick else count

    def _lengths(self, count: int, load: tuple[int, int]) -> list[tuple[int, int]]:
        return [(self._tokens(load[0]), self._tokens(load[1]))] * self._rows(count)

    # ---------------------------------------------------------------- loads

    async def _measure(
        self, engine: AsyncEngine, label: str, lengths: list[tuple[int, int]], *, rounds: int = 1,
        prompts: bool = False, aim: float | None = None, first: Burst | None = None, of: str = "",
        shape: Shape | None = None, **options: Any,
    ) -> Burst:  # fmt: skip
        """Take the figure of a load, the fastest of `rounds`: output tokens per second, or milliseconds of `prompts`.

        `first`: an earlier load, called `of`, that it is compared with; `shape`: the model's, where what memory allows
        is told. `options`: as `burst` takes them.
        """
        bursts = [await burst(engine, lengths, self._seed + turn, **options) for turn in range(rounds)]
        took = min(bursts, key=lambda each: each.seconds)
        notes = [f"{took.rate / first.rate:.2f} of {of}"] if first else []
        notes += [f"best of {rounds}", f"{took.prompt_rate:,.0f} prompt tokens/s"] if rounds > 1 else []
        value, unit = (took.seconds * 1e3, "ms") if prompts else (took.rate, "tokens/s")
        note = "; ".join([*notes, f"{took}{self._share(shape, took) if shape else ''}"])
        self._session.figure(label, value, unit, aim=aim, at_most=prompts, note=note)
        return took

    def _share(self, shape: Shape, took: Burst) -> str:
        """Time that the bytes to be read take at the copy bandwidth of this run, over the time it took."""
        bandwidth = self._session.value_of(BANDWIDTH)
        if bandwidth is None or self._quick or not shape.plain:
            return ""
        least = shape.bytes_read(took.steps, took.lengths) / (bandwidth * 1e9)
        return f"; {least / took.seconds:.0%} of what memory allows"

    async def streams(self, name: str, counts: Sequence[int], length: int = 0) -> None:
        """`length`: of the requests, by its index in `LOADS`."""
        load, engine = LOADS[length], await self.engine(name)
        shape = self._shape(name)
        for count in dict.fromkeys(map(self._rows, counts)):
            aim = AIMS.get(name, {}).get(str(count)) if load == LOADS[0] else None
            label = f"{shape.name}, {count} x {load[0]:,}/{load[1]}"
            if count == 1 and load == LOADS[0]:
                rate = await single(engine, *self._lengths(1, load)[0], self._seed)
                self._session.figure(f"{label}, decoding alone", rate, "tokens/s", aim=aim, note=f"{1e3 / rate:.3f} ms")
            await self._measure(engine, label, self._lengths(count, load), aim=aim, shape=shape)

    async def nano(self) -> None:
        engine = await self.engine("small")
        lengths = [(self._tokens(a), self._tokens(b)) for a, b in random_lengths(self._rows(256), 100, 1024, 0)]
        label = "256 x 100..1,024/100..1,024"
        await self._measure(engine, label, lengths, aim=40_000.0, shape=self._shape("small"))

    async def sampled(self) -> None:
        engine = await self.engine("small")
        ways = sampling("measured")
        alone = self._lengths(1, LOADS[0])[0]
        base = await single(engine, *alone, self._seed, 2)
        for name, params in ways.items():
            await single(engine, 32, 8, self._seed, 1, params)
            rate = await single(engine, *alone, self._seed, 2, params)
            note = f"{rate / base:.2f} of greedy"
            self._session.figure(f"1 stream, {name}", rate, "tokens/s", aim=0.95 * base, note=note)
        together = {name: {"params": ways[name]} for name in _TABLES["sampled_together"]}
        await self._turns(
            engine, "256 x 128/256", self._lengths(256, (32, 32)), self._lengths(256, (128, 256)), together
        )

    async def _turns(
        self, engine: AsyncEngine, label: str, warm: list[tuple[int, int]], lengths: list[tuple[int, int]],
        ways: dict[str, dict[str, Any]], share: float | None = 0.97,
    ) -> None:  # fmt: skip
        """The same load by each of the ways, behind a short one; the first is what the others are to reach a `share`
        of."""
        first: Burst | None = None
        for name, options in ways.items():
            await burst(engine, warm, self._seed, **options)
            aim = share * first.rate if first and share else None
            took = await self._measure(
                engine, f"{label}, {name}", lengths, aim=aim, first=first, of=next(iter(ways)), **options
            )
            first = first or took

    async def prompts(self, name: str, loads: Sequence[Sequence[Any]]) -> None:
        """`loads`: (what the figure is called, requests, tokens of a prompt and of an answer, rounds, aim) of each."""
        engine = await self.engine(name)
        for label, count, load, rounds, aim in loads:
            called = f"{self._shape(name).name}, {label}"
            await self._measure(engine, called, self._lengths(count, load), rounds=rounds, prompts=True, aim=aim)

    async def host(self) -> None:
        engine = await self.engine("small")
        for count, aim in ((1, 0.25), (16, None), (256, 2.5)):
            rows = self._rows(count)
            await burst(engine, self._lengths(count, (32, 16)), self._seed)
            clock = StepClock(engine)
            took = await burst(engine, self._lengths(count, (32, 128)), self._seed)
            clock.close()
            found = clock.medians(rows)
            total = found["total"] * 1e3 if found else None
            parts = ", ".join(f"{part} {found[part] * 1e3:.2f}" for part in PARTS if found)
            self._session.figure(
                f"host time of a step of {count}", total, "ms", aim=aim, at_most=True, note=f"{parts}; {took}"
            )

    async def kernels(self, name: str, counts: Sequence[int] = (1, 16, 256)) -> None:
        engine = await self.engine(name)
        loads = {
            **{f"{count} streams": self._lengths(count, (64, 40)) for count in counts},
            "256 streams behind 700 tokens": self._lengths(256, (700, 40)),
            "a prompt of 2,048": self._lengths(1, (2048, 1)),
        }
        for label, lengths in loads.items():
            await kernel_table(self._session, engine, f"{self._shape(name).name}, {label}", lengths)

    async def arrivals(self, rate: float, seconds: float) -> None:
        """`rate`: requests a second."""
        for name in ("small", "defaults"):
            engine = await self.engine(name)
            clock = StepClock(engine)
            found = await poisson(engine, *((rate, seconds) if not self._quick else (40.0, 0.2)), self._seed)
            clock.close()
            most = max((taken.running + taken.waiting for taken in clock.steps), default=0)
            note = f"{len(found.first_token)} requests, {rate:.0f} a second, 64..512 in, 64..256 out, {name}; "
            note += f"{most} at once at most, {clock.preempted} preempted"
            for label, values in (("first token", found.first_token), ("between tokens", found.between)):
                for at in (0.5, 0.99):
                    value, aim = quantile(values, at), 150.0 if (label, at) == ("first token", 0.99) else None
                    self._session.figure(
                        f"{label}, p{at * 100:.0f}, {name}", None if value is None else value * 1e3, "ms", aim=aim,
                        at_most=True, note=note,
                    )  # fmt: skip
                    note = ""
            lag = quantile(found.lag, 0.99)
            self._session.figure("timers of the caller are late, p99", None if lag is None else lag * 1e3, "ms")
            for taken in sorted(clock.steps, key=lambda taken: -taken.gap)[:5]:
                self._session.line(f"long step: {taken}")

    # ---------------------------------------------------------------- features

    async def prefix(self) -> None:
        """The same tokens in front of all prompts, beside prompts that share nothing."""
        engine = await self.engine("defaults")
        (shared,) = random_prompts([(self._tokens(2048), 1)], engine.info.vocab_size, self._seed)
        alone = await self._measure(engine, "64 of 2,112 tokens, nothing shared", self._lengths(64, (2112, 32)))
        label, lengths = "64 with 2,048 of them shared", self._lengths(64, (64, 32))
        await self._measure(engine, label, lengths, first=alone, of="nothing shared", shared=shared)

    async def adapters(self, name: str) -> None:
        engine = await self.engine(name)
        names = [adapter.name for adapter in engine.adapters()]
        ways: dict[str, Sequence[str | None]] = {
            "no adapter": (None,), "one adapter": names[:1], "16 adapters": names,
            "16 adapters and none": [*names, None],
        }  # fmt: skip
        for count in (1, 64):
            turns = {label: {"adapters": used} for label, used in ways.items() if count > 1 or len(used) == 1}
            warm, lengths = self._lengths(count, (32, 16)), self._lengths(count, LOADS[0])
            await self._turns(engine, f"{count} x 128/128", warm, lengths, turns, None)

    async def constrained(self) -> None:
        """Records of strings and numbers over a vocabulary of the model's size; free requests get as many tokens."""
        engine = await self.engine("tokenizer")
        bound = GREEDY.replace(grammar=SCHEMA, ignore_eos=False, on_budget="close", max_tokens=128)
        for count in map(self._rows, (1, 64)):
            prompts = random_prompts(self._lengths(count, (64, 1)), engine.info.vocab_size, self._seed)
            for _ in range(2):  # the first compiles the grammar
                began = time.perf_counter()
                done = await asyncio.gather(*(engine.generate(prompt, bound) for prompt in prompts))
                seconds = time.perf_counter() - began
            lengths = [(len(prompt), len(one.token_ids)) for prompt, one in zip(prompts, done, strict=True)]
            free = await burst(engine, lengths, self._seed)
            rate = sum(output for _, output in lengths) / seconds
            note = f"{rate / free.rate:.2f} of free requests' {free.rate:,.0f}"
            self._session.figure(f"{count} constrained, 64 in", rate, "tokens/s", aim=0.95 * free.rate, note=note)

    async def ranks(self) -> None:
        """The same streams on one GPU and over two, without graphs, which two do not have."""
        on_gpu = self._session.device.type == "cuda"
        if on_gpu and torch.cuda.device_count() < 2:
            raise Skipped(f"needs two GPUs, {torch.cuda.device_count()} visible")
        await self._close()
        shape = self._shape("large")
        folder = shape.write(self._session.folder / "ranks")
        for size in (1, 2):
            async with small_engine(
                folder, dtype="bfloat16", load_format="dummy", kv_cache_memory="4GiB" if on_gpu else "64MiB",
                max_num_batched_tokens=1024, tensor_parallel=size, cuda_graphs=False,
            ) as engine:  # fmt: skip
                for count in (1, 16):
                    label = f"{shape.name}, {size} GPUs, {count}"
                    await self._measure(engine, label, self._lengths(count, LOADS[0]), rounds=2)

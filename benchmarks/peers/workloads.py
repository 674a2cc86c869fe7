"""Workloads: requests made of random token ids, the same for every system, and the figures taken of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DEEP_OUT = 32
"""Tokens that a request with a long prompt generates."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    output: int
    """Tokens to generate."""
    at: float = 0.0
    """Seconds after the start at which it comes."""

    def as_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "output": self.output, "at": self.at}


@dataclass(slots=True)
class Trace:
    """Tokens that one request got, and when. Times are seconds after the start of the run."""

    tokens: list[int]
    end: float
    times: list[float] = field(default_factory=list)
    """When each token came, of a run with `stream`; empty of one without."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report, taken of every system."""

    key: str
    title: str
    unit: str
    lower_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    make: Callable[[int, int], list[Request]]
    """Vocabulary and repetition to requests. Another repetition has other token ids, so that nothing is cached."""
    figures: tuple[Figure, ...]
    stream: bool = False
    """Tokens are received one by one."""
    arrivals: bool = False
    """Requests come while others run: only for systems that take them."""
    alone: bool = False
    """One request: its decoding is measured without its prompt."""
    chat: bool = False
    """Also run through LangChain's `abatch`."""


def deep(tokens: int) -> Workload:
    """One request with so long a prompt, and what it decodes behind that."""
    figures = (
        Figure("prompt", f"prompt of {tokens:,}", "tok/s"),
        Figure("decode", f"single stream, decode behind {tokens:,} tokens ({DEEP_OUT} out)", "tok/s"),
    )
    return Workload(f"deep-{tokens}", _alike(f"deep-{tokens}", 1, tokens, DEEP_OUT), figures, stream=True)


def workloads(rate: float, seconds: float, quick: bool = False) -> dict[str, Workload]:
    """All but those of `deep`, by name. `rate` and `seconds`: of the requests that arrive at random."""
    small = 4 if quick else 1
    long = 128 // small
    made = [
        Workload(
            "single", _alike("single", 1, 128, long),
            (Figure("decode", f"single stream, decode (128 in, {long} out)", "tok/s"),), stream=True, alone=True,
        ),
        *(_concurrent(count, 64 // small) for count in (1, 4, 16, 64)),
        Workload("prefill", _alike("prefill", 1, 2048, 1), (Figure("prompt", "prompt of 2,048", "tok/s"),)),
        Workload(
            "shared", _sharing(32 // small),
            (Figure("output", f"{32 // small} x (1,024 shared + 32 own in, 16 out)", "tok/s"),),
        ),
        Workload(
            "mixed", _mixed(32 // small),
            (Figure("output", f"{32 // small} x (16..512 in, 8..128 out)", "tok/s"),),
        ),
        Workload("arrivals", _arriving(rate, seconds), _latencies(rate), stream=True, arrivals=True),
    ]  # fmt: skip
    return {workload.name: workload for workload in made}


def _concurrent(count: int, output: int) -> Workload:
    title = f"{count} at once (128 in, {output} out)"
    name = f"conc-{count}"
    return Workload(name, _alike(name, count, 128, output), (Figure("output", title, "tok/s"),), chat=True)


def _latencies(rate: float) -> tuple[Figure, ...]:
    return tuple(
        Figure(f"{key}-p{at}", f"{rate:g} requests/s: {title}, p{at}", "ms", lower_is_better=True)
        for key, title in (("first", "first token"), ("between", "between tokens"))
        for at in (50, 99)
    )


def _generator(name: str, repetition: int) -> random.Random:
    return random.Random(f"{name} {repetition}")


def ids(generator: random.Random, vocab: int, count: int) -> list[int]:
    """Random ids without the last, which ends a sequence."""
    return [generator.randrange(vocab - 1) for _ in range(count)]


def _alike(name: str, count: int, prompt: int, output: int) -> Callable[[int, int], list[Request]]:
    def make(vocab: int, repetition: int) -> list[Request]:
        generator = _generator(name, repetition)
        return [Request(ids(generator, vocab, prompt), output) for _ in range(count)]

    return make


def _sharing(count: int) -> Callable[[int, int], list[Request]]:
    def make(vocab: int, repetition: int) -> list[Request]:
        generator = _generator("shared", repetition)
        prefix = ids(generator, vocab, 1024)
        return [Request(prefix + ids(generator, vocab, 32), 16) for _ in range(count)]

    return make


def _mixed(count: int) -> Callable[[int, int], list[Request]]:
    """Lengths stay the same over the repetitions, or medians would compare different work."""

    def make(vocab: int, repetition: int) -> list[Request]:
        lengths, generator = random.Random("lengths"), _generator("mixed", repetition)
        return [Request(ids(generator, vocab, lengths.randint(16, 512)), lengths.randint(8, 128)) for _ in range(count)]

    return make


def _arriving(rate: float, seconds: float) -> Callable[[int, int], list[Request]]:
    """A Poisson process: exponential gaps. The same moments and lengths in every repetition."""

    def make(vocab: int, repetition: int) -> list[Request]:
        moments, generator = random.Random("arrivals"), _generator("arrivals", repetition)
        found: list[Request] = []
        at = moments.expovariate(rate)
        while at < seconds or not found:
            prompt = ids(generator, vocab, moments.randint(32, 256))
            found.append(Request(prompt, moments.randint(16, 96), at))
            at += moments.expovariate(rate)
        return found

    return make


def measure(workload: Workload, requests: Sequence[Request], traces: Sequence[Trace], alone: float) -> dict[str, float]:
    """Values of the workload's figures, by key.

    `alone`: seconds that the same prompt with one output token took, for a system that does not stream.
    """
    seconds = max(trace.end for trace in traces)
    if workload.name.startswith("deep"):
        first, last, tokens = traces[0].times[0], traces[0].times[-1], len(traces[0].tokens)
        return {"prompt": len(requests[0].prompt) / first, "decode": (tokens - 1) / (last - first)}
    if workload.name == "prefill":
        return {"prompt": len(requests[0].prompt) / seconds}
    if workload.alone:
        times = traces[0].times
        took = times[-1] - times[0] if times else seconds - alone
        return {"decode": (len(traces[0].tokens) - 1) / took}
    if workload.arrivals:
        return _measure_latencies(requests, traces)
    return {"output": sum(len(trace.tokens) for trace in traces) / seconds}


def _measure_latencies(requests: Sequence[Request], traces: Sequence[Trace]) -> dict[str, float]:
    first = [trace.times[0] - request.at for request, trace in zip(requests, traces, strict=True)]
    between = [right - left for trace in traces for left, right in zip(trace.times, trace.times[1:], strict=False)]
    return {
        f"{key}-p{at}": 1e3 * quantile(values, at / 100)
        for key, values in (("first", first), ("between", between))
        for at in (50, 99)
    }


def quantile(values: Sequence[float], at: float) -> float:
    """The value that `at` (0..1) of all values are at most, interpolated between neighbours. Of nothing: nan."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = at * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

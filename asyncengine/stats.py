"""Statistics of an engine: `stats()` snapshots, and the meter that feeds them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from asyncengine.kvcache import PageCounts, StateCounts
from asyncengine.kvcache.store.record import StoreCounts
from asyncengine.outputs import FinishReason

EngineState = Literal["awake", "paused", "asleep"]
WINDOW = 4096
"""Samples kept of each measured quantity."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Distribution of the last samples of one quantity, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Any) -> Summary:
        ordered = sorted(values)
        count = len(ordered)
        if not count:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)

        def at(q: float) -> float:
            return float(ordered[min(count - 1, int(q * count))])

        return cls(count, sum(ordered) / count, at(0.5), at(0.9), at(0.99), float(ordered[-1]))


@dataclass(frozen=True, slots=True)
class ThreadStats:
    """The threads that compute an engine's steps on a CPU."""

    now: int = 1
    """Threads of the last step. Fewer than `most` while the machine is busy with something else or another engine of
    the process runs steps, and always for a model too small to share its loops."""
    most: int = 1
    """While nothing else wants the cores: `num_threads`."""
    efficiency: float = 1.0
    """The efficiency of the last steps' loops: one thread's time for them, over `now` times what they took. 1: all
    threads computed all the time."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Guesses of next tokens, since the start."""

    rows: int
    """Requests' steps that had any."""
    drafted: int
    """Tokens guessed."""
    accepted: int
    """Drafted tokens that came true: each saved a step."""
    by_position: tuple[int, ...]
    """Accepted as the first, second, ... of their row."""
    drafted_by_model: int = 0
    """Drafted tokens that a draft model made, or the model's own head."""
    accepted_by_model: int = 0


@dataclass(frozen=True, slots=True)
class ImageStats:
    """Encoded pictures; all 0: the model reads none."""

    encoded: int = 0
    """Pictures that the vision tower encoded, since the start."""
    hits: int = 0
    """Steps that found a picture encoded already, each picture counted once. What is in the prefix cache needs none."""
    nbytes: int = 0
    """Bytes of the encoded pictures that are kept."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts since the start; distributions over the last 4096 samples."""

    requests: dict[str, int]
    """Requests by state: waiting, running, grammar_queue, adapter_queue, restore_queue,
    suspended (their consumers do not read)."""
    finished: dict[str, int]
    """Ended samples by reason."""
    pages: PageCounts
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    forced_tokens: int
    """Generated tokens that were not sampled but forced by a grammar: each saved a step."""
    computed_tokens: int
    passes: int
    """Steps of requests that gave tokens, each request counted by itself."""
    preemptions: int
    steps: int
    first_token: Summary
    """Submit to first token."""
    inter_token: Summary
    step: Summary
    """Launch to result."""
    loop_lag: Summary
    """Seconds by which the engine's event loop ran a timer late."""
    uptime: float
    adapters: dict[str, int] = field(default_factory=dict)
    """Adapters with a name (loaded), of those in host memory (in_memory), and their bytes (nbytes)."""
    threads: ThreadStats = ThreadStats()
    window_pages: PageCounts = field(default_factory=PageCounts)
    """Pages of layers with windows, where others see everything; all 0: all layers have the same pages."""
    states: StateCounts = field(default_factory=StateCounts)
    """Slots of recurrent states; all 0: the model keeps none."""
    restored_tokens: int = 0
    """The part of `cached_tokens` that was read from a disk."""
    stored: StoreCounts = field(default_factory=StoreCounts)
    """The durable prefix cache (`kv_cache_dir`)."""
    speculation: SpeculationStats | None = None
    """None: nothing is guessed."""
    state: EngineState = "awake"
    """Whether steps run; "asleep": weights or caches may not be in memory."""
    images: ImageStats = ImageStats()

    def __str__(self) -> str:
        """A few lines to be read: requests, tokens, times, memory."""

        def listed(counts: dict[str, int]) -> str:
            return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"

        times = (("first token", self.first_token), ("each further", self.inter_token), ("step", self.step))
        shown = (f"{name} {1000 * of.p50:.1f} ms (p99 {1000 * of.p99:.1f})" for name, of in times)
        pages, guesses = self.pages, self.speculation
        used = pages.total - pages.free - pages.cached
        lines = [
            f"{self.state}, up {self.uptime:.0f} s",
            f"requests: {listed(self.requests)}; ended: {listed(self.finished)}",
            f"tokens: {self.prompt_tokens} of prompts ({self.hit_rate:.0%} cached), {self.generated_tokens} generated "
            f"in {self.steps} steps" + ("" if guesses is None else f", {guesses.accepted} of them guessed"),
            f"times: {', '.join(shown)}",
            f"pages: {used} in use, {pages.cached} cached, {pages.free} free of {pages.total}; "
            f"preemptions: {self.preemptions}",
        ]
        return "\n".join(lines)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of one request from one step; above 1 where guesses came true or a grammar left no choice."""
        return self.generated_tokens / self.passes if self.passes else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request that has not ended: a sample, or one of several texts. Times in seconds."""

    request_id: str
    index: int
    """Index among the samples or texts of its call."""
    state: str
    """A key of `EngineStats.requests`."""
    waits_for: str
    """Why it does not run, in words; empty: it runs."""
    age: float
    adapter: str | None
    prompt_tokens: int
    cached_tokens: int
    """Tokens of its prompt that came from the prefix cache, when it last started."""
    computed_tokens: int
    """Tokens of prompt and output that have been computed."""
    output_tokens: int
    max_tokens: int
    guessed_tokens: int
    accepted_tokens: int
    """The guessed tokens that were right."""
    preemptions: int


class PrefixRun(NamedTuple):
    """Pages of the prefix cache that follow one another, up to where prompts part."""

    parent: int
    """Index of the run that it goes on from; -1: a namespace's root, which has no page."""
    pages: int
    users: int
    """Requests that use its first page now."""
    hits: int
    """Times that its first page was found."""


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)


@dataclass(slots=True)
class Meter:
    """Samples as they come. Written on the engine's loop, read from anywhere."""

    first_token: deque[float] = field(default_factory=_window)
    inter_token: deque[float] = field(default_factory=_window)
    step: deque[float] = field(default_factory=_window)
    loop_lag: deque[float] = field(default_factory=_window)
    finished: dict[str, int] = field(default_factory=dict)

    def summaries(self) -> dict[str, Any]:
        """Distributions of the samples, by their names in `EngineStats`."""
        names = ("first_token", "inter_token", "step", "loop_lag")
        return {name: Summary.of(list(getattr(self, name))) for name in names}

    def count_end(self, reason: FinishReason) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

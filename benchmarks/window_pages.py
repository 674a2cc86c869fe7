"""Context that fits if layers with windows have pages of their own: python -m benchmarks.window_pages [--memory 4GiB]

For the attention of some models, the tokens of context that a KV cache of so many bytes holds, in one pool for all
layers and in two (`models.memory.caches`), and how many requests of some lengths run beside each other. Then, for
caches of the same bytes, what the prefix cache finds: prompts that share a beginning (vllm #45238), one after another
and all at once, and chats that take turns. No model is run: the scheduler, over an executor that answers at once.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncengine.checks import parse_bytes
from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.models.memory.caches import TwoPools, two_pools
from asyncengine.kvcache import KVCache
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler import Scheduler
from asyncengine.step import StepResult


@dataclass(frozen=True)
class Shape:
    """The attention of a model: every `period`-th layer sees everything, the others `window` positions, or those of
    their `chunk`."""

    name: str
    layers: int
    period: int
    kv_heads: int
    head_dim: int
    context: int
    window: int = 0
    chunk: int = 0

    def specs(self) -> list[LayerSpec]:
        size = (self.kv_heads, self.kv_heads, self.head_dim, self.head_dim, 1.0)
        near = {"window": self.window or None, "chunk": self.chunk or None}
        return [
            LayerSpec(place, *size, **({} if (place + 1) % self.period == 0 else near)) for place in range(self.layers)
        ]


SHAPES = (
    Shape("Gemma 3 4B", 34, 6, 4, 256, 131_072, window=1024),
    Shape("Gemma 3 27B", 62, 6, 16, 128, 131_072, window=1024),
    Shape("gpt-oss 20B", 24, 2, 8, 64, 131_072, window=128),
    Shape("Command R7B", 32, 4, 8, 128, 131_072, window=4096),
    Shape("Llama 4 Scout", 48, 4, 8, 128, 1_048_576, chunk=8192),
)
LENGTHS = (512, 2048, 8192, 32_768)
PAGE = 16


def room(shape: Shape, memory: int) -> str:
    """A row of the first table."""
    pools = two_pools(shape.specs(), EngineConfig(), shape.context, torch.bfloat16)
    one, (pages, windows) = memory // (pools.page_bytes + pools.window_page_bytes), pools.split(memory)
    cells = [shape.name, f"{one * PAGE:,}", f"{pages * PAGE:,}", f"{pages / one:.2f}"]
    for length in LENGTHS:
        each = -(-length // PAGE)
        now = min(pages // each, windows // min(each, pools.span)) if windows else one // each
        cells.append(f"{one // each} / {now}")
    return "| " + " | ".join(cells) + " |"


class Served:
    """A scheduler over a cache of `pages` (and `windows` for the layers with them), and what its requests answered."""

    def __init__(self, shape: Shape, pages: int, windows: int) -> None:
        self.config = EngineConfig(max_num_seqs=16)
        kinds = ((shape.window, shape.chunk), (0, 0))
        ahead = self.config.most_ahead
        kv = KVCache(pages, PAGE, windows=kinds, num_window_pages=windows, most_ahead=ahead)
        self.scheduler = Scheduler(self.config, kv)
        self.tokens: dict[int, list[int]] = {}

    def add(self, prompt: Sequence[int], answer: int) -> int:
        ticket = len(self.tokens) + 1
        self.tokens[ticket] = []
        self.scheduler.apply(RequestSpec(ticket, tuple(prompt), SamplingParams(), len(prompt) + answer))
        return ticket

    def run(self) -> None:
        while self.scheduler.requests:
            batch = self.scheduler.schedule(0.0)
            assert batch is not None
            answers = [(row.spec.ticket * 7919 + row.start * 31) % 9973 if row.samples else -1 for row in batch.rows]
            self.scheduler.commit(StepResult(batch.step, answers), 0.0)
            for output in self.scheduler.take_outputs():
                assert output.reason in (None, "length")
                self.tokens[output.ticket].append(output.token)
        self.scheduler.check()

    @property
    def hit_rate(self) -> float:
        counters = self.scheduler.counters
        return counters.cached_tokens / counters.prompt_tokens


def words(count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(10_000, 99_999) for _ in range(count)]


def shared(served: Served, prefix: int, own: int, *, at_once: bool) -> float:
    """64 prompts that begin alike."""
    chance = random.Random(1)
    first = words(prefix, chance)
    for _ in range(64):
        served.add(first + words(own, chance), 16)
        if not at_once:
            served.run()
    served.run()
    return served.hit_rate


def chats(served: Served, count: int, turns: int) -> float:
    """Chats over a document of their own that take turns; each prompt is the one before with its answer and more."""
    chance = random.Random(2)
    histories = [words(6000, chance) for _ in range(count)]
    for _ in range(turns):
        for place, history in enumerate(histories):
            prompt = [*history, *words(100, chance)]
            ticket = served.add(prompt, 100)
            served.run()
            histories[place] = prompt + served.tokens[ticket]
    return served.hit_rate


def hits(shape: Shape, one: int) -> list[str]:
    """Rows of the second table: caches of the bytes of `one` pages in one pool."""
    pools: TwoPools = two_pools(shape.specs(), EngineConfig(max_num_seqs=16), shape.context, torch.bfloat16)
    pages, windows = pools.split(one * (pools.page_bytes + pools.window_page_bytes))
    lines = []
    for name, work in (
        ("1,500 shared, 700 own, one by one", lambda served: shared(served, 1500, 700, at_once=False)),
        ("1,600 shared, 600 own, one by one", lambda served: shared(served, 1600, 600, at_once=False)),
        ("1,500 shared, 700 own, at once", lambda served: shared(served, 1500, 700, at_once=True)),
        ("6 chats over 6,000 tokens, 6 turns", lambda served: chats(served, 6, 6)),
        ("12 chats over 6,000 tokens, 6 turns", lambda served: chats(served, 12, 6)),
    ):
        all_pages = work(Served(shape, 20_000, 0))
        before, after = work(Served(shape, one, 0)), work(Served(shape, pages, windows))
        lines.append(f"| {shape.name} | {name} | {all_pages:.3f} | {before:.3f} | {after:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--pages", type=int, default=1900, help="of one pool, whose bytes the second table divides")
    options = parser.parse_args()
    memory = parse_bytes("memory", options.memory)
    assert memory is not None
    print(f"| {options.memory}, bfloat16 | one pool, tokens | two pools | times |", end="")
    print("".join(f" requests of {length:,} |" for length in LENGTHS))
    print("|---" * (4 + len(LENGTHS)) + "|")
    for shape in SHAPES:
        print(room(shape, memory), flush=True)
    print(f"\n| bytes of {options.pages} pages in one pool | work | no limit | one pool | two pools |")
    print("|---" * 5 + "|")
    for shape in (SHAPES[0], SHAPES[2]):
        for line in hits(shape, options.pages):
            print(line, flush=True)


if __name__ == "__main__":
    main()

"""Speculation on and off, taking turns: python -m benchmarks.speculation --shape qwen3-0.6b

    [--quantization int4 --rounds 5 --tokens 96 --rows 1 4 16 64 --threads 2 --useless]
    [--demo --wide --draft --kinds extract edit]

One engine with drafts and one without, on the same random weights, in one process. Drafts are planted: a drafter that
knows the answers and is right with a given chance, one that is always right, and one that is always wrong. Gains on
random weights by looking back would mean nothing: they loop. Medians of the ratios of times, off over on, of `--rows`
requests at once: from the first token to the last of all, and of each request's own time, as those with guesses end one
after the other. What the planner has learnt is forgotten before each round.

Beside each ratio stands what it is made of: tokens that a request got in one pass (counted), and how long such a pass
took, in plain steps of the same rounds (the engine's own clock). Their quotient is what that round allows. The table of
costs that the planner goes by is of the load, another minute: on a machine whose memory moves, or that others use, a
ratio may well lie beyond what that table says, and says nothing by it.

With --useless, drafts that are always wrong only; with --demo, the bundled model on real text instead
(`guesses_on_texts`), with --draft too by its draft model only, alone and beside look-ups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.events import Event, StepDone
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.acceptance import LONG, Draft, Source
from benchmarks.guesses_on_texts import on_texts
from benchmarks.random_model import SHAPES

PROMPT = 64


class Planted:
    """Drafts of a known answer, each token right with a chance of `rate`."""

    def __init__(self, answer: Sequence[int], prompt_len: int, rate: float, seed: int) -> None:
        self._answer, self._prompt_len, self._rate = answer, prompt_len, rate
        self._random = random.Random(seed)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        done = len(tokens) - self._prompt_len
        rest = self._answer[done : done + limit]
        right = [token if self._random.random() < self._rate else token ^ 1 for token in rest]
        return Draft(tuple(right), Source.OWN_TEXT, LONG)


class Passes(NamedTuple):
    """Steps behind the prompts' in one run, and the tokens that they gave."""

    tokens: int
    """Tokens of all requests but their first ones."""
    passes: int
    """Rows of these steps: a request takes part in one pass at a time."""
    seconds: float
    """Median time of a step, from launch to result: others' use of the machine shows in few of them."""

    @classmethod
    def counted(cls, steps: Sequence[StepDone], rows: int, tokens: int) -> Passes:
        """`steps`: all of a run of `rows` prompts of `PROMPT` tokens, each answered by `tokens`. Steps with a prompt in
        them are left out: plain and guessed runs have the same."""
        decoding = [step for step in steps if step.tokens < PROMPT or step.tokens == step.rows]
        if not decoding:
            raise ValueError("no step is without a prompt: answers are too short to say anything")
        seconds = statistics.median(step.seconds for step in decoding)
        return cls(rows * (tokens - 1), sum(step.rows for step in decoding), seconds)

    def allows(self, plain: Passes, most: int) -> tuple[float, float]:
        """Tokens that a request got in a pass, and the time of a pass in that of a plain step. Raises `ValueError` for
        more tokens a pass than `most` guesses and one."""
        each = self.tokens / self.passes
        if each > most + 1:
            raise ValueError(f"{each:.2f} tokens a pass of {most} guesses and one: passes are not counted")
        return each, self.seconds / plain.seconds


async def timed(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[tuple[float, float], list[list[int]]]:
    """Seconds from the first token to the last of all requests, and of each in the mean; and what they answered."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    found = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    seconds = time.perf_counter() - began
    firsts = [one.timings.first_token or 0.0 for one in found]
    own = statistics.mean(one.timings.total - first for one, first in zip(found, firsts, strict=True))
    return (seconds - max(firsts), own), [one.token_ids for one in found]


async def planted(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "qwen3"} | SHAPES[options.shape]))
        shared: dict[str, Any] = {
            "load_format": "dummy", "dtype": "bfloat16", "num_threads": options.threads, "show_progress": False,
            "quantization": options.quantization, "max_model_len": 1024, "prefix_caching": False,
        }  # fmt: skip
        async with (
            await AsyncEngine.from_pretrained(folder, speculation="off", **shared) as off,
            await AsyncEngine.from_pretrained(folder, speculation_memory=1, **shared) as on,
        ):
            costs = on.core.config.speculation_costs
            assert costs is not None, on.info.no_speculation
            print("costs of 1, 8 and 32 tokens:", [round(cost / costs[0], 2) for cost in costs])
            for rows in options.rows:
                rates = ((0.7, 7), (0.7, 3), (1.0, 15), (0.9, 15)) if rows < 16 else ((0.7, 3),)
                for rate, most in (*(() if options.useless else rates), (0.0, 15)):
                    await compare(off, on, rows, rate, most, options)


async def compare(
    off: AsyncEngine, on: AsyncEngine, rows: int, rate: float, most: int, options: argparse.Namespace
) -> None:
    generator = random.Random(rows)
    prompts = [[generator.randrange(1000, 90_000) for _ in range(PROMPT)] for _ in range(rows)]
    _, answers = await timed(off, prompts, options.tokens)
    known = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    planner = on.core.loop.scheduler.roster.drafts
    assert planner is not None

    def make(spec: RequestSpec, tokens: Sequence[int], namespace: tuple[Hashable, ...]) -> Planted:
        return Planted(known[spec.prompt], len(spec.prompt), rate, spec.ticket)

    planner.make, planner._max_drafts = make, most
    before = on.stats().speculation
    ratios, made_of = [], []
    for turn in range(options.rounds):
        pair, passes = {}, {}
        planner.clear()
        for name, engine in (("off", off), ("on", on)) if turn % 2 else (("on", on), ("off", off)):
            steps: list[Event] = []
            forget = engine.on_event(steps.append)
            pair[name], found = await timed(engine, prompts, options.tokens)
            forget()
            assert found == answers, "speculation was seen"
            done = [step for step in steps if isinstance(step, StepDone)]
            passes[name] = Passes.counted(done, rows, options.tokens)
        made_of.append(passes["on"].allows(passes["off"], most))
        ratios.append([plain / guessed for plain, guessed in zip(pair["off"], pair["on"], strict=True)])
    after = on.stats().speculation
    assert before is not None and after is not None  # noqa: PT018
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    whole, own = zip(*ratios, strict=True)
    each, took = (statistics.median(parts) for parts in zip(*made_of, strict=True))
    allowed = statistics.median(tokens / cost for tokens, cost in made_of)
    print(
        f"{rows:3} rows, right {rate:.0%}, K <= {most:2}: {statistics.median(whole):.2f} of off "
        f"({min(whole):.2f} to {max(whole):.2f}), each by itself {statistics.median(own):.2f} "
        f"({min(own):.2f} to {max(own):.2f}); {each:.2f} tokens a pass of {took:.2f} plain steps: {allowed:.2f} by the "
        f"steps; drafted {drafted}, right {accepted}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--useless", action="store_true")
    options = parser.parse_args()
    if options.demo:
        with tempfile.TemporaryDirectory() as folder:
            on_texts(options, Path(folder))
    else:
        asyncio.run(planted(options))


if __name__ == "__main__":
    main()

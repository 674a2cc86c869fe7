"""Worth of a draft model's guesses by a table of costs, without a clock: python -m benchmarks.guesses_by_table

    [--shares 0.05 0.1 0.3 0.6 --kinds quote story --threads 2 --quantization int8 --unsure]

The tasks of `guesses_on_texts`, one stream, the bundled pair's own guesses and answers; a step is said to take what one
of Qwen3-0.6B in bfloat16 does by its tokens, and a pass of the draft model `--shares` of that. So nothing disturbs it,
and it says for which pairs a draft model is worth it. Time without guesses over time with them, and tokens that were
guessed and right: by the draft model alone, and by look-ups first. What was learnt is forgotten between kinds. With
--unsure it guesses on however unlikely its guesses are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from asyncengine import Engine, SamplingParams
from asyncengine.speculation.costs import StepCosts
from asyncengine.step import Batch
from benchmarks.guesses_on_texts import COUNT, Nothing, Task, planner_of, tasks

STEP = (1.0, 1.18, 1.9)
"""Costs of steps of 1, 8 and 32 tokens."""
PASS = (1.0, 1.1, 1.8)


class Meter:
    """Time by the tables of what an engine computes behind prompts."""

    def __init__(self, engine: Engine, share: float) -> None:
        self.steps, self.passes = StepCosts(STEP), StepCosts([share * cost for cost in PASS], 1.0)
        self.time = 0.0
        draft: Any = engine.aengine.core.loop.runner.executor.draft_model
        self._guess, self._launch = draft.guess, draft._executor.launch
        draft.guess, draft._executor.launch = self.guess, self.launch

    def guess(self, batch: Batch) -> Batch:
        found: Batch = self._guess(batch)
        if all(row.start >= len(row.spec.prompt) for row in found.rows):
            self.time += self.steps.of(found.num_tokens)
        return found

    def launch(self, batch: Batch) -> Any:
        self.time += self.passes.of(batch.num_tokens)
        return self._launch(batch)


def run(share: float, alone: bool, kinds: dict[str, Sequence[Task]], options: argparse.Namespace) -> None:
    settings: dict[str, Any] = {
        "speculation_costs": STEP, "draft_costs": tuple(share * cost for cost in PASS), "draft_model": "demo/draft",
        "quantization": options.quantization, "num_threads": options.threads, "show_progress": False,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    with Engine.from_pretrained("demo", **settings) as engine:
        planner, meter = planner_of(engine), Meter(engine, share)
        if options.unsure:
            engine.aengine.core.loop.runner.executor.draft_model._least = 0.0  # type: ignore[attr-defined]
        if alone:
            planner.make = lambda *_: Nothing()
        said, all_plain, all_time = [], 0.0, 0.0
        for kind, chosen in kinds.items():
            planner.clear()
            before, worst, plain = engine.stats().speculation, 9.0, 0.0
            began = meter.time
            for task in chosen:
                at = meter.time
                text = [{"role": role, "content": content} for role, content in task.text]
                count = len(engine.chat(text, params=params).token_ids) - 1
                if count > 0:
                    plain += count
                    worst = min(worst, count / max(meter.time - at, 1e-9))
            after = engine.stats().speculation
            assert before is not None
            assert after is not None
            made = after.drafted_by_model - before.drafted_by_model
            right = after.accepted_by_model - before.accepted_by_model
            said.append(f"{kind} {plain / (meter.time - began):.2f} (worst {worst:.2f}; {right} of {made})")
            all_plain, all_time = all_plain + plain, all_time + meter.time - began
    name = "alone" if alone else "both"
    print(f"a pass takes {share:.2f}, {name}: {all_plain / all_time:.2f}; " + ", ".join(said), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.3, 0.6])
    parser.add_argument("--kinds", nargs="+", default=["quote", "passage", "extract", "edit", "story"])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--unsure", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    found = tasks()
    kinds = {kind: found[kind][:COUNT] for kind in options.kinds}
    for share in options.shares:
        for alone in (True,) if options.alone else (True, False):
            run(share, alone, kinds, options)


if __name__ == "__main__":
    main()

"""Cost of a constraint: compiling it, its masks, everything beside them, and applying a mask to logits.

    python -m benchmarks.grammar_masks [--sizes 32k 151k --rounds 5 --walks 5 --json]

For each constraint of `constraints.py`, teacher-forced over its valid samples as the tokenizer cuts them. All
constraints are gone through in each round, so that a busy moment of the machine hits all alike.

* cold: from the caller's spec to the first mask. `check` is the part on the caller's thread (making the `Grammar` and
  checking its limits), `bare` the library alone: its matcher and its first mask, measured right beside.
* mask: `State.fill` alone. added: all that a token costs with `on_budget="close"`: `fill_mask` and `accept` of our
  `Matcher`, forced tokens not asked for, the budget being ample (8,192 tokens to spare, as for who sets no
  `max_tokens`). jump: the same with them asked for, per output token. near: as `added` with 256 tokens to spare. tight:
  with none, so that each token's way to the end has to be counted. Each kind of walk has a template of its own, walked
  `--walks` times, the first time cold ("first walk").
* apply: `apply_masks` on float32 logits with masks from these walks, one torch thread, per row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from asyncengine.errors import EngineError
from asyncengine.execution.sampling.masks import FilledMasks, apply_masks
from asyncengine.grammar import Grammar, check_limits
from asyncengine.grammar.llguidance_backend import LlguidanceBackend, with_rules
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.shared_masks import Mask
from asyncengine.grammar.vocabulary import Vocabulary
from benchmarks.constraints import CONSTRAINTS, Constraint
from benchmarks.grammar_setup import WIDTHS, grammar_of, laid_out, library_matcher, spread, vocabulary

WALKS = ("mask", "added", "jump", "near", "tight")
AMPLE, NEAR = 8192, 256
"""Tokens of budget beyond those of the sample."""
KEPT_MASKS = 64
ROWS = 16
clock = time.perf_counter


class Bench:
    """One constraint on one backend and vocabulary; samples of each quantity in seconds."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, backend: Any) -> None:
        self.constraint = constraint
        self.vocabulary = vocabulary
        self.backend = backend
        self.outputs = [vocabulary.tokenize(text) for text in laid_out(constraint, "spaced")]
        self.mask: Mask = np.zeros(vocabulary.mask_words, np.int32)
        self.masks: list[Mask] = []
        self.times: dict[str, list[float]] = {name: [] for name in ("cold", "check", "bare", *WALKS, "first")}
        self.steered = 0
        self.refused = ""

    def round(self, number: int, walks: int) -> None:
        """Compile once for each kind of walk, and walk; a round begins with another kind than the one before."""
        for shift in range(len(WALKS)):
            kind = WALKS[(number + shift) % len(WALKS)]
            template = self.cold()
            if template is None:
                return
            for walk in range(walks):
                for output in self.outputs:
                    self.walk(template, kind, output, first=walk == 0)

    def cold(self) -> Any:
        began = clock()
        try:
            grammar = grammar_of(self.constraint)
            check_limits(grammar)
            checked = clock()
            template = self.backend.compile(grammar)
        except EngineError as error:
            self.refused = f"{type(error).__name__}: {error}"
            return None
        template.new_state().fill(self.mask)
        done = clock()
        self.times["check"].append(checked - began)
        self.times["cold"].append(done - began)
        self.bare(grammar)
        return template

    def bare(self, grammar: Grammar) -> None:
        text = with_rules(grammar)[0]
        began = clock()
        matcher = library_matcher(grammar, text, self.vocabulary.ll_tokenizer)
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        self.times["bare"].append(clock() - began)

    def walk(self, template: Any, kind: str, output: list[int], *, first: bool) -> None:
        if kind == "mask":
            taken = self.fill_only(template.new_state(), output)
        else:
            spare = {"tight": 0, "near": NEAR}.get(kind, AMPLE)
            budget = max(len(output), template.min_tokens) + spare
            matcher = Matcher(template, budget, "close")
            taken = self.through(matcher, output, jump=kind == "jump")
        self.times[kind] += taken
        if first and kind == "added":
            self.times["first"] += taken

    def fill_only(self, state: Any, output: list[int]) -> list[float]:
        taken = []
        for token in output:
            began = clock()
            state.fill(self.mask)
            taken.append(clock() - began)
            if len(self.masks) < KEPT_MASKS:
                self.masks.append(self.mask.copy())
            assert state.consume(token), (self.constraint.name, token)
        return taken

    def through(self, matcher: Matcher, output: list[int], *, jump: bool) -> list[float]:
        taken, place = [], 0
        while place < len(output):
            began = clock()
            matcher.fill_mask(self.mask)
            tokens = matcher.accept(output[place], jump)
            seconds = clock() - began
            if matcher.steered_from is not None:  # the way out it knows is longer than the rest of the sample
                self.steered += 1
                break
            if tokens != output[place : place + len(tokens)]:
                break
            place += len(tokens)
            taken += [seconds / len(tokens)] * len(tokens)
        return taken

    def report(self) -> dict[str, Any]:
        if self.refused:
            return {"refused": self.refused}
        micro = {name: spread(self.times[name], 1e6) for name in (*WALKS, "first")}
        milli = {name: spread(self.times[name], 1e3) for name in ("cold", "check", "bare")}
        return {"ms": milli, "us": micro, "tokens": sum(map(len, self.outputs)), "steered_when_tight": self.steered}


def apply_cost(masks: list[Mask], width: int, rounds: int) -> dict[str, float]:
    """Microseconds per row of `apply_masks`, one row and `ROWS` rows at a time, in turn."""
    logits = torch.randn(ROWS, width)
    taken: dict[int, list[float]] = {1: [], ROWS: []}
    for start in range(0, rounds * ROWS):
        for rows, times in taken.items():
            chosen = [masks[(start * 7 + row * 13) % len(masks)] for row in range(rows)]
            filled = FilledMasks(list(range(rows)), torch.from_numpy(np.stack(chosen)), {}, [])
            part = logits[:rows].clone()
            began = clock()
            apply_masks(part, filled)
            times.append((clock() - began) / rows)
    return {f"{rows} rows": statistics.median(times) * 1e6 for rows, times in taken.items()}


def measure(size: str, rounds: int, walks: int) -> dict[str, Any]:
    vocab = vocabulary(size)
    found = LlguidanceBackend(vocab)
    benches = [Bench(constraint, vocab, found) for constraint in CONSTRAINTS]
    benches[0].cold()  # warm-up: imports
    benches[0].times = {name: [] for name in benches[0].times}
    for number in range(rounds):
        for bench in benches:
            if not bench.refused:
                bench.round(number, walks)
    found.close()
    pooled = {name: [one for bench in benches for one in bench.times[name]] for name in benches[0].times}
    masks = [mask for bench in benches for mask in bench.masks]
    return {
        "constraints": {bench.constraint.name: bench.report() for bench in benches},
        "all": {
            "ms": {name: spread(pooled[name], 1e3) for name in ("cold", "check", "bare")},
            "us": {name: spread(pooled[name], 1e6) for name in (*WALKS, "first")},
        },
        "apply_us_per_row": apply_cost(masks, vocab.vocab_size, rounds),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--rounds", type=int, default=5, help="each compiles every constraint five times")
    parser.add_argument("--walks", type=int, default=5, help="over each compiled constraint")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def table(report: dict[str, Any]) -> str:
    lines = []
    for title, found in report.items():
        lines.append(f"{title}; apply_masks us per row: {found['apply_us_per_row']}")
        heads = ("cold ms", "check", "bare", "mask us", "added", "first walk", "jump", "near", "tight")
        lines.append(f"  {'mean / p99':<15}" + "".join(f"{head:>15}" for head in heads))
        rows = {**found["constraints"], "all": found["all"]}
        for name, row in rows.items():
            if "refused" in row:
                lines.append(f"  {name:<15} {row['refused'][:110]}")
                continue
            cells = [f"{row['ms'][key]['mean']:.2f} / {row['ms'][key]['p99']:.1f}" for key in ("cold", "check", "bare")]
            order = ("mask", "added", "first", "jump", "near", "tight")
            cells += [f"{row['us'][key]['mean']:.1f} / {row['us'][key]['p99']:.0f}" for key in order]
            lines.append(f"  {name:<15}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    report = {f"llguidance, {size}": measure(size, options.rounds, options.walks) for size in options.sizes}
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()

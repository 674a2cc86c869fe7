"""A batch with 1, 4 and 16 distinct adapters against the same batch without: what batched low-rank adapters cost.

    python -m benchmarks.lora_throughput [--shape small --batch 16 --input 64 --rank 16 --dora --rounds 3 --json]

Makes a random bfloat16 checkpoint of the Qwen3-0.6B shape in a temporary
folder and drives the model runner by hand: prompts in one step, then one token for each request a step, then steps in
which one request computes its prompt again while the others decode. Random adapters on all linears of the layers (q, k,
v, o, gate, up, down), as many slots as adapters at most, request i with adapter i modulo their number; with
`--one-row-each`, the first requests have one adapter each and the others none. The cases take turns, in changing order,
each beside a run of the base model, which is run twice a round to show what the machine's company alone does. Ratios of
tokens per second, medians over rounds; "all" is the prompts and the decoding together.
Targets: at least 0.85 with 4 adapters and 0.70 with 16.

On a machine that is busy, threads wait for each other at every operation and the clock says little: `--cpu-time` runs
one thread and counts only what it computes itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from asyncengine import SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.request_spec import RequestSpec
from asyncengine.seams import LoraWeights
from asyncengine.step import Batch, Row
from benchmarks.random_model import SHAPES, make_checkpoint

SHAPES["qwen3-0.6b-seventh"] = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 4, "vocab_size": 21705}
"""4 of 28 layers and as much less vocabulary: the same ratios in a seventh of the time."""
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True)
TARGETS = {4: 0.85, 16: 0.70}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


MIXED_STEPS = 5


class Seconds(NamedTuple):
    prompt: float
    """The step of all prompts."""
    decode: float
    """A step of one token for each request."""
    mixed: float
    """A step of one prompt and one token for each other request."""


@dataclass(frozen=True)
class Adapter:
    modules: dict[str, LoraWeights]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[options.shape], options.dtype, folder)
        config = EngineConfig(
            dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=options.batch, page_size=16,
            max_model_len=options.input + options.output, kv_cache_memory=f"{options.kv_mib}MiB", show_progress=False,
        )  # fmt: skip
        model = load_model(folder, config)
        lora = LoraLayers(model.model, options.slots, options.max_rank)
        runner = build_runner(model, config, lora=lora).runner
    seconds_to_write = fill(lora, options)
    report = measure(runner, options)
    report |= {"options": vars(options), "adapter_mib": lora.nbytes / 2**20, "write_ms": seconds_to_write * 1e3}
    runner.close()
    print(json.dumps(report) if options.json else table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--one-row-each", action="store_true", help="so many requests with an adapter, the rest without"
    )
    parser.add_argument("--dora", action="store_true", help="adapters with magnitudes")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, default=64, help="what would be allowed")
    parser.add_argument("--input", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output", type=int, default=24, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its own time: for a busy machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    return options


def clock(options: argparse.Namespace) -> Callable[[], float]:
    return time.thread_time if options.cpu_time else time.perf_counter


def fill(lora: LoraLayers, options: argparse.Namespace) -> float:
    """A random adapter in every slot; median seconds of a write, the first one's memory not counted."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    paths = [path for path in lora.modules if path.endswith(LINEARS)]
    lora.allocate(paths, options.rank)
    spent = []
    for slot in range(1, options.slots + 1):
        modules = {}
        for path in paths:
            width, out, *_ = lora.modules[path]
            a = torch.randn(options.rank, width, generator=generator) * width**-0.5
            b = torch.randn(out, options.rank, generator=generator) * 0.02
            magnitude = torch.rand(len(b), generator=generator) if options.dora else None
            modules[path] = LoraWeights(path, a.to(dtype), b.to(dtype), magnitude=magnitude)
        began = clock(options)()
        lora.write(slot, Adapter(modules))
        spent.append(clock(options)() - began)
    return statistics.median(spent)


class Requests:
    """A batch of requests over `adapters` adapters, driven step by step."""

    def __init__(self, runner: ModelRunner, options: argparse.Namespace, adapters: int) -> None:
        generator = random.Random(0)
        vocab = int(SHAPES[options.shape]["vocab_size"])
        length = -(-(options.input + options.output) // runner.page_size)
        places = range(options.batch)
        self.tokens = [[generator.randrange(vocab) for _ in range(options.input)] for _ in places]
        self._pages = [list(range(1 + place * length, 1 + (place + 1) * length)) for place in places]
        alone = adapters if options.one_row_each else options.batch
        self._slots = [1 + place % adapters if adapters and place < alone else 0 for place in places]
        self._spec = RequestSpec(1, (0,) * options.input, GREEDY, options.input + options.output)
        self._runner, self._clock, self._steps = runner, clock(options), 0

    def step(self, starts: list[int], ends: list[int]) -> tuple[float, list[int]]:
        """(seconds, sampled tokens) of a step that computes positions [start, end) of each request."""
        self._steps += 1
        rows = tuple(
            Row(self._spec, place, start, end - start, self.tokens[place], False, self._pages[place], True, slot)
            for place, (start, end, slot) in enumerate(zip(starts, ends, self._slots, strict=True))
        )
        began = self._clock()
        result = self._runner.launch(Batch(self._steps, rows)).wait()
        return self._clock() - began, list(result.tokens)


def run(runner: ModelRunner, options: argparse.Namespace, adapters: int) -> Seconds:
    requests = Requests(runner, options, adapters)
    tokens, spent = requests.tokens, []
    computed = [0] * options.batch
    for _ in range(options.output):
        ends = [len(row) for row in tokens]
        seconds, sampled = requests.step(computed, ends)
        spent.append(seconds)
        computed = ends
        for row, token in zip(tokens, sampled, strict=True):
            row.append(token)
    mixed = []
    for place in range(
        min(MIXED_STEPS, options.batch)
    ):  # what was computed last, once more; one of them from its start
        starts = [0 if place == other else end - 1 for other, end in enumerate(computed)]
        ends = [options.input if place == other else end for other, end in enumerate(computed)]
        mixed.append(requests.step(starts, ends)[0])
    return Seconds(spent[0], statistics.median(spent[1:]), statistics.median(mixed))


def measure(runner: ModelRunner, options: argparse.Namespace) -> dict[str, Any]:
    """Every case in turn, `rounds` times, after one short warm-up each. Case -1 is the base model once more."""
    cases = [0, -1, *options.adapters]
    for case in cases:
        run(runner, argparse.Namespace(**{**vars(options), "output": 2}), max(case, 0))
    found: dict[int, list[Seconds]] = {case: [] for case in cases}
    for turn in range(options.rounds):
        for case in cases if turn % 2 == 0 else reversed(cases):
            found[case].append(run(runner, options, max(case, 0)))
    report: dict[str, Any] = {"base": {}, "ratios": {}}
    names = {case: "base again" if case < 0 else f"{case} adapters" for case in cases[1:]}
    prompt, decode, _ = (statistics.median(values) for values in zip(*found[0], strict=True))
    report["base"]["prompt_tokens_per_second"] = options.batch * options.input / prompt
    report["base"]["output_tokens_per_second"] = options.batch / decode
    for case, name in names.items():
        ratios: dict[str, list[float]] = {key: [] for key in (*Seconds._fields, "all")}
        for base, own in zip(found[0], found[case], strict=True):
            for key, before, after in zip(Seconds._fields, base, own, strict=True):
                ratios[key].append(before / after)
            ratios["all"].append(total(base, options) / total(own, options))
        report["ratios"][name] = {key: statistics.median(values) for key, values in ratios.items()}
        report["ratios"][name] |= {"target": TARGETS.get(case), "rounds": ratios}
    return report


def total(seconds: Seconds, options: argparse.Namespace) -> float:
    return seconds.prompt + seconds.decode * (options.output - 1)


def table(report: dict[str, Any]) -> str:
    base, options = report["base"], report["options"]
    lines = [
        f"base: {base['prompt_tokens_per_second']:.0f} prompt tokens/s, {base['output_tokens_per_second']:.1f} output "
        f"tokens/s; {options['slots']} slots of rank {options['rank']} take {report['adapter_mib']:.0f} MiB, "
        f"writing one takes {report['write_ms']:.0f} ms",
        f"{'ratio to base':<14} {'decode':>7} {'mixed':>7} {'prompt':>7} {'all':>7} {'target':>7}",
    ]
    for name, row in report["ratios"].items():
        target = f"{row['target']:>7.2f}" if row["target"] else f"{'-':>7}"
        figures = " ".join(f"{row[key]:>7.2f}" for key in ("decode", "mixed", "prompt", "all"))
        lines.append(f"{name:<14} {figures} {target}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""A batch with 1, 4 and 16 distinct adapters against the same batch without: what batched low-rank adapters cost.

    python benchmarks/lora_throughput.py [--shape small --batch 16 --input 64 --output 24 --rank 16 --rounds 3 --json]

Makes a random bfloat16 checkpoint of the Qwen3-0.6B shape (as `execution_vs_transformers.py` does) in a temporary
folder and drives the model runner by hand: prompts in one step, then one token for each request a step. Random adapters
on all linears of the layers (q, k, v, o, gate, up, down), as many slots as adapters at most. The cases take turns, in
changing order, each beside a run of the base model, which is run twice a round to show what the machine's company alone
does. Ratios of tokens per second, medians over rounds; decoding and the prompt step apart. Targets: at least 0.85 with
4 adapters and 0.70 with 16.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from execution_vs_transformers import SHAPES, make_checkpoint

from asyncengine import SamplingParams
from asyncengine.batch import Batch, Row, RowSpec
from asyncengine.config import EngineConfig
from asyncengine.models.loading import load_model
from asyncengine.runner.lora import LoraLayers, install_lora
from asyncengine.runner.model_runner import ModelRunner, build_runner

SHAPES["qwen3-0.6b-seventh"] = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 4, "vocab_size": 21705}
"""4 of 28 layers and as much less vocabulary: the same ratios in a seventh of the time."""
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True)
TARGETS = {4: 0.85, 16: 0.70}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Factors:
    a: torch.Tensor
    b: torch.Tensor
    embedding: bool = False


@dataclass(frozen=True)
class Adapter:
    modules: dict[str, Factors]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(options, folder)
        config = EngineConfig(
            dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=options.batch, page_size=16,
            max_model_len=options.input + options.output, kv_cache_memory=f"{options.kv_mib}MiB", show_progress=False,
        )  # fmt: skip
        model = load_model(folder, config)
        lora = install_lora(model.module, options.slots, options.rank)
        runner = build_runner(model, config, lora=lora)
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
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output", type=int, default=24, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def fill(lora: LoraLayers, options: argparse.Namespace) -> float:
    """A random adapter in every slot; median seconds of a write, the first one's memory not counted."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    paths = [path for path in lora.layer_linears() if path.endswith(LINEARS)]
    lora.allocate(paths)
    spent = []
    for slot in range(1, options.slots + 1):
        modules = {}
        for path in paths:
            width, out, *_ = lora.modules[path]
            a = torch.randn(options.rank, width, generator=generator) * width**-0.5
            b = torch.randn(out, options.rank, generator=generator) * 0.02
            modules[path] = Factors(a.to(dtype), b.to(dtype))
        began = time.perf_counter()
        lora.write(slot, Adapter(modules))
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def run(runner: ModelRunner, options: argparse.Namespace, adapters: int) -> tuple[float, float]:
    """(seconds of the prompt step, median seconds of a decoding step) of a batch over `adapters` adapters."""
    generator = random.Random(0)
    vocab = int(SHAPES[options.shape]["vocab_size"])
    length = -(-(options.input + options.output) // runner.page_size)
    tokens = [[generator.randrange(vocab) for _ in range(options.input)] for _ in range(options.batch)]
    pages = [list(range(1 + place * length, 1 + (place + 1) * length)) for place in range(options.batch)]
    spec = RowSpec(1, GREEDY, 0, options.input, ())
    spent = []
    computed = 0
    for step in range(1, options.output + 1):
        rows = tuple(
            Row(
                spec, place, computed, len(tokens[place]) - computed, tokens[place], False, pages[place], True,
                1 + place % adapters if adapters else 0,
            )
            for place in range(options.batch)
        )  # fmt: skip
        began = time.perf_counter()
        result = runner.execute(Batch(step, rows))
        spent.append(time.perf_counter() - began)
        computed = len(tokens[0])
        for row, token in zip(tokens, result.tokens, strict=True):
            row.append(token)
    return spent[0], statistics.median(spent[1:])


def measure(runner: ModelRunner, options: argparse.Namespace) -> dict[str, Any]:
    """Every case in turn, `rounds` times, after one short warm-up each. Case -1 is the base model once more."""
    cases = [0, -1, *options.adapters]
    for case in cases:
        run(runner, argparse.Namespace(**{**vars(options), "output": 2}), max(case, 0))
    found: dict[int, list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(options.rounds):
        for case in cases if turn % 2 == 0 else reversed(cases):
            found[case].append(run(runner, options, max(case, 0)))
    report: dict[str, Any] = {"base": {}, "ratios": {}}
    names = {case: "base again" if case < 0 else f"{case} adapters" for case in cases[1:]}
    prompt, decode = (statistics.median(values) for values in zip(*found[0], strict=True))
    report["base"] = {"prompt_tokens_per_second": options.batch * options.input / prompt}
    report["base"]["output_tokens_per_second"] = options.batch / decode
    for case, name in names.items():
        ratios: dict[str, list[float]] = {"prompt": [], "decode": [], "all": []}
        for (base_first, base_step), (first, step) in zip(found[0], found[case], strict=True):
            ratios["prompt"].append(base_first / first)
            ratios["decode"].append(base_step / step)
            ratios["all"].append(total(base_first, base_step, options) / total(first, step, options))
        report["ratios"][name] = {key: statistics.median(values) for key, values in ratios.items()}
        report["ratios"][name] |= {"target": TARGETS.get(case), "decode_rounds": ratios["decode"]}
    return report


def total(first: float, step: float, options: argparse.Namespace) -> float:
    return first + step * (options.output - 1)


def table(report: dict[str, Any]) -> str:
    base, options = report["base"], report["options"]
    lines = [
        f"base: {base['prompt_tokens_per_second']:.0f} prompt tokens/s, {base['output_tokens_per_second']:.1f} output "
        f"tokens/s; {options['slots']} slots of rank {options['rank']} take {report['adapter_mib']:.0f} MiB, "
        f"writing one takes {report['write_ms']:.0f} ms",
        f"{'ratio to base':<14} {'prompt':>7} {'decode':>7} {'all':>6} {'target':>7}",
    ]
    for name, row in report["ratios"].items():
        target = f"{row['target']:>7.2f}" if row["target"] else f"{'-':>7}"
        lines.append(f"{name:<14} {row['prompt']:>7.2f} {row['decode']:>7.2f} {row['all']:>6.2f} {target}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

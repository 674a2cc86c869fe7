"""Constrained requests against free ones: the same number of output tokens, the same engine, turn by turn.

    python -m benchmarks.constrained_throughput [--batch 16 --output 128 --rounds 3 --threads 2 --json]

Makes a random bfloat16 checkpoint of the Qwen3-0.6B shape in a temporary
folder with a real tokenizer of 151,650 entries beside it, and serves it twice, with jump_forward off and on. Each
round runs the constrained requests and, twice, free ones that produce as many tokens each (end-of-sequence ignored),
in changing order. Greedy, `on_budget="close"`, an ample distance between the budget and the shortest output. Grammars
are compiled before, when warming up; what compiling costs is in `grammar_masks.py`.

"strings": a record of free strings. "records": a list of records with bounded strings, where half of the text is
keys and punctuation: forced tokens cost no step, but are computed. Read the ratio of output tokens per second
(target with jump_forward off: at least 0.95) beside the ratio of free requests to the same free requests, which says
what the machine's company alone does to it: a difference within that range is none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from asyncengine import AsyncEngine, SamplingParams
from benchmarks.constraints import BOOLEAN, INTEGER, STRING, array, record, text
from benchmarks.grammar_setup import WIDTHS
from benchmarks.random_model import SHAPES, make_checkpoint

ITEM = record({"name": text(5, 30), "quantity": {**INTEGER, "minimum": 0, "maximum": 9999}, "available": BOOLEAN})
SCHEMAS = {
    "strings": record({"title": STRING, "summary": STRING, "paragraphs": array(STRING)}),
    "records": record({"items": array(ITEM, minItems=3), "comment": STRING}),
}
SHAPES["tiny-151k"] = {**SHAPES["small"], "vocab_size": 151936, "num_hidden_layers": 2}
"""For trying the script out: real masks, hardly a forward pass to hide them under."""
NEUTRAL = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
TARGET = 0.95


def letters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge makes `token`: what BPE leaves of it before its own rank is reached."""
    last = ranks[token]
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        scores = [ranks.get(one + two, last) for one, two in pairwise(parts)]
        index = scores.index(min(scores))
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """The tests' vocabulary of `size` entries as transformers has it, which takes a few seconds to make."""
    from support.big_tokenizers import ADDED, EOS, PATTERN, SPECIAL, big_tokenizer

    tokenizer = big_tokenizer(size)
    table = letters()
    ranks = {token: rank for rank, token in enumerate(tokenizer.ranked)}
    names = ["".join(map(table.__getitem__, token)) for token in tokenizer.ranked]
    pairs = [halves(token, ranks) for token in tokenizer.ranked if len(token) > 1]
    merges = [(names[ranks[one]], names[ranks[two]]) for one, two in pairs]
    made = Tokenizer(BPE(vocab={name: rank for rank, name in enumerate(names)}, merges=merges))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=EOS[0], pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def save_tokenizer(folder: str) -> None:
    """Beside the checkpoint, and its end of sequence into the checkpoint's configuration."""
    tokenizer = tokenizer_of(WIDTHS["151k"][0])
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "eos_token_id": tokenizer.eos_token_id}), encoding="utf-8")


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(100_000) for _ in range(options.input)] for _ in range(options.batch)]


async def make_engine(options: argparse.Namespace, folder: str, jump: bool) -> AsyncEngine:
    return await AsyncEngine.from_pretrained(
        folder, dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=options.batch,
        max_model_len=options.input + options.output + 1, prefix_caching=False, jump_forward=jump, show_progress=False,
    )  # fmt: skip


async def run(engine: AsyncEngine, prompts: list[list[int]], each: list[SamplingParams]) -> dict[str, Any]:
    steps, began = engine.stats().steps, time.perf_counter()
    done = await asyncio.gather(*map(engine.generate, prompts, each))
    seconds = time.perf_counter() - began
    counts = [len(completion.token_ids) for completion in done]
    return {"rate": sum(counts) / seconds, "counts": counts, "steps": engine.stats().steps - steps}


async def compare(engine: AsyncEngine, options: argparse.Namespace, schema: Any, prompts: Any) -> dict[str, Any]:
    """Constrained and free in turn, `rounds` times, after a warm-up that tells how long the constrained outputs get."""
    bound = NEUTRAL.replace(grammar=schema, max_tokens=options.output, on_budget="close")
    counts = (await run(engine, prompts, [bound] * len(prompts)))["counts"]
    free = [NEUTRAL.replace(max_tokens=count, ignore_eos=True) for count in counts]
    arms = {"constrained": [bound] * len(prompts), "free": free, "free again": free}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for turn in range(options.rounds):
        order = list(arms)[turn % len(arms) :] + list(arms)[: turn % len(arms)]
        for name in order:
            runs[name].append(await run(engine, prompts, arms[name]))
    assert all(one["counts"] == counts for one in runs["free"])
    ratios = {
        name: [one["rate"] / free["rate"] for one, free in zip(runs[name], runs["free"], strict=True)]
        for name in ("constrained", "free again")
    }
    return {
        "tokens_per_output": statistics.fmean(counts),
        "tokens_per_second": {name: statistics.median(one["rate"] for one in each) for name, each in runs.items()},
        "steps": {name: statistics.median(one["steps"] for one in each) for name, each in runs.items()},
        "ratio": statistics.median(ratios["constrained"]),
        "null": [min(ratios["free again"]), max(ratios["free again"])],
        "ratios": ratios,
    }


async def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    engines = {jump: await make_engine(options, folder, jump == "on") for jump in ("off", "on")}
    prompts = make_prompts(options)
    report: dict[str, Any] = {"options": vars(options), "target": TARGET, "results": {}}
    for engine in engines.values():
        await run(engine, prompts[:1], [NEUTRAL.replace(max_tokens=2, ignore_eos=True)])
    for name in options.schemas:
        for jump, engine in engines.items():
            found = await compare(engine, options, SCHEMAS[name], prompts)
            report["results"][f"{name}, jump_forward {jump}"] = found
    for engine in engines.values():
        await engine.aclose()
    return report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("qwen3-0.6b", "tiny-151k"), default="qwen3-0.6b")
    parser.add_argument("--schemas", nargs="+", choices=SCHEMAS, default=list(SCHEMAS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input", type=int, default=32, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="generated tokens at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def table(report: dict[str, Any]) -> str:
    heads = f"{'constrained':>12}{'free':>8}{'ratio':>7}{'free / free':>15}{'tokens each':>12}{'steps':>12}"
    lines = [f"{'output tokens/s':<26}{heads}"]
    for name, row in report["results"].items():
        rate, steps = row["tokens_per_second"], row["steps"]
        both = f"{steps['constrained']:.0f} / {steps['free']:.0f}"
        lines.append(
            f"{name:<26}{rate['constrained']:>12.1f}{rate['free']:>8.1f}{row['ratio']:>7.3f}"
            f"{'{:.3f} .. {:.3f}'.format(*row['null']):>15}"
            f"{row['tokens_per_output']:>12.1f}{both:>12}"
        )
    return "\n".join([*lines, f"target with jump_forward off: {report['target']}"])


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[options.shape], options.dtype, folder)
        save_tokenizer(folder)
        report = asyncio.run(measure(options, folder))
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()

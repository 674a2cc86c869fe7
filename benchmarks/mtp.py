"""Guesses of a head, a checkpoint's own or an EAGLE-3 one, on and off in turns: python -m benchmarks.mtp --shape NAME

    [--rows 1 4 --rounds 5 --tokens 96 --rates 0.8 0 --quantization int8 --threads 2]
    [--costs 0.157 0.187 0.33 --head-costs 0.025 0.031 0.09]

Two engines over the same made-up weights in one process, one without the head; nothing is looked up. The head does all
its work, but its guesses are replaced: each is the token that the model will say with a chance of `--rates` (0: a
useless head). Medians of the ratios of times, off over on, from the first token to the last of all requests. What the
planner has learnt is forgotten before each round. Costs of steps and of the head are measured at the load, unless they
are given: where others use the machine, what was measured may be anything, and CPU seconds say more than time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asyncengine import AsyncEngine
from asyncengine.speculation.acceptance import NOTHING, Draft
from asyncengine.step import Row
from benchmarks import random_model
from benchmarks.speculation import PROMPT, timed

_SIZES = {
    **random_model.SHAPES["qwen3.5-0.8b"], "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": None,
    "partial_rotary_factor": 0.25, "rope_theta": 1e7,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {**_SIZES, "mtp_num_hidden_layers": 1},
    # the same size with attention in all layers, and a mixture of experts in the head
    "attention-0.8b": {
        **_SIZES, "model_type": "glm4_moe", "first_k_dense_replace": 24, "n_routed_experts": 2, "n_shared_experts": 0,
        "num_experts_per_tok": 1, "moe_intermediate_size": 3584, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
    },
    "qwen3-0.6b": {
        **random_model.SHAPES["qwen3-0.6b"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "eos_token_id": None, "rope_theta": 1e6,
    },
    "smollm2-135m": {
        **random_model.SHAPES["smollm2-135m"], "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": None,
    },
}  # fmt: skip
EAGLE: dict[str, dict[str, Any]] = {
    name: {
        **SHAPES[name], "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": 32000, "tie_word_embeddings": False,
    }
    for name in ("qwen3-0.6b", "smollm2-135m")
}  # fmt: skip
"""EAGLE-3 heads by the shapes of their models: one layer of the same sizes, over 32,000 tokens."""


class NoLookups:
    """A proposer that finds nothing."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return NOTHING


class Replaced:
    """The head's round with other tokens: right ones with a chance of `rate`."""

    def __init__(self, runner: Any) -> None:
        self._round = runner.mtp.round
        self._random = random.Random(1)
        self.rate = 0.0
        self.known: dict[tuple[int, ...], list[int]] = {}
        """Answers by prompt; of others nothing is replaced."""
        runner.mtp.round = self

    def __call__(self, rows: Sequence[Row], places: Sequence[Row], before: torch.Tensor) -> Any:
        tokens, chances, hidden = self._round(rows, places, before)
        for number, row in enumerate(places):
            answer = self.known.get(row.spec.prompt)
            place = row.start + row.num_scheduled - row.spec.prompt_len
            if answer is not None and place < len(answer):
                right = self._random.random() < self.rate
                tokens[number], chances[number] = answer[place] if right else answer[place] ^ 1, max(self.rate, 0.5)
        return tokens, chances, hidden


def _write_head(folder: str, content: dict[str, Any]) -> Path:
    head = Path(folder) / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(content))
    return head


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[options.shape]))
        draft = str(_write_head(folder, EAGLE[options.shape])) if options.shape in EAGLE else None
        shared: dict[str, Any] = {
            "load_format": "dummy", "dtype": "bfloat16", "num_threads": options.threads, "show_progress": False,
            "quantization": options.quantization, "max_model_len": 1024, "prefix_caching": False,
            "speculation_costs": options.costs and tuple(options.costs),
            "draft_costs": options.head_costs and tuple(options.head_costs),
        }  # fmt: skip
        async with (
            await AsyncEngine.from_pretrained(folder, mtp=False, **shared) as off,
            await AsyncEngine.from_pretrained(folder, draft_model=draft, **shared) as on,
        ):
            assert on.info.no_mtp is None, on.info.no_mtp
            config = on.core.config
            for name, costs in (("steps", config.speculation_costs), ("the head", config.draft_costs)):
                unit = config.speculation_costs[0]
                print(f"costs of {name} by their tokens:", [round(cost / unit, 3) for cost in costs])
            for engine in (off, on):
                engine.core.loop.scheduler.roster.drafts.make = lambda *_: NoLookups()
            replaced = Replaced(on.core.loop.runner.executor)
            for rows in options.rows:
                for rate in options.rates:
                    await compare(off, on, replaced, rows, rate, options)


async def compare(
    off: AsyncEngine, on: AsyncEngine, replaced: Replaced, rows: int, rate: float, options: argparse.Namespace
) -> None:
    generator = random.Random(rows)
    prompts = [[generator.randrange(1000, 49_000) for _ in range(PROMPT)] for _ in range(rows)]
    _, answers = await timed(off, prompts, options.tokens)
    replaced.rate = rate
    replaced.known = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    before, ratios, own = on.stats(), list[float](), list[float]()
    for turn in range(options.rounds):
        on.core.loop.scheduler.roster.drafts.clear()
        pair, spent = {}, {}
        for name, engine in (("off", off), ("on", on)) if turn % 2 else (("on", on), ("off", off)):
            began = time.process_time()
            (pair[name], _), found = await timed(engine, prompts, options.tokens)
            spent[name] = time.process_time() - began
            assert found == answers, "guesses were seen"
        ratios.append(pair["off"] / pair["on"])
        own.append(spent["off"] / spent["on"])
    after = on.stats()
    drafted = after.speculation.drafted - before.speculation.drafted
    accepted = after.speculation.accepted - before.speculation.accepted
    print(
        f"{rows:3} rows, right {rate:.0%}: {statistics.median(ratios):.2f} of off ({min(ratios):.2f} to "
        f"{max(ratios):.2f}), in CPU seconds {statistics.median(own):.2f}; drafted {drafted}, right {accepted} in "
        f"{after.steps - before.steps} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3.5-0.8b")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 0.0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--costs", type=float, nargs="+")
    parser.add_argument("--head-costs", type=float, nargs="+")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

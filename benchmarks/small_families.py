"""One stream of small models of several families: python -m benchmarks.small_families [--dtype bfloat16 --rounds 6]

Random weights, 8 layers, a prompt of 32 tokens and 200 behind it, nothing guessed: what a step costs
beside its arithmetic shows. The median of the rounds but the first two, in tokens a second. For two versions of the
engine run it in a checkout of each, in turns: it uses the public API alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncengine import AsyncEngine, SamplingParams

PROMPT, ANSWER = 32, 200


def configs(width: int) -> dict[str, dict[str, Any]]:
    """The config.json of each family."""
    sizes = {
        "vocab_size": 4096, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 8,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 128, "max_position_embeddings": 1024,
    }  # fmt: skip
    gpt2 = {"n_embd": width, "n_layer": 8, "n_head": width // 64, "n_positions": 1024, "vocab_size": 4096}
    found = {
        "gemma2": {**sizes, "architectures": ["Gemma2ForCausalLM"], "head_dim": 64, "query_pre_attn_scalar": 64},
        "olmo2": {**sizes, "architectures": ["Olmo2ForCausalLM"]},
        "gpt2": {**gpt2, "architectures": ["GPT2LMHeadModel"]},
    }
    return {name: {"model_type": name, "eos_token_id": 1, "bos_token_id": 0, **each} for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=6, help="at least three")
    parser.add_argument("--width", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--families", nargs="+", choices=configs(128), default=list(configs(128)))
    options = parser.parse_args()
    for family in options.families:
        rates = asyncio.run(measure(configs(options.width)[family], options.dtype, options.rounds))
        print(f"{family} {options.dtype} {statistics.median(rates[2:]):.0f} tokens/s")


async def measure(config: dict[str, Any], dtype: str, rounds: int) -> list[float]:
    """Tokens a second of each round."""
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        async with await AsyncEngine.from_pretrained(
            folder, load_format="dummy", dtype=dtype, max_model_len=PROMPT + ANSWER, speculation="off",
            show_progress=False,
        ) as engine:  # fmt: skip
            params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
            for _ in range(rounds):
                began = time.perf_counter()
                answer = await engine.generate(list(range(5, 5 + PROMPT)), params)
                rates.append(len(answer.token_ids) / (time.perf_counter() - began))
    return rates


if __name__ == "__main__":
    main()

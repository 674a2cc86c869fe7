"""One stream of small models of several families: python -m benchmarks.small_families [--dtype bfloat16 --rounds 6]

Random weights, 8 layers of width 512, a prompt of 32 tokens and 200 behind it, nothing guessed: what a step costs
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

SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**SIZES, "architectures": ["Gemma2ForCausalLM"], "head_dim": 64, "query_pre_attn_scalar": 64},
    "olmo2": {**SIZES, "architectures": ["Olmo2ForCausalLM"]},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 4096, "n_embd": 512, "n_layer": 8, "n_head": 8,
        "n_positions": 1024, "eos_token_id": 1, "bos_token_id": 0,
    },
}  # fmt: skip
PROMPT, ANSWER = 32, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=6, help="at least three")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options = parser.parse_args()
    for family in options.families:
        rates = asyncio.run(measure(family, options.dtype, options.rounds))
        print(f"{family} {options.dtype} {statistics.median(rates[2:]):.0f} tokens/s")


async def measure(family: str, dtype: str, rounds: int) -> list[float]:
    """Tokens a second of each round."""
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
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

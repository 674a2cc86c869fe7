"""Loss of quality by weights in 8 and 4 bits, on the demo model: python -m benchmarks.quantization_quality

Held-out conversations of every skill: error and divergence of the logits, and the perplexity of what the assistant
writes, against bfloat16; then the share of right answers, decoded greedily through the engine. GGUF files of the demo
model (`python tests/support/demo_gguf.py FOLDER` writes them) can stand beside it, for the answers alone:

    python -m benchmarks.quantization_quality --count 0 --answers 100 --gguf FOLDER/*.gguf
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from asyncengine import Engine, EngineConfig, SamplingParams
from asyncengine.demo import MODEL_PATH
from asyncengine.execution.attention.base import StepView
from asyncengine.execution.attention.factory import make_backend
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.models.loading import LoadedModel, load_model
from tools.demo_model.batches import Encoder
from tools.demo_model.conversations import MAKERS
from tools.demo_model.dialogue import Conversation
from tools.demo_model.evaluate import evaluate, held_out

FORMS: tuple[Any, ...] = (None, "int8", "int4")
PAGE = 16


@dataclass(slots=True)
class Totals:
    """Sums over tokens."""

    squared_error: float = 0.0
    squares: float = 0.0
    divergence: float = 0.0
    same_first: int = 0
    tokens: int = 0
    loss: float = 0.0
    written: float = 0.0

    def add(self, expected: torch.Tensor, found: torch.Tensor, ids: torch.Tensor, written: torch.Tensor) -> None:
        """Logits [n, vocab] of both forms; `written` [n - 1] says which following tokens are the assistant's."""
        self.squared_error += float((expected - found).square().sum())
        self.squares += float(expected.square().sum())
        left, right = expected.log_softmax(-1), found.log_softmax(-1)
        self.divergence += float((left.exp() * (left - right)).sum())
        self.same_first += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self.tokens += len(ids)
        losses = -right[:-1].gather(1, ids[1:, None])[:, 0]
        self.loss += float((losses * written).sum())
        self.written += float(written.sum())


def logits_of(model: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """[T, vocab] of one sequence, in float32."""
    count = len(ids)
    pages = -(-count // PAGE)
    config = EngineConfig(page_size=PAGE)
    backend = make_backend(config, model.layers, 1 + pages, model.dtype, model.device, count)
    table = np.arange(1, 1 + pages, dtype=np.int32)[None]
    starts, counts, ends = (np.array(value, dtype=np.int64) for value in ([0], [count], [0, count]))
    places = torch.arange(count)
    backend.plan(StepView(starts, counts, ends, table, places + PAGE))
    with torch.inference_mode():
        logits = model.model.forward(ids, StepContext(places, backend), places).float().clone()
    backend.close()
    return logits


def compare_logits(count: int, seed: int) -> dict[str, Totals]:
    encoder = Encoder(AutoTokenizer.from_pretrained(MODEL_PATH))
    models = {
        str(form): load_model(str(MODEL_PATH), EngineConfig(dtype="bfloat16", quantization=form, show_progress=False))
        for form in FORMS
    }
    totals = {name: Totals() for name in models}
    for skill in MAKERS:
        for item in held_out(skill, count, seed):
            numbers, weights = encoder.conversation(item)
            ids, written = torch.tensor(numbers), torch.tensor(weights[1:]) == 1.0
            expected = logits_of(models["None"], ids)
            for name, model in models.items():
                totals[name].add(expected, logits_of(model, ids), ids, written.float())
    return totals


def success(form: Any, count: int, seed: int, model: str = "demo") -> dict[str, float]:
    """Share of right answers by skill."""
    with Engine.from_pretrained(
        model, dtype="bfloat16", quantization=form, kv_cache_memory="128MiB", show_progress=False
    ) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=200)
        tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_PATH)

        def answer(items: list[Conversation]) -> list[str]:
            prompts = [
                tokenizer.encode(
                    tokenizer.apply_chat_template(
                        item.prompt, tools=item.tools, tokenize=False, add_generation_prompt=True
                    ),
                    add_special_tokens=False,
                )
                for item in items
            ]
            return [completion.text for completion in engine.generate_many(prompts, params)]

        scores, _ = evaluate(answer, MAKERS, count, seed)
    return {skill: scores[skill].rate for skill in MAKERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=25, help="conversations of each skill, for logits")
    parser.add_argument("--answers", type=int, default=100, help="conversations of each skill, for answers")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--gguf", nargs="*", default=[], help="files: their answers beside bfloat16's")
    options = parser.parse_args()
    if options.count:
        print_errors(options.count, options.seed)
    if options.answers:
        forms = (None,) if options.gguf else FORMS
        rates = {str(form): success(form, options.answers, options.seed) for form in forms}
        rates |= {Path(file).stem: success(None, options.answers, options.seed, file) for file in options.gguf}
        print("skill | " + " | ".join(rates))
        for skill in MAKERS:
            print(f"{skill} | " + " | ".join(f"{rate[skill]:.1%}" for rate in rates.values()))
        print("all | " + " | ".join(f"{sum(rate.values()) / len(rate):.2%}" for rate in rates.values()))


def print_errors(count: int, seed: int) -> None:
    print("weights | logit error, relative | divergence, nats per token | same first choice | perplexity")
    for name, total in compare_logits(count, seed).items():
        error = math.sqrt(total.squared_error / total.squares)
        print(
            f"{name} | {error:.4f} | {total.divergence / total.tokens:.5f} | {total.same_first / total.tokens:.2%} | "
            f"{math.exp(total.loss / total.written):.4f}"
        )


if __name__ == "__main__":
    main()

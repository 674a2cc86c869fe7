"""Divergence of a GGUF file's model from the file's own numbers in float32: python -m benchmarks.divergence FILE.gguf

The reference is transformers in float32, on the weights that it makes of the file. For every position of a few short
texts: the KL divergence of the next token's distribution from the reference, and the difference of the log-probability
of the token that follows. `--llama-cpp` measures llama.cpp beside it, as the package `xllamacpp` brings it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncengine import EngineConfig
from asyncengine.models.loading import load_model
from benchmarks.quantization_quality import logits_of

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n{}<|im_end|>\n"
)
TEXTS = (
    CHAT.format("What is the capital of France?", "The capital of France is Paris."),
    CHAT.format(
        "Why is the sky blue? Answer a child in two sentences.",
        "Sunlight is made of many colors, and the air scatters blue light more than red light. That is why you see "
        "blue wherever you look up on a clear day.",
    ),
    "The last ferry of the season left the harbor at four in the afternoon. On deck stood a teacher with two "
    "suitcases, a farmer who had sold his horses, and a boy who counted gulls until the shore was out of sight. "
    "Nobody spoke, for the wind was strong, and each of them was thinking of the winter.",
    "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n"
    '    if not numbers:\n        raise ValueError("the mean of no numbers")\n    return total / len(numbers)\n',
)
"""Texts in which every position is scored: chats, prose and code, written for this."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means and extremes over the positions of all texts."""

    divergence: float
    """Mean KL divergence from the reference, in nats."""
    difference: float
    """Mean absolute difference of the following token's log-probability."""
    largest: float
    """Largest such difference."""
    same_first: float
    """Share of positions where both find the same token the likeliest."""
    positions: int

    def __str__(self) -> str:
        return (
            f"KL {self.divergence:.5f}, log-probability off by {self.difference:.4f} (at most {self.largest:.2f}), "
            f"same first choice {self.same_first:.1%}, {self.positions} positions"
        )


def write_float32(file: Path, folder: Path) -> None:
    """Write a folder in Hugging Face's format with the file's model, its weights in float32 as transformers reads
    them."""
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.config.__dict__.pop("quantization_config", None)  # transformers refuses to save with it
    model.config.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), {"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def reference(folder: Path) -> tuple[list[list[int]], list[torch.Tensor]]:
    """(token ids, float32 logits [tokens, vocabulary] by transformers) of each text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    with torch.inference_mode():
        return ids, [model(torch.tensor([each])).logits[0] for each in ids]


def compare(ids: Sequence[Sequence[int]], right: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Divergence:
    """Compare `found`, logits of each text like those of `reference`, with `right`. A text's last position counts, too,
    but for the token that follows."""
    divergences, differences, same = [], [], []
    for tokens, one, other in zip(ids, right, found, strict=True):
        left, own = one.double().log_softmax(-1), other.double().log_softmax(-1)
        divergences.append((left.exp() * (left - own)).sum(-1))
        following = torch.tensor(tokens[1:])[:, None]
        differences.append((left[:-1].gather(1, following) - own[:-1].gather(1, following)).abs()[:, 0])
        same.append((left.argmax(-1) == own.argmax(-1)).double())
    all_differences = torch.cat(differences)
    return Divergence(
        float(torch.cat(divergences).mean()), float(all_differences.mean()), float(all_differences.max()),
        float(torch.cat(same).mean()), len(torch.cat(same)),
    )  # fmt: skip


def here(model: str, ids: Sequence[Sequence[int]], **settings: Any) -> list[torch.Tensor]:
    """This engine's logits of each text."""
    loaded = load_model(model, EngineConfig(show_progress=False, **settings))
    return [logits_of(loaded, torch.tensor(each)) for each in ids]


def llama_cpp(file: Path, ids: Sequence[Sequence[int]], threads: int = 1) -> list[torch.Tensor]:
    """llama.cpp's log-probabilities of each text: one request for each position, none of which comes from a cache."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 2048, 1
    params.cpuparams.n_threads, params.warmup, params.verbosity = threads, False, 1
    server = xllamacpp.Server(params)
    request = {"n_predict": 1, "n_probs": 1_000_000, "logprobs": 1_000_000, "temperature": 0, "cache_prompt": False}
    found = []
    for each in ids:
        rows = []
        for count in range(1, len(each) + 1):
            answer = server.handle_completions({**request, "prompt": list(each[:count])})
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            row = torch.full((len(entries),), -1e9)
            row[[entry["id"] for entry in entries]] = torch.tensor([entry["logprob"] for entry in entries])
            rows.append(row)
        found.append(torch.stack(rows))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", action="store_true", help="needs the package xllamacpp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_float32(options.file, Path(folder))
        ids, right = reference(Path(folder))
        for dtype in ("float32", "bfloat16"):
            print(f"the file, {dtype}: {compare(ids, right, here(str(options.file), ids, dtype=dtype))}")
        for quantization in ("int8", "int4"):
            print(f"{quantization}: {compare(ids, right, here(folder, ids, quantization=quantization))}")
    if options.llama_cpp:
        print(f"llama.cpp: {compare(ids, right, llama_cpp(options.file, ids))}")


if __name__ == "__main__":
    main()

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

import numpy as np
import torch

from asyncengine import EngineConfig
from asyncengine.execution.attention.base import StepView
from asyncengine.execution.attention.factory import make_backend
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.models.loading import LoadedModel, load_model
from benchmarks.peers.shapes import read_expanded

PAGE = 16
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
)
TEXTS = (
    CHAT.format("What is the capital of France?", "The capital of France is Paris."),
    CHAT.format(
        "Write a haiku about the sea.",
        "Waves kiss the still shore,\nSalt wind carries songs of old,\nBlue dreams without end.",
    ),
    CHAT.format(
        "Explain photosynthesis to a child in two sentences.",
        "Plants use sunlight, water and air to make their own food. While doing so they give us the oxygen that we "
        "breathe.",
    ),
    "The lighthouse stood at the edge of the cliff, where the wind had bent every tree into the same tired bow. Every "
    "evening, just before the sun went down, the old keeper climbed the hundred and twelve steps to the lamp room, "
    "wiped the salt from the glass, and lit the flame. He had done this for thirty-one years, and in all that time "
    "he had missed only two nights: once when his daughter was born, and once when the sea itself came up the stairs.",
)
"""Texts in which every position with a following token is scored: chats and prose, written for this."""


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
    from transformers import AutoTokenizer

    read_expanded(file, torch.float32).save_pretrained(folder)
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
    """Compare `found`, logits of each text like those of `reference`, with `right`, at each position that a token
    follows."""
    divergences, differences, same = [], [], []
    for tokens, one, other in zip(ids, right, found, strict=True):
        left, own = one[:-1].double().log_softmax(-1), other[:-1].double().log_softmax(-1)
        divergences.append((left.exp() * (left - own)).sum(-1))
        following = torch.tensor(tokens[1:])[:, None]
        differences.append((left.gather(1, following) - own.gather(1, following)).abs()[:, 0])
        same.append((left.argmax(-1) == own.argmax(-1)).double())
    all_differences = torch.cat(differences)
    return Divergence(
        float(torch.cat(divergences).mean()), float(all_differences.mean()), float(all_differences.max()),
        float(torch.cat(same).mean()), len(torch.cat(same)),
    )  # fmt: skip


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


def here(model: str, ids: Sequence[Sequence[int]], **settings: Any) -> list[torch.Tensor]:
    """This engine's logits of each text."""
    loaded = load_model(model, EngineConfig(show_progress=False, **settings))
    return [logits_of(loaded, torch.tensor(each)) for each in ids]


def llama_cpp(
    file: Path, ids: Sequence[Sequence[int]], right: Sequence[torch.Tensor], threads: int = 1
) -> list[torch.Tensor]:
    """llama.cpp's log-probabilities of each text: one request for each position, none of which comes from a cache. Of
    unlikely tokens it says nothing: what is left for them is divided as `right` has it, in llama.cpp's favor."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 2048, 1
    params.cpuparams.n_threads, params.warmup, params.verbosity = threads, False, 1
    server = xllamacpp.Server(params)
    request = {"n_predict": 1, "n_probs": 1_000_000, "logprobs": 1_000_000, "temperature": 0, "cache_prompt": False}
    found = []
    for each, logits in zip(ids, right, strict=True):
        rows = []
        for count in range(1, len(each) + 1):
            answer = server.handle_completions({**request, "prompt": list(each[:count])})
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            listed = {entry["id"]: entry["logprob"] for entry in entries if entry["logprob"] > -98}
            row = logits[count - 1].double().log_softmax(-1)
            at = torch.tensor(list(listed))
            own = torch.tensor(list(listed.values()), dtype=torch.float64)
            rest = (1 - own.exp().sum()).clamp(min=1e-12) / (1 - row[at].exp().sum()).clamp(min=1e-12)
            row += rest.log()
            row[at] = own
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
        print(f"llama.cpp: {compare(ids, right, llama_cpp(options.file, ids, right))}")


if __name__ == "__main__":
    main()

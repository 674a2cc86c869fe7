"""Parts of one step's time: matrix products, the output layer, attention, norms, activations, and the rest.

    python -m benchmarks.decode_step [--shape qwen3-0.6b --dtype bfloat16 --batch 1 16 --input 64 --prompt 512 --json]

Random weights (`load_format="dummy"`), a model runner driven by hand: decode steps of each batch size, then steps of
one prompt. Each part is timed on its own by wrapping what computes it; a part's time is without that of the parts it
calls, so that they add up to the whole. "all layers" are all layers in one call, their attention included, as short
steps of common models run; with --layers every layer's kernels are called one by one instead. "model's Python" is what
remains of the forward; "preparing" is flattening the batch and planning attention; "step" is what remains of the step:
the batch, sampling, the way back.
Medians over steps, in milliseconds, of a whole step and of each part; "untimed" is the step without any wrapper.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.cpu import CompiledBackend
from asyncengine.execution.layers.basic import Embedding, LMHead, Norm
from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.execution.layers.mamba2 import Mamba2
from asyncengine.execution.layers.mlp import MLP
from asyncengine.execution.layers.recorded import RecordedLayers
from asyncengine.execution.layers.rotary import Rotary
from asyncengine.execution.layers.short_conv import ShortConv
from asyncengine.execution.layers.weight_forms import DenseWeight, PackedWeight, QuantizedWeight
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.fallback.probing import LayerAttention
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.runner.step_buffers import StepBuffers
from asyncengine.kernels.cpu.mamba2 import Mamba2Kernel
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row, StateUse
from benchmarks.random_model import GREEDY, SHAPES

HYBRIDS: dict[str, dict[str, Any]] = {
    "granite-4-h-1b": {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "num_hidden_layers": 40,
        "num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 4096, "num_local_experts": 0,
        "intermediate_size": 4096, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "layer_types": ["full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)],
        "tie_word_embeddings": True, "max_position_embeddings": 131072, "embedding_multiplier": 12.0,
        "logits_scaling": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288, "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000,
    },
}  # fmt: skip
"""Models with recurrent layers, by the sizes of published ones."""


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    parts = Parts()
    with parts.wrapped():
        runner, fused = make_runner(options)
        report: dict[str, Any] = {"options": vars(options), "fused": fused, "milliseconds": {}}
        for name, make in cases(runner, options):
            report["milliseconds"][name] = measure(make, parts, options.steps)
    runner.close()
    print(json.dumps(report) if options.json else table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *HYBRIDS], default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="rows of the decode steps")
    parser.add_argument("--input", type=int, default=64, help="tokens before the first decode step")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt step")
    parser.add_argument("--steps", type=int, default=15, help="steps of each kind, timed and untimed each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="auto", help="attention_backend")
    parser.add_argument("--layers", action="store_true", help="kernels are called one by one")
    parser.add_argument("--plain", action="store_true", help="transformers' own layers (fuse=False)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


class Parts:
    """Exclusive seconds by part: time in a part's call, less that of the parts called from there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.on = False
        self._inner = [0.0]
        """Seconds of the calls inside, for each call that has begun."""

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
                self._inner[-1] += spent

        return call

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Everything that is built within is timed while `on` is true."""
        places: list[tuple[str, Any, str]] = [
            ("products", torch.nn.Linear, "forward"),
            *(("products", form, "multiply") for form in (DenseWeight, PackedWeight, QuantizedWeight)),
            ("output layer", LMHead, "__call__"),
            ("embedding", Embedding, "__call__"),
            ("rotary", Rotary, "__call__"),
            ("preparing", StepBuffers, "build"),
            ("preparing", CompiledBackend, "plan"),
            ("all layers", RecordedLayers, "__call__"),
            ("attention", CompiledBackend, "attend_merged"),
            ("attention", CompiledBackend, "write"),
            ("attention", CompiledBackend, "attend"),
            ("attention", LayerAttention, "__call__"),
            ("norms", Norm, "__call__"),
            ("norms", Norm, "add"),
            ("activation", MLP, "__call__"),
            ("convolution", CausalConv, "__call__"),
            ("recurrent layer", Mamba2, "__call__"),
            ("recurrent layer", ShortConv, "__call__"),
            ("state and gate", Mamba2Kernel, "__call__"),
            ("model's Python", ModelRunner, "_compute"),
        ]
        before = [(owner, method, getattr(owner, method)) for _, owner, method in places]
        for name, owner, method in places:
            setattr(owner, method, self.timed(name, getattr(owner, method)))
        try:
            yield
        finally:
            for owner, method, own in before:
                setattr(owner, method, own)


def make_runner(options: argparse.Namespace) -> tuple[ModelRunner, list[str]]:
    from transformers import AutoConfig

    length = max(options.input + 2 * options.steps + 8, options.prompt + 1)
    config = EngineConfig(
        dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=max(options.batch),
        page_size=16, max_model_len=length, load_format="dummy", show_progress=False, fuse=not options.plain,
        attention_backend=options.attention,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        shape = {"model_type": "qwen3", **{**SHAPES, **HYBRIDS}[options.shape]}
        AutoConfig.for_model(**shape).save_pretrained(folder)
        model = load_model(folder, config)
    if options.layers and isinstance(model.model, Decoder):
        model.model.recorded = None
    return build_runner(model, config).runner, model.fused


class Requests:
    """A batch driven step by step: the prompts in the first, then one token of each."""

    def __init__(self, runner: ModelRunner, batch: int, length: int) -> None:
        self._runner = runner
        self._spec = RequestSpec(1, (0,) * length, GREEDY, length + 1)
        self._tokens = [[(7 * place + 13 * index) % 1000 for index in range(length)] for place in range(batch)]
        pages = (runner.num_pages - 1) // batch
        self._pages = [list(range(1 + place * pages, 1 + (place + 1) * pages)) for place in range(batch)]
        self._computed = 0
        self._steps = 0

    def step(self) -> None:
        """Raises `RuntimeError` if a row fails."""
        self._steps += 1
        length = len(self._tokens[0])
        states: list[StateUse | None] = [None] * len(self._tokens)
        if self._runner.num_states:
            states = [StateUse(1 + place, 1 + place if self._computed else 0) for place in range(len(self._tokens))]
        rows = tuple(
            Row(
                self._spec,
                place,
                self._computed,
                length - self._computed,
                tokens,
                False,
                pages,
                True,
                0,
                state=states[place],
            )
            for place, (tokens, pages) in enumerate(zip(self._tokens, self._pages, strict=True))
        )
        result = self._runner.launch(Batch(self._steps, rows)).wait()
        if result.errors:
            raise RuntimeError(str(result.errors))
        self._computed = length
        for tokens, token in zip(self._tokens, result.tokens, strict=True):
            tokens.append(token)


def cases(runner: ModelRunner, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """(name, what makes the next step)."""
    for batch in options.batch:
        requests = Requests(runner, batch, options.input)
        requests.step()
        yield f"decode {batch}", lambda requests=requests: requests.step  # type: ignore[misc]
    yield f"prompt {options.prompt}", lambda: Requests(runner, 1, options.prompt).step


def measure(make: Callable[[], Callable[[], None]], parts: Parts, steps: int) -> dict[str, float]:
    """Timed and untimed steps in turn."""
    make()()
    found: list[dict[str, float]] = []
    untimed: list[float] = []
    for _ in range(steps):
        for parts.on in (False, True):
            step = parts.timed("step", make())
            parts.seconds.clear()
            began = time.perf_counter()
            step()
            spent = time.perf_counter() - began
            if parts.on:
                found.append({**parts.seconds, "whole": spent})
            else:
                untimed.append(spent)
    parts.on = False
    report = {name: 1e3 * statistics.median(each.get(name, 0.0) for each in found) for name in found[0]}
    return {**report, "untimed": 1e3 * statistics.median(untimed), "least": 1e3 * min(untimed)}


def table(report: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for column in report["milliseconds"].values() for name in column))
    lines = [", ".join(report["fused"]) or "nothing fused", f"{'ms':<16}"]
    lines[1] += " ".join(f"{case:>12}" for case in report["milliseconds"])
    for name in names:
        lines.append(
            f"{name:<16}" + " ".join(f"{case.get(name, 0.0):>12.2f}" for case in report["milliseconds"].values())
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

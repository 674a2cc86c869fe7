"""Matrix products with weights in 16, 8 and 4 bits, alone: python benchmarks/quantized_products.py

"packed" is oneDNN's form. The shapes of one layer and of the output layer of Qwen3-0.6B. As many copies of a weight as
exceed the caches take turns, as the layers of a model do; the forms take turns as well. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from asyncengine.models.linears import FastLinear, PanelLinear
from asyncengine.models.output_layer import OutputLayer
from asyncengine.models.quantized import QuantizedLinear

from asyncengine.device.output_buffers import OutputBufferPool

SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
HEAD = (151936, 1024)
BEYOND_CACHES = 200_000_000
"""Weights of all copies of a shape."""
BYTES = {"bf16 packed": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.53125}
Form = Callable[[torch.Tensor], torch.Tensor]


def make_layer(outputs: int, inputs: int) -> dict[str, Form]:
    weight = (torch.randn(outputs, inputs) * 0.02).bfloat16()
    return {
        "bf16 packed": FastLinear(weight, None, pack=True),
        "bf16 panels": PanelLinear(weight, None),
        "int8": QuantizedLinear(weight, None, 8),
        "int4": QuantizedLinear(weight, None, 4),
    }


def make_head() -> dict[str, Form]:
    """Packing would make a second copy of an embedding that is the output layer as well."""
    weight = torch.nn.Parameter((torch.randn(HEAD) * 0.02).bfloat16(), requires_grad=False)
    return {
        "bf16 F.linear": lambda x: torch.nn.functional.linear(x, weight),
        "bf16 packed": FastLinear(weight, None, pack=True),
        "bf16": OutputLayer(weight, None),
        "bf16 panels": PanelLinear(weight, None, OutputBufferPool()),
        "int8": QuantizedLinear(weight, None, 8, logits=True),
        "int4": QuantizedLinear(weight, None, 4, logits=True),
    }


def measure(copies: list[dict[str, Form]], rows: int, inputs: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one product by form."""
    x = torch.randn(1, rows, inputs).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in copies[0]}
    for turn in range(rounds + 1):
        for name, measured in times.items():
            for copy in copies:
                began = time.perf_counter()
                copy[name](x)
                if turn:
                    measured.append(time.perf_counter() - began)
    return {name: statistics.median(measured) * 1e3 for name, measured in times.items()}


def report(name: str, rows: int, shape: tuple[int, int], found: dict[str, float]) -> None:
    weights = shape[0] * shape[1]
    cells: list[Any] = [name, rows]
    for form, milliseconds in found.items():
        rate = weights * BYTES.get(form, 2.0) / milliseconds / 1e6
        cells.append(f"{form} {milliseconds:.3f} ms ({rate:.0f} GB/s, {found['bf16 packed'] / milliseconds:.2f})")
    print(" | ".join(map(str, cells)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64, 256])
    parser.add_argument("--only", choices=[*SHAPES, "head"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("milliseconds (bytes of weights over time, speed relative to packed bfloat16)")
    with torch.inference_mode():
        layer: dict[int, Counter[str]] = {rows: Counter() for rows in options.rows}
        for name, shape in {**SHAPES, "head": HEAD}.items():
            if options.only not in (None, name):
                continue
            count = max(BEYOND_CACHES // (shape[0] * shape[1]), 1)
            copies = [make_head()] if name == "head" else [make_layer(*shape) for _ in range(count)]
            for rows in options.rows:
                found = measure(copies, rows, shape[1], options.rounds)
                report(name, rows, shape, found)
                if name != "head":
                    layer[rows].update(found)
        for rows, total in layer.items() if options.only is None else ():
            compared = ", ".join(f"{form} {total['bf16 packed'] / time:.2f}" for form, time in total.items())
            print(f"all of a layer, {rows} rows, relative to packed bfloat16: {compared}")


if __name__ == "__main__":
    main()

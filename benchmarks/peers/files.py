"""GGUF files beside a checkpoint: written from the same numbers, quantized by llama.cpp's own tool or by `gguf`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.pool import ROOT
from benchmarks.peers.shapes import Shape
from benchmarks.peers.systems import LLAMA_TYPES, Places, packages


def make_ggufs(
    checkpoint: Path, forms: Iterable[str], places: Places, quantize: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Path by form ("none", "int8", "int4"), and for a form that cannot be made the reason."""
    found: dict[str, str] = {}
    reasons: dict[str, str] = {}
    wanted = sorted(forms)
    if not wanted:
        return found, reasons
    python = places.python("llama")
    version, missing = packages(python, ("gguf", "numpy"))
    plain = checkpoint / "model.gguf"
    if version is None and not plain.exists():
        return found, dict.fromkeys(wanted, f"to write GGUF files, {missing}")
    if not plain.exists():
        _write(python, checkpoint, plain)
    for form in wanted:
        if form == "none":
            found[form] = str(plain.resolve())
            continue
        target = checkpoint / f"model-{LLAMA_TYPES[form]}.gguf"
        tool = _tool(places, quantize)
        if not target.exists() and tool is None:
            reasons[form] = "to quantize GGUF files, no llama-quantize: give --llama-quantize"
            continue
        if not target.exists():
            part = target.with_suffix(".part")
            subprocess.run([str(tool), str(plain), str(part), LLAMA_TYPES[form]], check=True, capture_output=True)
            part.replace(target)
        found[form] = str(target.resolve())
    return found, reasons


def read_shape(file: Path) -> Shape:
    """The shape of the model in a GGUF file, by its header."""
    from gguf import GGUFReader

    header = GGUFReader(file)

    def said(name: str, default: int = 0) -> int:
        field = header.get_field(f"{family}.{name}")
        return default if field is None else int(field.contents())

    family = str(header.fields["general.architecture"].contents())
    hidden, heads = said("embedding_length"), said("attention.head_count")
    vocab = next(int(tensor.shape[1]) for tensor in header.tensors if tensor.name == "token_embd.weight")
    return Shape(
        file.stem, family, vocab, hidden, said("feed_forward_length"), said("block_count"), heads,
        said("attention.head_count_kv", heads), said("attention.key_length", hidden // heads), said("context_length"),
        3.0,
    )  # fmt: skip


def _write(python: str, checkpoint: Path, target: Path) -> None:
    part = target.with_suffix(".part")
    subprocess.run(
        [python, "-m", "benchmarks.peers.gguf_file", str(checkpoint.resolve()), str(part.resolve())],
        check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    part.replace(target)


def _tool(places: Places, given: str | None) -> str | None:
    if given:
        return shutil.which(given)
    return shutil.which("llama-quantize", path=str(Path(places.server).parent)) if places.server else None

"""Every quantized type of GGUF against the public package's dequantizer, to the bit, and permuted."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import QUANTIZED, dequantized, finish, random_blocks

from asyncengine.execution.layers.stored import dense
from asyncengine.execution.models.formats.gguf.container import BLOCK_TYPES, GgufFile
from asyncengine.execution.models.formats.gguf.tensors import BlockMatrix

ROWS, COLUMNS = 6, 768


def matrix_of(folder: Path, kind: str, blocks: np.ndarray, number: int | None = None) -> BlockMatrix:
    """A matrix out of a file of its own, which may give its type by another number."""
    path = folder / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", np.arange(5, dtype=np.float32))
    writer.add_tensor("m", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    if number is not None:
        writer.tensors[-1]["m"].dtype = number  # type: ignore[assignment]
    finish(writer)
    file = GgufFile(path)
    return BlockMatrix([(file, file.tensors["m"])])


def test_the_table_is_ggmls() -> None:
    """The table has number, name, numbers and bytes of all blocks of the public package, and of one of Ollama's."""
    known = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    known[4] = ("MXFP4_PAIRS", *gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.MXFP4])
    assert known == {number: (kind.name, kind.numbers, kind.nbytes) for number, kind in BLOCK_TYPES.items()}
    assert {*QUANTIZED, "MXFP4_PAIRS"} == {kind.name for kind in BLOCK_TYPES.values() if kind.form is not None}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no /proc")
def test_pages_are_given_back(tmp_path: Path) -> None:
    """Panel by panel, so that a file is never resident as a whole."""

    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssFile:")[2].split()[0]) * 1024

    matrix = matrix_of(tmp_path, "Q8_0", np.zeros((4096, 34 * 128), dtype=np.uint8))
    matrix.rows(0, 1)  # kernels and libraries are there
    matrix.release(0, 1)
    before, most = resident(), 0
    for first in range(0, 4096, 256):
        matrix.rows(first, first + 256)
        most = max(most, resident())
        matrix.release(first, first + 256)
    assert most - before < matrix.segments[0][1].nbytes // 2
    assert resident() - before < matrix.segments[0][1].nbytes // 4


def test_every_byte_of_a_block(tmp_path: Path) -> None:
    """Extreme bytes: signs, the largest steps, exponents that give no normal number."""
    for kind in QUANTIZED:
        for fill in (0, 255, 128):
            blocks = random_blocks(kind, 2, 256)
            scales = blocks.reshape(2, -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
            kept = scales.copy()
            scales[:] = fill if kind != "MXFP4" else min(fill, 200)
            for first in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(kind, (0, 2)):
                scales[:, :, first : first + 2] = kept[:, :, first : first + 2]
            found = dense(matrix_of(tmp_path, kind, blocks))
            expected = dequantized(blocks, kind)
            assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected)), kind

"""Files that other libraries write are read as they read them back, to the bit where nothing is rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.data import cases_of
from support.forwards import relative_error
from support.quantized_checkpoints import mxfp4

from asyncengine.execution.layers.stored import dense

from .one_matrix import matrix_of, random_weight

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = cases_of(__file__)


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    """The package of that format writes them, and reads them back."""
    compressed = pytest.importorskip("compressed_tensors")
    form, weights = SCHEMES[name]
    scheme = compressed.quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = compressed.compressors.BaseCompressor.get_value_from_registry(form)
    weight = random_weight()
    stored = compressor.compress({"weight": weight, **scales_of(weight, weights, compressed)}, scheme)
    matrix = matrix_of(
        stored,
        {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
        tmp_path,
    )
    expected = compressor.decompress(stored, scheme)["weight"].float()
    bound = 5e-3 if weights.get("type") == "float" and weights["num_bits"] == 8 else 1e-6
    if form == "nvfp4-pack-quantized":
        bound = 3e-3  # it reads back in bfloat16
    assert relative_error(expected, dense(matrix)) < bound
    assert relative_error(weight, dense(matrix)) < 0.2


def scales_of(weight: torch.Tensor, weights: dict[str, Any], compressed: Any) -> dict[str, torch.Tensor]:
    """Scales that an observer would find: `weight_scale`, and `weight_zero_point` or `weight_global_scale`."""
    args = compressed.quantization.QuantizationArgs(**weights)
    rows, inputs = weight.shape
    if args.strategy == "block":
        high, wide = args.block_structure
        tiles = weight.view(rows // high, high, inputs // wide, wide)
        low, top = tiles.amin((1, 3)), tiles.amax((1, 3))
    elif args.strategy == "tensor":
        low, top = weight.min().reshape(1), weight.max().reshape(1)
    else:
        tiles = weight.unflatten(-1, (-1, inputs if args.strategy == "channel" else args.group_size))
        low, top = tiles.amin(-1), tiles.amax(-1)
    whole = None
    if args.strategy == "tensor_group":
        whole = compressed.quantization.utils.generate_gparam(low.min(), top.max())
    scale, zero = compressed.quantization.utils.calculate_qparams(low, top, args, global_scale=whole)
    found = {"weight_scale": scale}
    if not args.symmetric:
        found["weight_zero_point"] = zero
    if whole is not None:
        found["weight_global_scale"] = whole.reshape(1)
    return found


def test_gpt_oss(tmp_path: Path) -> None:
    """Experts in MXFP4 are to the bit what transformers makes of them, which has them [experts, inputs, outputs]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    written = mxfp4(torch.stack([random_weight(96, 64), random_weight(95, 64).repeat(2, 1)[:96]]))
    tensors = {f"gate_up_proj_{name}": tensor for name, tensor in written.tensors.items()}
    matrix = matrix_of(tensors, {"quant_method": "mxfp4"}, tmp_path, "model.layers.0.mlp.experts.")
    expected = convert_moe_packed_tensors(written.tensors["blocks"], written.tensors["scales"], dtype=torch.float32)
    assert matrix.shape == (192, 64)
    found = dense(matrix).view(2, 96, 64)
    assert torch.equal(found.transpose(1, 2), expected)
    assert torch.equal(found, written.dense)


def test_fine_grained_fp8(tmp_path: Path) -> None:
    """transformers' own dequantization of blocks."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scales = random_weight(256, 384).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.1
    expected = finegrained.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    matrix = matrix_of({"weight": weight, "weight_scale_inv": scales}, config, tmp_path)
    assert relative_error(expected, dense(matrix)) < 5e-3

"""Products of matrices as they are stored, on a real GPU: every kernel against torch in float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from gpu.engines import captured, runner_of
from support.drive import Driver, prompts
from support.forwards import relative_error
from support.quantized_checkpoints import quantized
from support.stored_matrices import FORMS, FloatMatrix, RandomMatrix
from support.tiny_models import FAMILIES, VOCAB

from asyncengine.execution.layers.stored import StoredForm
from asyncengine.execution.layers.stored_weight import ChunkedWeight
from asyncengine.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs an NVIDIA GPU and Triton"
)

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("awq", torch.float16), ("awq", torch.bfloat16), ("Q4_K", torch.float16), ("Q6_K", torch.bfloat16),
        ("w8a8", torch.bfloat16), ("w8a8", torch.float16), ("mxfp4", torch.bfloat16), ("mxfp4", torch.float16),
        ("e4m3", torch.bfloat16), ("w4a16", torch.bfloat16),
        ("gptq8", torch.bfloat16), ("gptq8", torch.float16), ("IQ4_XS", torch.bfloat16),
    ],
)  # fmt: skip
def test_products_on_the_device(name: str, dtype: torch.dtype) -> None:
    """Rows that take each of the kernels, in a graph too; rows that are looked up."""
    device = torch.device("cuda", torch.cuda.current_device())
    matrix: RandomMatrix = FloatMatrix(1040, 1024, 128)
    if name != "e4m3":
        matrix = RandomMatrix(name, 1040, 1024, ordered=name == "awq")
    weight = ChunkedWeight(1040, 1024, StoredForm(name, matrix.form, name == "awq"), device)
    weight.load(0, matrix)
    dense = matrix.dense().to(device)
    ids = torch.tensor([3, 1039, 3, 0], device=device)
    found = torch.empty((4, 1024), dtype=dtype, device=device)
    weight.read_rows(ids, found)
    assert relative_error(dense[ids], found.float()) < LIMITS[dtype]
    for rows in (1, 3, 8, 16, 40, 200):
        x, bias = torch.randn(rows, 1024, device=device, dtype=dtype), torch.randn(1040, device=device)
        expected = torch.nn.functional.linear(x.float(), dense, bias)
        assert relative_error(expected, weight.multiply(x, bias).float()) < LIMITS[dtype], rows
        if (found := weight.multiply_gated(x)) is not None:
            gate, up = (x.float() @ dense.T).chunk(2, dim=1)
            assert relative_error(torch.nn.functional.silu(gate) * up, found.float()) < LIMITS[dtype], rows
    x = torch.zeros(13, 1024, device=device, dtype=dtype)
    graph, out = captured(lambda: weight.multiply(x, None))
    x.normal_()
    graph.replay()
    assert relative_error(x.float() @ dense.T, out.float()) < LIMITS[dtype]


def scored(folder: Path, **fields: Any) -> tuple[torch.Tensor, int]:
    """Scores of prompts, with answers behind them, and bytes of the weights."""
    runner = runner_of(folder, kv_cache_memory="256MiB", **fields)
    driver = Driver(runner)
    params = SamplingParams(temperature=0.0, prompt_logprobs=True, ignore_eos=True)
    jobs = [driver.job(prompt, 8, params) for prompt in prompts([90, 33, 5], VOCAB)]
    driver.run(jobs, chunk=80)
    return torch.tensor([entry.logprob for job in jobs for entry in job.prompt_logprobs]), runner.weights_bytes


@pytest.mark.parametrize(
    ("tested", "hidden", "bound", "smaller"),
    [("awq", 128, 0.1, 1.0), ("int8", 256, 0.15, 0.6), ("int4", 256, 1.5, 0.4)],
)
def test_a_quantized_model_on_the_device(
    tested: Any, hidden: int, bound: float, smaller: float, tmp_path: Path
) -> None:
    """Scores of prompts and of answers that follow are near those of the dequantized model, or of one that is rounded
    as it is loaded; its weights are smaller."""
    config = FAMILIES["llama"]()
    config.update({"hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": 64})
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    if tested == "awq":
        quantized(tmp_path / "plain", tmp_path / "awq", "awq", tmp_path / "dense")
        found, plain = scored(tmp_path / "awq"), scored(tmp_path / "dense")
    else:
        found, plain = scored(tmp_path / "plain", quantization=tested), scored(tmp_path / "plain")
    assert found[1] < smaller * plain[1]
    assert float((found[0] - plain[0]).abs().max()) < bound


@pytest.mark.parametrize("name", ["mxfp4", "awq", "w8a8", "Q4_K"])
def test_experts_as_they_are_stored_on_the_device(name: str) -> None:
    """Blocks of 8, 16 and more rows, and in a graph that any choice replays."""
    from asyncengine.kernels.cuda.grouped_experts import ExpertWeights, mix

    device, count, width, inner = torch.device("cuda", torch.cuda.current_device()), 6, 512, 256
    up, down = RandomMatrix(name, count * 2 * inner, width), RandomMatrix(name, count * width, inner)
    stored, dense = [], []
    for matrix in (up, down):
        weight = ChunkedWeight(*matrix.shape, StoredForm(name, FORMS[name]), device)
        weight.load(0, matrix)
        stored.append(ExpertWeights(weight.matrix, None))
        dense.append(ExpertWeights(matrix.dense().to(device), None))
    for rows in (1, 3, 20, 300):
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        weights = torch.rand(rows, 2, device=device)
        chosen = torch.rand(rows, count, device=device).topk(2, dim=1).indices
        expected = mix(x.float(), chosen, weights, *dense, None, count)
        assert relative_error(expected, mix(x, chosen, weights, *stored, None, count).float()) < 2e-2, rows
    x = torch.zeros(5, width, device=device, dtype=torch.bfloat16)
    weights, chosen = torch.rand(5, 2, device=device), torch.arange(2, device=device).expand(5, 2).contiguous()
    mix(x, chosen, weights, *stored, None, count)
    graph, out = captured(lambda: mix(x, chosen, weights, *stored, None, count))
    x.normal_()
    chosen.copy_(torch.rand(5, count, device=device).topk(2, dim=1).indices)
    graph.replay()
    assert relative_error(mix(x.float(), chosen, weights, *dense, None, count), out.float()) < 2e-2

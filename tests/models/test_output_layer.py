"""The compiled output layer equals the linear it replaces, and a weight it shares with the embedding exists once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from asyncengine.lora.layers.targets import find_places
from asyncengine.models.linears import PanelLinear
from asyncengine.models.output_layer import OutputLayer, SharedEmbedding, replace_output_layer
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, greedy_reference, prompts
from support.panels import use_panels
from support.tiny_models import VOCAB, make_model
from torch import nn

from asyncengine.config import EngineConfig
from asyncengine.models import output_layer
from asyncengine.models.loading import load_model

pytest.importorskip("numba")

BOTH = [torch.float32, torch.bfloat16]


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    return made.requires_grad_(False)


class Scaled(nn.Embedding):
    """As Gemma's: another module that only looks like an embedding."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


class Model(nn.Module):
    """An output layer and an embedding, the latter's weight the former's if it is of that shape."""

    def __init__(self, head: Any, table: nn.Embedding | None = None, tied: bool = True) -> None:
        super().__init__()
        self.lm_head = head
        if table is None:
            table = nn.Embedding(head.out_features, head.in_features, dtype=head.weight.dtype)
        self.table = table.requires_grad_(False)
        if tied:
            self.table.weight = head.weight
        self.dropped: list[int] = []

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def set_output_embeddings(self, head: Any) -> None:
        self.lm_head = head

    def get_input_embeddings(self) -> Any:
        return self.table

    def set_input_embeddings(self, table: Any) -> None:
        self.table = table

    def replace(self) -> bool:
        dtype = getattr(getattr(self.lm_head, "weight", None), "dtype", torch.float32)
        with torch.inference_mode():
            return replace_output_layer(self, dtype, lambda weight: self.dropped.append(weight.data_ptr()))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_linear(dtype: torch.dtype, bias: bool, tied: bool, panels: bool) -> None:
    head = linear(96, 64, dtype, bias)
    model = Model(head, tied=tied)
    assert model.replace()
    faster = model.lm_head
    assert type(faster) is (PanelLinear if panels else OutputLayer)
    assert model.dropped == ([head.weight.data_ptr()] if panels else [])
    assert type(model.table) is (SharedEmbedding if panels and tied else nn.Embedding)
    assert panels or faster.weight is head.weight
    for rows in (1, 3, 9, 33):
        x = torch.randn(1, rows, 64).to(dtype)
        found = faster(x)
        expected = nn.functional.linear(x.double(), head.weight.double(), head.bias.double() if bias else None)
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_logits_stay_while_they_are_held(panels: bool) -> None:
    model = Model(linear(96, 64))
    assert model.replace()
    x = torch.randn(1, 3, 64)
    first = model.lm_head(x)
    kept = first.clone()
    model.lm_head(-x)
    assert torch.equal(first, kept)


def test_more_rows_than_pay_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    head = linear(20, 64, torch.bfloat16)
    faster = OutputLayer(head.weight, None)
    monkeypatch.setattr(faster._products, "gemm_pays", lambda dtype, rows: False)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(faster(x), head(x).float())


def test_a_vocabulary_that_fits_no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)
    model = Model(linear(101, 64))
    assert model.replace()
    assert type(model.lm_head) is OutputLayer
    assert type(model.table) is nn.Embedding


# ---------------------------------------------------------------- left alone


@pytest.mark.parametrize(
    "head",
    [
        linear(32, 64, torch.float16),
        linear(8, 41),
        linear(3, 64),
        linear(32, 64).to("meta"),
        nn.Embedding(32, 64),
        nn.Bilinear(4, 4, 32),
    ],
)
def test_left_alone(head: Any, panels: bool) -> None:
    model = Model(head, nn.Embedding(32, 64), tied=False)
    assert not model.replace()
    assert model.lm_head is head
    assert not model.dropped


def test_a_weight_with_strides_is_left_alone(panels: bool) -> None:
    head = linear(64, 64)
    head.weight.data = head.weight.data.T
    assert not Model(head).replace()


def test_without_a_compiler(panels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "compiler_missing", lambda dtype, device: "none here")
    assert not Model(linear(32, 64)).replace()


def fail(*_: Any) -> None:
    raise RuntimeError("unknown CPU")


def test_a_compiler_that_fails_is_no_reason_to_fail(panels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncengine.kernels.cpu import gemm_rowmajor
    from asyncengine.kernels.cpu import packed as panel_kernels

    monkeypatch.setattr(gemm_rowmajor, "gemm", fail)
    monkeypatch.setattr(panel_kernels, "gemm", fail)
    model = Model(linear(32, 64))
    head, table = model.lm_head, model.table
    assert not model.replace()
    assert model.lm_head is head
    assert model.table is table


def test_panels_that_give_other_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncengine.kernels.cpu import packed as panel_kernels

    use_panels(True, monkeypatch)
    monkeypatch.setattr(panel_kernels, "gemm", lambda x, weight, out, bias: out.fill_(1.0))
    model = Model(linear(32, 64))
    assert model.replace()
    assert type(model.lm_head) is OutputLayer
    assert type(model.table) is nn.Embedding


def check_kept(model: Model) -> None:
    """The weight stays as it is, and what reads it reads the same memory."""
    table = model.table
    assert model.replace()
    assert type(model.lm_head) is OutputLayer
    assert model.table is table
    assert not model.dropped


@pytest.mark.parametrize("table", [Scaled(96, 64), nn.Embedding(96, 64, max_norm=1.0)])
def test_a_table_that_does_more_than_look_up_stays(table: nn.Embedding, monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)
    model = Model(linear(96, 64), table)
    check_kept(model)
    assert model.lm_head.weight is table.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_that_others_read_stays(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)
    model = Model(linear(96, 64), tied=tied)
    model.inner = nn.Sequential(nn.Linear(1, 1))
    model.inner[0].register_parameter("table", model.lm_head.weight)
    check_kept(model)


def test_a_scaled_table_beside_another_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is only in the way where it shares its weight."""
    use_panels(True, monkeypatch)
    table = Scaled(96, 64)
    model = Model(linear(96, 64), table, tied=False)
    assert model.replace()
    assert type(model.lm_head) is PanelLinear
    assert model.table is table


# ---------------------------------------------------------------- embeddings in the output layer


@pytest.mark.parametrize("dtype", BOTH)
def test_embeddings_are_the_very_rows_of_the_table(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)
    model = Model(linear(96, 64, dtype, bias=True))
    before, original = model.table, model.table.weight.clone()
    assert model.replace()
    after: Any = model.table
    assert type(after) is SharedEmbedding
    assert after is not before
    assert (after.num_embeddings, after.embedding_dim) == (96, 64)
    assert (after.weight.shape, after.weight.dtype) == ((96, 64), dtype)
    every = torch.arange(96)
    for ids in (every, every.flip(0).view(2, 48), every[::5], torch.tensor([[7, 7, 0, 95]]), every[:0][None]):
        for kind in (torch.int64, torch.int32):
            found = after(ids.to(kind))
            assert found.dtype == dtype
            assert torch.equal(found, original[ids])
    for wrong in (96, -1):
        with pytest.raises(IndexError, match=r"token ids must be in 0 \.\. 95"):
            after(torch.tensor([[3, wrong]]))


@pytest.mark.parametrize("tied", [False, True])
def test_the_weight_is_not_held_twice(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)
    model = Model(linear(96, 64), tied=tied)
    weight = weakref.ref(model.lm_head.weight)
    assert model.replace()
    gc.collect()
    assert weight() is None
    assert len(list(model.parameters())) == (0 if tied else 1)


# ---------------------------------------------------------------- models


def places(module: Any) -> list[Any]:
    return [(part, place.in_features, place.kind, place.head) for place in find_places(module) for part in place.parts]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_in_a_model(name: str, panels: bool, checkpoint: Checkpoint, make_runner: MakeRunner) -> None:
    """Tied or not, with a scaled table and soft-capping; adapters find both ends of the model where they were."""
    model, plain = (load_model(str(checkpoint(name)), EngineConfig(fuse=fuse)) for fuse in (True, False))
    assert "output_layer x 1" in model.fused
    head, table = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    tied = model.hf_config.tie_word_embeddings
    if panels and name != "gemma2":
        assert type(head) is PanelLinear
        assert isinstance(table, SharedEmbedding) == tied
    else:
        assert type(head) is OutputLayer
        assert (head.weight.data_ptr() == table.weight.data_ptr()) == tied
    ids = torch.arange(VOCAB)[None]
    assert torch.equal(table(ids), plain.module.get_input_embeddings()(ids))
    assert places(model.module) == places(plain.module)
    prompt = prompts([9], VOCAB)[0]
    driver = Driver(make_runner(name))
    assert driver.run([driver.job(prompt, 12)])[0] == greedy_reference(make_model(name), prompt, 12)

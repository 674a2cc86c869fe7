"""Families with recurrent layers equal transformers with every option that changes their forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.drive import Driver, greedy_reference, prompts
from support.forwards import Forwards
from support.panels import use_panels
from support.tiny_models import FAMILIES, VOCAB, WHOLE, make_model
from support.tiny_models import _common as common

from asyncengine.config import EngineConfig
from asyncengine.errors import UnsupportedModel
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.models.decoder import Decoder
from asyncengine.models.loading import load_model
from asyncengine.runner.building import build_runner
from asyncengine.step import StateUse

NATIVE = ["mamba2", "bamba", "granite4", "falcon-h1", "nemotron-h", "nemotron-3", "lfm2", "lfm2moe"]
WANT = 30


def mamba2(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": WHOLE, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}
    return hf.Mamba2Config(**{**sizes, "state_size": 32, "n_groups": 4, "pad_token_id": 0, **changes})


def falcon(**changes: Any) -> Any:
    sizes = {"hidden_size": WHOLE, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 32}
    return hf.FalconH1Config(**common(**{**sizes, **changes}))


OPTIONS: Mapping[str, Callable[[], Any]] = {
    "mamba2-bounded-steps": lambda: mamba2(time_step_limit=(0.6, 0.8), use_conv_bias=False, conv_kernel=2),
    "mamba2-tied": lambda: mamba2(tie_word_embeddings=True, head_dim=8, num_heads=16),
    "falcon-normed-after-gate": lambda: falcon(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon-gate-alone": lambda: falcon(mamba_rms_norm=False, mamba_d_ssm=None, mamba_n_heads=8, mamba_n_groups=2),
    "bamba-without-attention": lambda: hf.BambaConfig(
        **common(mamba_n_heads=8, mamba_d_state=16, mamba_conv_bias=False, attention_bias=True, mlp_bias=True)
    ),
    "granite4-dense-rotated": lambda: hf.GraniteMoeHybridConfig(
        **common(
            hidden_size=WHOLE,
            layer_types=["linear_attention", "full_attention"],
            num_hidden_layers=2,
            num_local_experts=0,
            shared_intermediate_size=64,
            mamba_n_heads=8,
            mamba_d_state=16,
            mamba_proj_bias=True,
            position_embedding_type="rope",
        )
    ),
    "nemotron-3-latent": lambda: hf.NemotronHConfig(
        **common(
            num_hidden_layers=None, hidden_size=WHOLE, layers_block_type=["linear_attention", "moe", "mlp", "moe"],
            mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, n_routed_experts=4,
            moe_latent_size=32, moe_intermediate_size=48, moe_shared_expert_intermediate_size=80, mlp_bias=True,
            norm_topk_prob=False,
        )
    ),
    "lfm2-own-width": lambda: hf.Lfm2Config(
        **common(
            hidden_size=WHOLE, layer_types=["conv", "conv", "full_attention"], block_auto_adjust_ff_dim=False,
            conv_L_cache=5, tie_word_embeddings=False,
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def options() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, config in OPTIONS.items():
            patch.setitem(FAMILIES, name, config)
        yield


def load(folder: Path, **fields: Any) -> Decoder:
    model = load_model(str(folder), EngineConfig(show_progress=False, **fields)).model
    assert isinstance(model, Decoder), "through transformers"
    return model


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' own of one request alone, [tokens, vocabulary]."""
    model.set_attn_implementation("eager")
    found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


def in_chunks(model: Decoder, tokens: list[int], chunk: int) -> torch.Tensor:
    forwards = Forwards(model, most=len(tokens))
    return torch.cat([forwards.step(tokens[at : at + chunk]) for at in range(0, len(tokens), chunk)])


@pytest.mark.parametrize("name", [*NATIVE, *OPTIONS])
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    model, (tokens,) = load(tmp_path), prompts([45], VOCAB)
    expected = logits_of(reference, tokens)
    whole = in_chunks(model, tokens, len(tokens))
    assert float((whole - expected).abs().max() / expected.abs().max()) < 1e-5
    packed = not any("oneDNN" in entry for entry in model.describe())
    for chunk in (1, 7, 16):  # what oneDNN computes is not the same to the bit for other numbers of rows
        found = in_chunks(model, tokens, chunk)
        assert torch.equal(found, whole) if packed else torch.allclose(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NATIVE)
def test_bfloat16_is_as_near_as_transformers(name: str, tmp_path: Path) -> None:
    texts, ratios = prompts([70, 60], VOCAB), []
    for seed in range(4):
        reference = make_model(name, seed, torch.bfloat16)
        reference.save_pretrained(tmp_path / str(seed))
        model = load(tmp_path / str(seed))
        assert model.dtype == torch.bfloat16
        found = torch.cat([in_chunks(model, text, len(text)) for text in texts]).float()
        rounded = torch.cat([logits_of(reference, text) for text in texts])
        exact = torch.cat([logits_of(reference.float(), text) for text in texts])
        ratios.append((found - exact).norm(dim=-1) / (rounded - exact).norm(dim=-1))
    assert 0 < torch.cat(ratios).median() <= 1.0, torch.cat(ratios).median()


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "falcon-h1"])
def test_a_snapshot_in_the_middle_of_a_chunk(name: str, tmp_path: Path) -> None:
    """A request that starts from another one's state, after 24 of its tokens, goes on like that one."""
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    fields = EngineConfig(page_size=4, kv_cache_memory="8MiB", max_num_seqs=80, show_progress=False)
    runner = build_runner(load_model(str(tmp_path), fields), fields)
    (tokens,) = prompts([45], VOCAB)
    answer = greedy_reference(reference, tokens, WANT)
    driver, snapshot = Driver(runner), 70
    first, second = (driver.job(tokens, WANT) for _ in range(2))
    driver.admit(first)
    driver.execute([driver.row(first)._replace(state=StateUse(first.slot + 1, 0, ((24, snapshot),)))])
    driver.admit(second)
    second.pages, second.computed = first.pages[:6], 24
    row = driver.row(second)._replace(state=StateUse(second.slot + 1, snapshot))
    second.tokens.append(driver.execute([row]).tokens[0])
    second.computed = len(tokens)
    while not second.done:
        driver.advance([second])
    assert second.output == answer
    runner.close()


def test_layers_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    """By name, with what is known."""
    config = FAMILIES["lfm2"]()
    config.layer_types[0] = "sliding_attention"
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="lfm2"):
        load_model(str(tmp_path), EngineConfig(load_format="dummy", show_progress=False))


@pytest.mark.parametrize("name", ["nemotron-h", "falcon-h1", "lfm2"])
def test_quantized(name: str, tmp_path: Path) -> None:
    """Also where a projection's outputs fill no panels."""
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    model, (tokens,) = load(tmp_path, quantization="int8"), prompts([30], VOCAB)
    assert not any("packed" in entry for entry in model.describe())
    expected, found = logits_of(reference, tokens), in_chunks(model, tokens, 7)
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_adapters_are_told_of_all_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a projection that is filled up to whole panels are wider than its module's."""
    pytest.importorskip("numba")
    use_panels(True, monkeypatch)
    make_model("nemotron-h").save_pretrained(tmp_path)
    model, seen = load(tmp_path), dict[str, int]()

    class Adapters:
        def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
            seen[path] = y.shape[-1]

        def records(self, paths: tuple[str, ...]) -> None:
            return None

    Forwards(model).step([3, 4, 5], adapters=Adapters(), row_adapters=Adapters())
    widths = {place.path: sum(width for _, width in place.parts) for place in model.places()}
    assert widths == seen
    assert any(not path for place in model.places() for path, _ in place.parts)
    assert "" not in LoraLayers(model, 1, 8).modules

"""The one door by which weights come: what it refuses, what it finds, what memory it takes, and that it stays open."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.checkpoints import Checkpoint
from support.forwards import logits_of
from support.long import LONG
from support.panels import use_panels
from support.tiny_models import FAMILIES

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.model_memory import prepare_update

QUIET = EngineConfig(show_progress=False, weight_cache_dir=None)
IDS = [3, 17, 40, 9, 3, 3, 88]
Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    with safe_open(str(folder / "model.safetensors"), "pt") as stream:
        return {key: stream.get_tensor(key).clone() for key in stream.keys()}  # noqa: SIM118 - not a dict


def changed(source: Path, target: Path, change: Callable[[Tensors], Any], **config: Any) -> Path:
    """A copy of a checkpoint, its tensors changed."""
    shutil.copytree(source, target)
    tensors = tensors_of(target)
    change(tensors)
    save_file(tensors, str(target / "model.safetensors"), {"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


def load(folder: Path, **fields: Any) -> Decoder:
    model = load_model(str(folder), QUIET.replace(**fields)).model
    assert isinstance(model, Decoder)
    return model


def update(model: Any, folder: Path) -> None:
    """Other weights of the same shape, into a live model."""
    prepare_update(model, folder, QUIET)()


# ---------------------------------------------------------------- refusals

UP = "model.layers.1.mlp.up_proj.weight"
REFUSED: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(UP), rf"lacks the tensor {UP}$"),
    "several missing": (lambda t: [t.pop(name) for name in list(t) if ".mlp." in name], r"lacks .* and 8 more tensors"),
    "missing head": (lambda t: t.pop("lm_head.weight"), r"lacks the tensor lm_head\.weight"),
    "unknown": (
        lambda t: t.update({"model.layers.0.self_attn.sinks": torch.ones(4)}),
        r"this family does not have: model\.layers\.0\.self_attn\.sinks",
    ),
    "another layer": (
        lambda t: t.update({UP.replace("1", "3"): t[UP].clone()}), r"does not have: model\.layers\.3\.mlp",
    ),
    "misshapen": (lambda t: t.update({UP: t[UP][:7].clone()}), rf"wrong shape for the tensor {UP}: \[7, 48\], not \["),
    "turned": (lambda t: t.update({UP: t[UP].T.contiguous()}), rf"wrong shape for the tensor {UP}"),
    "a vector": (lambda t: t.update({"model.norm.weight": torch.ones(1, 48)}), r"wrong shape .* \[1, 48\], not \[48\]"),
    "integers": (lambda t: t.update({UP: t[UP].to(torch.int8)}), rf"has the tensor {UP} as I8, not as floating"),
    "eight-bit floats": (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), rf"tensor {UP} as F8_E4M3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_checkpoint_is_refused_by_name_and_changes_nothing(
    case: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A new engine refuses it, and so does a live one, whose weights all stay."""
    change, message = REFUSED[case]
    folder = changed(checkpoint("llama", seed=1), tmp_path / "a", change)
    with pytest.raises(ModelNotFound, match=message):
        load(folder)
    live = load(checkpoint("llama"))
    before = logits_of(live, IDS)
    with pytest.raises(ModelNotFound, match=message):
        update(live, folder)
    assert torch.equal(logits_of(live, IDS), before)


# ---------------------------------------------------------------- names


def test_what_nobody_needs_is_ignored(checkpoint: Checkpoint, tmp_path: Path) -> None:
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6), "rotary_emb.inv_freq": torch.ones(6)}
    folder = changed(checkpoint("llama"), tmp_path / "a", lambda tensors: tensors.update(frequencies))
    assert torch.equal(logits_of(load(folder), IDS), logits_of(load(checkpoint("llama")), IDS))


HEADS: dict[str, tuple[Callable[[Tensors], Any], bool]] = {
    "another output layer": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0).clone()}), False,
    ),
    "the same twice": (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}), True),
    "by the output layer's name": (
        lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_a_tied_model_s_heads_are_what_transformers_takes(case: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """tie_word_embeddings is true, and the checkpoint knows better."""
    import transformers as hf

    change, tied = HEADS[case]
    folder = changed(checkpoint("qwen3"), tmp_path / "a", change)
    model = load(folder)
    assert model.config.tied == tied
    oracle = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        expected = oracle(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(model, IDS), expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


# ---------------------------------------------------------------- memory


def taken_by(load: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `load`, and the most KiB that this process had meanwhile beyond what it had before."""

    def peak_kib() -> int:
        return int(Path("/proc/self/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0])

    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        pytest.skip("the peak cannot be reset here")
    before = peak_kib()
    return load(), peak_kib() - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads and resets what a process has used at most")
@pytest.mark.parametrize(("tied", "quantization"), [(True, None), (False, "int8"), *LONG * [(True, "int4")]])
def test_no_weight_is_held_twice_while_loading(
    tied: bool, quantization: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most memory in use is that of the weights as they are kept, and a tenth; large tables are no exception."""
    pytest.importorskip("numba")
    use_panels(True, monkeypatch)
    config = FAMILIES["qwen3"]()
    config.update({"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 2048, "tie_word_embeddings": tied})
    config.save_pretrained(tmp_path)
    made = load(tmp_path, load_format="dummy", dtype="bfloat16")
    tensors = {name: torch.randn(slot.shape).bfloat16() for name, slot in made.slots().items()}
    save_file(tensors, str(tmp_path / "model.safetensors"), {"format": "pt"})
    del tensors, made
    load(tmp_path, quantization=quantization)  # kernels are compiled, and libraries have allocated
    model, taken = taken_by(lambda: load(tmp_path, quantization=quantization))
    assert taken < 1.1 * model.nbytes / 1024 + 6 * 1024, f"{taken} KiB for {model.nbytes // 1024} KiB of weights"

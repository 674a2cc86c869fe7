"""Encoders give transformers' numbers, and a text's are the same bits whatever else is computed with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.long import by_turns
from support.tiny_encoders import FAMILIES, VOCAB, make_encoder, texts

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.execution.models.families.encoders import is_encoder_config
from asyncengine.execution.models.loading import LoadedEncoder, load_encoder

LENGTHS = (1, 37, 90, 2, 16, 17, 64, 5)
CONFIG: dict[str, Any] = {"show_progress": False, "device": "cpu"}


def forward(
    loaded: LoadedEncoder, some: list[list[int]], segments: list[list[int]] | None = None
) -> list[torch.Tensor]:
    counts = [len(text) for text in some]
    flat = torch.tensor([token for text in some for token in text])
    kinds = None if segments is None else torch.tensor([kind for each in segments for kind in each])
    with torch.inference_mode():
        return list(loaded.model.forward(flat, counts, kinds).split(counts))


@torch.inference_mode()
def theirs(model: Any, text: list[int], segments: list[int] | None = None) -> torch.Tensor:
    """Hidden states of one text, by transformers."""
    more = {} if segments is None else {"token_type_ids": torch.tensor([segments])}
    found: torch.Tensor = model(torch.tensor([text]), **more)[0][0]
    return found


def check(model: Any, loaded: LoadedEncoder, some: list[list[int]]) -> None:
    """Texts that are computed together are what transformers computes of each of them alone."""
    for text, found in zip(some, forward(loaded, some), strict=True):
        expected = theirs(model, text)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, tmp_path)
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG))
    check(model, loaded, texts(*LENGTHS))
    assert is_encoder_config(loaded.hf_config)
    assert loaded.model.hidden_size == 64
    assert loaded.vocab_size == VOCAB
    assert loaded.max_model_len == 96


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3_text"])
def test_classification_heads(name: str, tmp_path: Path) -> None:
    """Logits before any activation."""
    model = make_encoder(name, tmp_path, classifies=True)
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG))
    assert loaded.model.num_labels == 3
    some = texts(*LENGTHS)
    with torch.inference_mode():
        found = loaded.model.classify(torch.cat(forward(loaded, some)), [len(text) for text in some])
        expected = torch.cat([model(torch.tensor([text])).logits for text in some])
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert found.std() > 0.05
    for place, text in enumerate(some):
        with torch.inference_mode():
            assert torch.equal(loaded.model.classify(forward(loaded, [text])[0], [len(text)])[0], found[place])


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Its error is at most that of transformers, against the same rounded weights in float32."""
    model = make_encoder(name, tmp_path, dtype=torch.bfloat16)
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG))
    assert loaded.dtype == torch.bfloat16
    some = texts(*LENGTHS)
    rounded = torch.cat([theirs(model, text) for text in some]).float()
    exact = torch.cat([theirs(model.float(), text) for text in some])
    error, other = (float((part - exact).norm()) for part in (torch.cat(forward(loaded, some)).float(), rounded))
    assert 0 < error <= other


DTYPES = ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("name", "dtype"), by_turns(["bert", "mpnet", "modernbert", "nomic_bert", "eurobert", "gemma3_text"], DTYPES)
)
def test_same_bits_alone_and_among_others(name: str, dtype: str, tmp_path: Path) -> None:
    make_encoder(name, tmp_path)
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG, dtype=dtype))
    assert loaded.model.unsteady is None
    some = texts(*LENGTHS, *range(1, 90, 3))
    together = forward(loaded, some)
    backwards = forward(loaded, some[::-1])[::-1]
    for place in range(0, len(some), 3):
        assert torch.equal(together[place], forward(loaded, [some[place]])[0])
    assert all(torch.equal(left, right) for left, right in zip(together, backwards, strict=True))


@pytest.mark.parametrize(("name", "dtype"), by_turns([name for name in FAMILIES if name != "mpnet"], DTYPES))
def test_few_tokens_are_replayed(name: str, dtype: str, tmp_path: Path) -> None:
    """A record serves any texts, and is made anew where more pages are needed; the bits are those of the layers."""
    make_encoder(name, tmp_path)
    model = (loaded := load_encoder(str(tmp_path), EngineConfig(**CONFIG, dtype=dtype))).model
    recorded = model.recorded
    assert recorded is not None
    cases = [texts(16), texts(5, 11), texts(1, 2, 13), texts(90, 3), texts(16), texts(7, 9)]
    found = [torch.cat(forward(loaded, some)) for some in cases]
    assert recorded.obstacle is None
    assert "recorded_layers" in " ".join(model.describe())
    model.recorded = None
    for some, own in zip(cases, found, strict=True):
        assert torch.equal(torch.cat(forward(loaded, some)), own)


@pytest.mark.parametrize("name", ["bert", "nomic_bert", "gte"])
def test_token_types(name: str, tmp_path: Path) -> None:
    """Token types tell the two texts of a pair apart."""
    model = make_encoder(name, tmp_path)
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG))
    some = texts(30, 8)
    kinds = [[0] * 11 + [1] * 19, [1] * 8]
    for text, own, found in zip(some, kinds, forward(loaded, some, kinds), strict=True):
        expected = theirs(model, text, own)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (found - theirs(model, text)).abs().max() > 0.1


@pytest.mark.parametrize(("name", "padding"), [("roberta", 1), ("xlm-roberta", 5), ("mpnet", 1)])
def test_padding_tokens_inside_a_text_have_no_position(name: str, padding: int, tmp_path: Path) -> None:
    model = make_encoder(name, tmp_path)
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG))
    some = texts(9, 12, 7)
    some[1][4] = some[1][5] = some[2][0] = padding
    check(model, loaded, some)


@pytest.mark.parametrize("name", ["bert", "nomic_bert", "gte", "jina_embeddings_v3"])
def test_tensors_by_other_names(name: str, tmp_path: Path) -> None:
    """Names are those of transformers today, below another prefix, and those of norms in TensorFlow's BERT."""
    model = make_encoder(name, tmp_path)
    expected = forward(load_encoder(str(tmp_path), EngineConfig(**CONFIG)), texts(20))[0]
    weights = {f"encoder.{path}": weight.contiguous() for path, weight in model.state_dict().items()}
    if name == "bert":
        renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for now, before in renamed.items():
            weights = {path.replace(now, before): weight for path, weight in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(forward(load_encoder(str(tmp_path), EngineConfig(**CONFIG)), texts(20))[0], expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deberta-v2"}, "encoder family 'deberta-v2' adds a bias"),
        ({"position_embedding_type": "relative_key"}, "with position_embedding_type 'relative_key' is not written"),
        ({"hidden_act": "mish"}, "with activation 'mish' is not written down"),
    ],
)
def test_what_is_not_written_down_is_refused_by_name(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert is_encoder_config(json.loads(file.read_text()))
    with pytest.raises(UnsupportedModel, match=said):
        load_encoder(str(tmp_path), EngineConfig(**CONFIG))


def test_what_is_no_encoder() -> None:
    for config in ({"model_type": "llama"}, {"model_type": "bert", "is_decoder": True}, {"model_type": "gemma3_text"}):
        assert not is_encoder_config(config)
    assert is_encoder_config({"model_type": "gemma3_text", "use_bidirectional_attention": True})


def test_limits(tmp_path: Path) -> None:
    make_encoder("roberta", tmp_path)
    assert load_encoder(str(tmp_path), EngineConfig(**CONFIG, max_model_len=40)).max_model_len == 40
    with pytest.raises(InvalidParameter, match="max_model_len: must not exceed the model's own 96"):
        load_encoder(str(tmp_path), EngineConfig(**CONFIG, max_model_len=97))
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG, load_format="dummy"))
    with pytest.raises(IndexError):
        forward(loaded, [[5, VOCAB]])
    with pytest.raises(ValueError, match="no classification head"):
        loaded.model.classify(torch.zeros(2, 64), [2])


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.97)])
def test_quantized(quantization: str, least: float, tmp_path: Path) -> None:
    """Near the exact ones; the head of a classifier stays as it is; the same bits in any company."""
    make_encoder("bert", tmp_path, classifies=True)
    exact = load_encoder(str(tmp_path), EngineConfig(**CONFIG))
    loaded = load_encoder(str(tmp_path), EngineConfig(**CONFIG, quantization=quantization))
    assert loaded.fused == ["encoder x 1", f"{quantization} x 12", "recorded_layers x 3"]
    some = texts(*LENGTHS)
    found = forward(loaded, some)
    cosines = torch.nn.functional.cosine_similarity(torch.cat(found), torch.cat(forward(exact, some)))
    assert least < cosines.mean() < 1
    assert all(torch.equal(part, forward(loaded, [text])[0]) for part, text in zip(found, some, strict=True))
    assert loaded.model.head is not None
    assert {linear.weight.name for linear in loaded.model.head.linears()} == {"packed"}

"""Tiny embedders and rerankers on disk: a random model, a tokenizer that reads English, and sentence-transformers'
files, in today's forms or in older ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support.tiny_encoders import VOCAB, make_encoder
from support.tiny_models import make_checkpoint

TEXTS = (
    "the cat sat on the mat", "A dog!", "", "   ", "one two three four five six seven eight nine ten",
    "the the the the", "query: where is the cat", "Ärger über den CAT", "a", "dog dog cat",
    " ".join(f"{word} mat" for word in ("cat", "dog", "one", "two") * 40),
)  # fmt: skip
"""Short, empty, blank, in capitals, and one that is too long."""
_SPELT = """
the cat sat on mat dog one two three four five six seven eight nine ten query where is passage document instruct yes no
a e i o u r t ##s ##t ##e ##r ##a ##o ##n ##g ##d : ! , . < >
"""
_WORDS = _SPELT.split()


def make_tokenizer(folder: Path, *, like: str = "bert", lower: bool = True, length: int | None = 96) -> None:
    """Write a tokenizer of word pieces; special tokens as in `like`: "bert", "roberta", or "end", one at the end."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"bert": ["[CLS]", "[SEP]"], "roberta": ["<s>", "</s>"], "end": ["<s>", "<end>"]}[like]
    names = ["[PAD]", "[UNK]", *special, "[MASK]", "[X]"]
    vocabulary = {name: index for index, name in enumerate([*names, *_WORDS])}
    assert len(vocabulary) <= VOCAB
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = special
    forms = {
        "bert": (f"{first} $A {last}", f"{first} $A {last} $B:1 {last}:1"),
        "roberta": (f"{first} $A {last}", f"{first} $A {last} {last} $B {last}"),
        "end": (f"$A {last}", f"$A $B {last}"),
    }[like]
    ids = [(name, vocabulary[name]) for name in special]
    tokenizer.post_processor = processors.TemplateProcessing(single=forms[0], pair=forms[1], special_tokens=ids)
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if like == "bert" else [])]
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token=first, sep_token=last,
        eos_token=last, model_input_names=inputs, **({} if length is None else {"model_max_length": length}),
    )  # fmt: skip
    hf.save_pretrained(folder)


def sentence_folder(
    folder: Path,
    *,
    family: str = "bert",
    modes: str | Sequence[str] | None = "mean",
    legacy: bool = False,
    include_prompt: bool = True,
    dense: Sequence[Mapping[str, Any]] = (),
    normalize: bool = False,
    settings: Mapping[str, Any] | None = None,
    sentence: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    inside: str = "",
    **tokenizer: Any,
) -> Path:
    """An embedder. `settings` and `sentence` are config_sentence_transformers.json and sentence_bert_config.json;
    `dense` settings of such modules; `inside` the folder of the transformer, in an old form."""
    own = folder / inside
    if family in ("qwen3", "mistral", "llama", "qwen2"):
        make_checkpoint(family, own, dtype=dtype)
        make_tokenizer(own, **{"like": "end", **tokenizer})
    else:
        make_encoder(family, own, dtype=dtype)
        make_tokenizer(own, **{"like": "roberta" if "roberta" in family else "bert", **tokenizer})
    width = 64
    kind = "sentence_transformers.models."
    modules = [{"idx": 0, "name": "0", "path": inside, "type": kind + "Transformer"}]

    def add(name: str, content: Mapping[str, Any]) -> Path:
        where = f"{len(modules)}_{name}"
        modules.append({"idx": len(modules), "name": str(len(modules)), "path": where, "type": kind + name})
        _write(folder / where / "config.json", content)
        return folder / where

    if modes is not None:
        add("Pooling", _pooling(modes, width, include_prompt, legacy))
        width *= 1 if isinstance(modes, str) else len(modes)
    for layer in dense:
        where = add("Dense", {"in_features": width, "bias": True, **layer})
        _dense_weights(where, width, layer)
        width = layer["out_features"]
    if normalize:
        add("Normalize", {})
    _write(folder / "modules.json", modules)
    if settings is not None:
        _write(folder / "config_sentence_transformers.json", settings)
    _write(own / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False} | dict(sentence or {}))
    return folder


def scorer_folder(
    folder: Path, *, family: str = "bert", labels: int = 1, config: Mapping[str, Any] | None = None, **tokenizer: Any
) -> Path:
    """A model with a classification head, and no file of sentence-transformers'. `config`: more of config.json."""
    import support.tiny_encoders as encoders

    sizes = encoders.SIZES
    before = sizes["num_labels"]
    sizes["num_labels"] = labels
    try:
        make_encoder(family, folder, classifies=True)
    finally:
        sizes["num_labels"] = before
    make_tokenizer(folder, **{"like": "roberta" if "roberta" in family else "bert", **tokenizer})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(config or {})))
    return folder


def _pooling(modes: str | Sequence[str], width: int, include_prompt: bool, legacy: bool) -> dict[str, Any]:
    named = [modes] if isinstance(modes, str) else list(modes)
    if not legacy:
        return {"embedding_dimension": width, "pooling_mode": modes, "include_prompt": include_prompt}
    names = {
        "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens",
    }  # fmt: skip
    switches = {f"pooling_mode_{key}": mode in named for mode, key in names.items()}
    return {"word_embedding_dimension": width, **switches}


def _dense_weights(where: Path, width: int, layer: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(width)
    outputs = layer["out_features"]
    tensors = {"linear.weight": torch.randn(outputs, width, generator=generator) / width**0.5}
    if layer.get("bias", True):
        tensors["linear.bias"] = torch.randn(outputs, generator=generator)
    if layer.get("use_residual") and outputs != width:
        tensors["residual.weight"] = torch.randn(outputs, width, generator=generator) / width**0.5
    save_file(tensors, where / "model.safetensors")


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")

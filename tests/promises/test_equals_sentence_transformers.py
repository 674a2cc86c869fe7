"""Vectors and scores against sentence-transformers in the same process, on random models of ten families."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.long import LONG
from support.sentence_folders import TEXTS, scorer_folder, sentence_folder

from asyncengine import Engine

CLOSE = 1e-5
DOCUMENTS = [text for text in TEXTS if text.strip()]


def library() -> Any:
    """The reference, imported where it is called: that takes seconds, not to be spent where tests are collected."""
    if os.environ.get("CI"):
        import sentence_transformers

        return sentence_transformers
    return pytest.importorskip("sentence_transformers")


def load(folder: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(str(folder), show_progress=False, **settings)


def wanted(folder: Path, texts: list[str], **options: Any) -> np.ndarray:
    """The vectors that sentence-transformers makes of each text, alone: its own batches change their bits."""
    model = library().SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return np.stack([model.encode(text, **options) for text in texts])


def scores_wanted(folder: Path, pairs: list[tuple[str, str]], **options: Any) -> np.ndarray:
    model = library().CrossEncoder(str(folder), device="cpu", local_files_only=True)
    return np.stack([model.predict([pair], **options)[0] for pair in pairs])


FAMILIES = (
    "bert", "xlm-roberta", "modernbert", "jina_embeddings_v3", "gemma3_text", "qwen3",
    "roberta", "distilbert", "nomic_bert", "gte", "eurobert", "mistral",
)  # fmt: skip
"""The short form asks the first six; all are compared with transformers by tests/execution/models/test_encoders.py."""


@pytest.mark.parametrize("family", FAMILIES if LONG else FAMILIES[:6])
def test_every_family(family: str, tmp_path: Path) -> None:
    causal = family in ("qwen3", "mistral")
    modes = "lasttoken" if causal else "mean"
    folder = sentence_folder(tmp_path, family=family, modes=modes, normalize=True)
    texts = list(TEXTS)
    with load(folder) as engine:
        found = engine.embed(texts)
        assert np.abs(found.vectors - wanted(folder, texts)).max() < CLOSE
        assert found.truncated == (len(TEXTS) - 1,)
        assert engine.info.max_model_len == 64
        shuffled = engine.embed(texts[::-1] * 3).vectors
        assert (shuffled[: len(texts)][::-1] == found.vectors).all()
        assert (engine.embed(texts[4]).vectors[0] == found.vectors[4]).all()


MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "cls", "max"))


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_every_pooling(modes: str | tuple[str, ...], tmp_path: Path) -> None:
    """The prompt is pooled with the text or left out; a causal model's texts come in chunks. The short form asks every
    second mode of each family."""
    told = {"prompts": {"query": "query: the ", "document": ""}, "default_prompt_name": None}
    turn = MODES.index(modes)
    asked = (("bert", turn // 2 % 2 == 1), ("qwen3", turn // 2 % 2 == 0))
    for family, include in asked if LONG else asked[turn % 2 :][:1]:
        folder = sentence_folder(tmp_path / family, family=family, modes=modes, include_prompt=include, settings=told)
        with load(folder, max_num_batched_tokens=24, page_size=4) as engine:
            found = engine.embed(DOCUMENTS, prompt_name="query").vectors
            right = wanted(folder, DOCUMENTS, prompt_name="query")
            assert np.abs(found - right).max() < CLOSE * max(1, np.abs(right).max())
            again = engine.embed(DOCUMENTS[0], prompt="query: the ")
            assert (again.vectors[0] == found[0]).all()
            assert again.usage.prompt_tokens > 5


def test_what_comes_behind_the_pooling(tmp_path: Path) -> None:
    """Dense modules, length one, fewer dimensions, default prompts, small letters: each as the files say."""
    layers = [
        {"out_features": 96, "activation_function": "torch.nn.modules.activation.Tanh"},
        {"out_features": 48, "activation_function": "torch.nn.modules.linear.Identity", "bias": False},
        {"out_features": 48, "activation_function": "torch.nn.modules.activation.GELU", "use_residual": True},
    ]
    settings = {"prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": "document"}
    folder = sentence_folder(
        tmp_path, modes=["mean", "max"], dense=layers, normalize=True, settings=settings, lower=False,
        sentence={"max_seq_length": 32, "do_lower_case": True},
    )  # fmt: skip
    texts = list(TEXTS)
    with load(folder) as engine:
        assert (engine.info.dimensions, engine.info.prompts) == (48, ("query", "document"))
        assert engine.info.max_model_len == 32
        assert np.abs(engine.embed(texts).vectors - wanted(folder, texts)).max() < CLOSE
        found = engine.embed(texts, prompt_name="query", dimensions=16).vectors
        options = {"prompt_name": "query", "truncate_dim": 16, "normalize_embeddings": True}
        assert np.abs(found - wanted(folder, texts, **options)).max() < CLOSE
        bare = engine.embed(texts, prompt="", normalize=False).vectors
        assert np.abs(np.linalg.norm(bare, axis=1) - 1).max() > 0.1


def test_older_files(tmp_path: Path) -> None:
    """Switches in place of names, the transformer in a folder of its own, no configuration of lengths."""
    folder = sentence_folder(tmp_path, modes=["cls", "mean"], legacy=True, inside="0_Transformer")
    texts = list(TEXTS)
    with load(folder) as engine:
        assert np.abs(engine.embed(texts).vectors - wanted(folder, texts)).max() < CLOSE


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_bfloat16(family: str, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, family=family, modes="lasttoken", normalize=True, dtype=torch.bfloat16)
    texts = list(TEXTS)
    with load(folder) as engine:
        assert engine.info.dtype == "bfloat16"
        found = engine.embed(texts).vectors
    right = wanted(folder, texts).astype(np.float32)  # of length one in bfloat16: 0.3 % off
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    assert (found * right).sum(axis=1).min() > 0.9995


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_cross_encoders(family: str, tmp_path: Path) -> None:
    folder = scorer_folder(tmp_path, family=family)
    query = "where is the cat"
    with load(folder) as engine:
        found = engine.rerank(query, DOCUMENTS)
        right = scores_wanted(folder, [(query, document) for document in DOCUMENTS])
        by_index = {ranked.index: ranked for ranked in found.results}
        assert np.abs([by_index[i].score - right[i] for i in range(len(DOCUMENTS))]).max() < CLOSE
        assert [ranked.index for ranked in found.results] == np.argsort(-right, kind="stable").tolist()
        assert all(ranked.document == DOCUMENTS[ranked.index] for ranked in found.results)
        assert found.truncated == (DOCUMENTS.index(TEXTS[-1]),)
        assert engine.rerank(query, DOCUMENTS, top_n=2).results == found.results[:2]
        assert [r.index for r in engine.rerank(query, [DOCUMENTS[0]] * 3).results] == [0, 1, 2]


def test_classifiers(tmp_path: Path) -> None:
    """Labels, and what scores go through: as files of sentence-transformers say, else as transformers' pipeline has
    it."""
    labels = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}
    own = {**labels, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0"}}
    pairs = [("the cat", "a dog"), ("one two", "three four five"), (TEXTS[-1], TEXTS[-1])]
    for name, config, softmax in (("theirs", own, False), ("plain", labels, True)):
        folder = scorer_folder(tmp_path / name, labels=3, config=config)
        right = scores_wanted(folder, pairs, apply_softmax=softmax)
        with load(folder) as engine:
            assert (engine.info.task, engine.info.labels) == ("classify", ("no", "maybe", "yes"))
            found = engine.classify(pairs)
            scores = np.array([list(each.scores.values()) for each in found.results])
            assert np.abs(scores - right).max() < CLOSE
            assert [each.label for each in found.results] == [engine.info.labels[i] for i in right.argmax(axis=1)]
            assert [each.score for each in found.results] == scores.max(axis=1).tolist()


def test_a_text_generator_that_says_yes_or_no(tmp_path: Path) -> None:
    """Qwen3-Reranker: transformers' logits behind the template, and sentence-transformers' score of them."""
    import transformers
    from support.sentence_folders import make_tokenizer
    from support.tiny_models import make_checkpoint

    make_checkpoint("qwen3", tmp_path)
    make_tokenizer(tmp_path, like="end", length=None)
    with load(tmp_path, task="rerank", page_size=4) as engine:
        tokenizer = engine.aengine.core.tokenizer
        assert tokenizer is not None
        documents = DOCUMENTS[:6]
        found = engine.rerank("the cat", documents, instruction="instruct the dog")
        yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
        template = engine.aengine.core.vectors("rerank").model.template
        assert template is not None
        assert found.usage.cached_tokens > 0  # what stands before each pair is computed once
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    right = []
    for document in documents:
        body = f"<Instruct>: instruct the dog\n<Query>: the cat\n<Document>: {document}"
        ids = [*template.frame[0], *tokenizer.encode(body, add_special_tokens=False), *template.frame[1]]
        logits = model(torch.tensor([ids])).logits[0, -1]
        right.append(torch.sigmoid(logits[yes] - logits[no]).item())
    by_index = {ranked.index: ranked.score for ranked in found.results}
    assert np.abs([by_index[i] - right[i] for i in range(len(right))]).max() < CLOSE
    assert [ranked.index for ranked in found.results] == np.argsort(-np.array(right), kind="stable").tolist()

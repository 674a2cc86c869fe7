"""Real texts through real models, without a second library beside them: nasty ones, company, heads of causal models."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.long import LONG
from support.sentence_folders import make_tokenizer, scorer_folder, sentence_folder

from asyncengine import AsyncEngine, Engine
from asyncengine.errors import ContextLengthExceeded, InvalidParameter, ModelNotFound, UnsupportedModel

WORDS = [*"abcde", "the", "cat", "sat", "on", "mat", "dog", "one", "two", "three", "four", "five", "six"]


def load(folder: Path, **settings: object) -> Engine:
    return Engine.from_pretrained(str(folder), show_progress=False, **settings)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"prompts": {"query": "query: "}}
    return sentence_folder(tmp_path_factory.mktemp("m") / "m", normalize=True, settings=settings)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"] if LONG else ["modernbert", "qwen3"])
def test_a_text_s_bits_do_not_depend_on_its_company(family: str, tmp_path: Path) -> None:
    """A text runs alone, among 2 to 256 others, in any order, in steps of any size, from the cache or not."""
    rng = random.Random(1)
    modes = "lasttoken" if family == "qwen3" else "mean"
    folder = sentence_folder(tmp_path, family=family, modes=modes, normalize=True)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 60))) for _ in range(256)]
    with load(folder) as engine:
        right = engine.embed(texts).vectors
        for size in (1, 2, 17, 100):
            chosen = rng.sample(range(256), size)
            assert (engine.embed([texts[i] for i in chosen]).vectors == right[chosen]).all()
    with load(folder, max_num_batched_tokens=37, prefix_caching=False) as engine:
        assert (engine.embed(texts[:40]).vectors == right[:40]).all()


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
async def test_a_short_text_computed_at_once_has_the_same_bits(
    family: str, settings: dict[str, object], tmp_path: Path
) -> None:
    """On the caller's own loop an idle engine computes it there; alone again, among others, and after longer ones."""
    folder = sentence_folder(tmp_path, family=family, modes="mean", normalize=True)
    rng = random.Random(2)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 30))) for _ in range(40)]
    async with await AsyncEngine.from_pretrained(str(folder), show_progress=False, **settings) as engine:
        right = (await engine.embed(texts)).vectors
        for index in [*range(40), *rng.sample(range(40), 40)]:
            assert ((await engine.embed(texts[index])).vectors == right[index]).all(), texts[index]
            if index == 20:
                await engine.embed(" ".join(WORDS * 30))
        together = await asyncio.gather(*map(engine.embed, texts))
        assert all((found.vectors == row).all() for found, row in zip(together, right, strict=True))


def test_nasty_texts(embedder: Path) -> None:
    with load(embedder) as engine:
        right = engine.embed("the cat").vectors
        long = "the cat sat " * 90_000  # over a megabyte
        found = engine.embed(["the cat", long, "", "  \n ", "the cat", "\x00\ufffd\U0001f600"])
        assert found.truncated == (1,)
        assert found.usage.prompt_tokens < 64 + 40
        assert (found.vectors[[0, 4]] == right).all()
        assert (found.vectors[2] == found.vectors[3]).all()  # nothing but the special tokens
        assert np.isfinite(found.vectors).all()
        with pytest.raises(ContextLengthExceeded, match=r"texts\[1\]: is longer than the 64 tokens"):
            engine.embed(["a", long], truncate=False)
        with pytest.raises(InvalidParameter, match=r"texts\[300\]: is not valid Unicode"):
            engine.embed(["a"] * 300 + ["\udc00"])
        with pytest.raises(InvalidParameter, match=r"texts\[2\]: is not valid Unicode"):
            engine.embed([[3], [4], "\udc00"])
        with pytest.raises(InvalidParameter, match=r"prompt: is not valid Unicode"):
            engine.embed("a", prompt="\udc00")
        with pytest.raises(InvalidParameter, match=r"prompt_name: is none of the prompts .*'query', got 'passage'"):
            engine.embed("a", prompt_name="passage")
        with pytest.raises(InvalidParameter, match=r"prompt: cannot go with a prompt_name"):
            engine.embed("a", prompt_name="query", prompt="a")
        with pytest.raises(InvalidParameter, match=r"texts\[1\]: must be a str or a sequence of token ids"):
            engine.embed(["a", None])  # type: ignore[list-item]
        with pytest.raises(InvalidParameter, match=r"dimensions: .*64"):
            engine.embed("a", dimensions=65)
        assert (engine.embed("the cat").vectors == right).all()


def test_documents_to_rank(tmp_path: Path) -> None:
    with load(scorer_folder(tmp_path)) as engine:
        assert engine.rerank("the cat", []).results == []
        with pytest.raises(InvalidParameter, match=r"query: is not valid Unicode"):
            engine.rerank("\udc00", ["a"])
        with pytest.raises(InvalidParameter, match=r"documents\[1\]: is not valid Unicode"):
            engine.rerank("the cat", ["a", "\udc00"])
        one = engine.rerank("the cat", ["a dog"])
        assert [(ranked.index, ranked.document) for ranked in one.results] == [(0, "a dog")]
        assert 0 < one.results[0].score < 1
        many = engine.rerank("the cat", ["", "a dog", "", "a dog"], top_n=3)
        assert len(many.results) == 3
        assert len({ranked.score for ranked in many.results if ranked.document == "a dog"}) == 1
        assert engine.classify([("the cat", "a dog")]).results[0].score == one.results[0].score
        wrong = [
            (("the cat", "a dog"), "documents: must be a list of str"), (("the cat", [None]), r"documents\[0\]"),
            ((None, ["a"]), "query: must be a str"), (("the cat", None), "documents: must be"),
        ]  # fmt: skip
        for arguments, match in wrong:
            with pytest.raises(InvalidParameter, match=match):
                engine.rerank(*arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidParameter, match="top_n"):
            engine.rerank("the cat", ["a"], top_n=0)
        with pytest.raises(InvalidParameter, match=r"instruction: is nothing that .* reads"):
            engine.rerank("the cat", ["a"], instruction="find cats")


def test_a_head_on_a_causal_model(tmp_path: Path) -> None:
    """...ForSequenceClassification of a text generator's family: the last hidden state through its matrix."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=3, pad_token_id=0, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    make_tokenizer(tmp_path, like="end")
    texts = ["the cat", "one two three four five six seven eight nine ten" * 3, "a"]
    with load(tmp_path, page_size=4, max_num_batched_tokens=16) as engine:
        assert (engine.info.task, len(engine.info.labels)) == ("classify", 3)
        found = engine.classify(texts)
        ids = [engine.tokenize(text) for text in texts]
    for each, tokens in zip(found.results, ids, strict=True):
        right = torch.softmax(model(torch.tensor([tokens])).logits[0], -1).tolist()
        assert np.abs(np.array(list(each.scores.values())) - right).max() < 1e-5


def test_models_that_give_no_vectors(tmp_path: Path, embedder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is an embedding model: it gives vectors and writes no text"):
        load(embedder, task="generate")
    with pytest.raises(UnsupportedModel, match="is an encoder without a classification head: it gives no scores"):
        load(embedder, task="rerank")
    with pytest.raises(UnsupportedModel, match="has no classification head"):
        load(embedder, task="classify")
    with pytest.raises(InvalidParameter, match="adapters: are not read for encoders"):
        load(embedder, adapters={"a": str(tmp_path)})
    with pytest.raises(InvalidParameter, match="task: must be one of 'auto'"):
        load(embedder, task="vectors")
    broken = sentence_folder(tmp_path / "broken", dense=[{"out_features": 8}])
    (broken / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"2_Dense has no model.safetensors"):
        load(broken)
    file = tmp_path / "broken" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["BertForTokenClassification"]}))
    with pytest.raises(UnsupportedModel, match="is a classifier of tokens"):
        load(broken)

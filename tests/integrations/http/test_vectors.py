"""Vectors, scores and tokens over HTTP: the numbers of the engine in process, in the forms of those who are asked."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from support.data import cases_of
from support.fake_engine import until
from support.http_server import serving_thread

from asyncengine import Engine
from asyncengine.integrations.http import app, vectors

ROWS: dict[str, Any] = cases_of(__file__)

TEXTS = ["A cat sits on the mat.", "Stocks fell sharply.", "Two dogs play."]
Engines = dict[str, Engine]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    models: Any = {"demo": ("demo", {}), "reranker": ("demo-rerank", {})}
    models["embedder"] = ("demo-embed", {"chat_template": "chatml"})
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Engine.from_pretrained(model, show_progress=False, num_threads=1, **more))
            for name, (model, more) in models.items()
        }


@pytest.fixture(scope="module")
def url(engines: Engines) -> Iterator[str]:
    @asynccontextmanager
    async def make_app() -> AsyncIterator[Any]:
        yield app({name: engine.aengine for name, engine in engines.items()}, strict=False)

    with serving_thread(make_app) as url:
        yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


# -------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("form", ["float", "base64"])
def test_vectors_are_the_engines_to_the_bit(client: openai.OpenAI, engines: Engines, form: Any) -> None:
    wanted = engines["embedder"].embed(TEXTS)
    answer = client.embeddings.create(model="embedder", input=TEXTS, encoding_format=form)
    assert [row.index for row in answer.data] == [0, 1, 2]
    rows: list[Any] = [row.embedding for row in answer.data]
    if form == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    assert np.array_equal(np.array(rows, np.float32), wanted.vectors)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == wanted.usage.prompt_tokens


@pytest.mark.parametrize("order", ["little", "big", "native"])
def test_vectors_are_sent_as_numbers_of_any_type(url: str, engines: Engines, order: str) -> None:
    wanted = torch.from_numpy(engines["embedder"].embed(TEXTS).vectors)
    how: dict[str, Any] = {"model": "embedder", "input": TEXTS, "endianness": order}
    types = {"float32": "f4", "float16": "f2", "bfloat16": "i2", "fp8_e4m3": "u1", "fp8_e5m2": "u1"}
    for name, kind in types.items():
        dtype: torch.dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(name, name))
        numpys = {"little": "<", "big": ">", "native": "="}[order] + kind

        def numbers(given: bytes, numpys: str = numpys, dtype: torch.dtype = dtype) -> torch.Tensor:
            array = np.frombuffer(given, numpys)
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("="))).view(dtype)

        rows = post(url, "/v1/embeddings", **how, encoding_format="base64", embed_dtype=name).json()["data"]
        found = torch.stack([numbers(base64.b64decode(row["embedding"])) for row in rows])
        assert torch.equal(found.float(), wanted.to(dtype).float())
        told = post(url, "/v1/embeddings", **how, encoding_format="bytes", embed_dtype=name)
        assert told.headers["content-type"] == "application/octet-stream"
        for row, vector in zip(json.loads(told.headers["metadata"])["data"], found, strict=True):
            assert (row["embed_dtype"], row["shape"]) == (name, list(vector.shape))
            assert torch.equal(numbers(told.content[row["start"] : row["end"]]).float(), vector.float())
        plain = post(url, "/v1/embeddings", **how, encoding_format="bytes_only", embed_dtype=name)
        assert (plain.content, "metadata" in plain.headers) == (told.content, False)


def test_a_number_beyond_a_type_is_its_largest() -> None:
    made = vectors._in_bytes(np.array([[1e9, -1e9]], np.float32), {"embed_dtype": "fp8_e4m3"})
    assert torch.from_numpy(made).view(torch.float8_e4m3fn).float().tolist() == [[448.0, -448.0]]


def test_ids_dimensions_and_prompts_are_taken(url: str, engines: Engines) -> None:
    engine = engines["embedder"]
    ids = engine.tokenize(TEXTS[0])
    name = engine.info.prompts[0] if engine.info.prompts else None
    for given, texts, keywords in (
        ({"input": TEXTS[0]}, [TEXTS[0]], {}),
        ({"input": ids}, [ids], {}),
        ({"input": [ids, "b"]}, [ids, "b"], {}),
        ({"input": TEXTS, "dimensions": 16, "normalize": False}, TEXTS, {"dimensions": 16, "normalize": False}),
        ({"input": TEXTS, "prompt_name": name, "user": "u"}, TEXTS, {"prompt_name": name}),
        ({"input": TEXTS[0], "use_activation": False}, [TEXTS[0]], {"normalize": False}),
        ({"input": TEXTS[0], "add_special_tokens": False}, [engine.tokenize(TEXTS[0], add_special_tokens=False)], {}),
        ({"input": [ids, TEXTS[0]], "truncate_prompt_tokens": 4}, [ids[:4], [*ids[:3], ids[-1]]], {}),
    ):
        answer = post(url, "/v1/embeddings", model="embedder", **given)
        assert answer.status_code == 200, answer.text
        found = np.array([row["embedding"] for row in answer.json()["data"]], np.float32)
        assert np.array_equal(found, engine.embed(texts, **keywords).vectors)  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "body"), ROWS["one_path_takes_requests_of_all_kinds"])
def test_one_path_takes_requests_of_all_kinds(url: str, path: str, body: dict[str, Any]) -> None:
    one, other = (post(url, each, **body).json() for each in (path, "/invocations"))
    for answer in (one, other):
        for changing in ("id", "created", "timings", "metrics"):
            answer.pop(changing, None)
    one["usage"].pop("prompt_tokens_details", None), other["usage"].pop("prompt_tokens_details", None)
    assert one == other


def test_a_text_that_is_too_long_is_cut_on_request_only(url: str) -> None:
    long = "word " * 5000
    refused = post(url, "/v1/embeddings", model="embedder", input=["a", long])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1]")
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    for how in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        cut = post(url, "/v1/embeddings", model="embedder", input=["a", long], **how)
        assert cut.headers["x-asyncengine-truncated"] == "1"


# -------------------------------------------------------------------- scores


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_as_in_process(url: str, engines: Engines, path: str) -> None:
    wanted = engines["reranker"].rerank("Which animals?", TEXTS)
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    answer = post(url, path, query="Which animals?", documents=documents).json()  # the only reranker: no model named
    ranked = [(each.index, each.score, each.document) for each in wanted.results]
    assert [(e["index"], e["relevance_score"], e["document"]["text"]) for e in answer["results"]] == ranked
    assert answer["usage"]["total_tokens"] == wanted.usage.prompt_tokens
    best = post(url, path, query="Which animals?", documents=TEXTS, top_n=1, return_documents=False).json()
    assert best["results"] == [{"index": ranked[0][0], "relevance_score": ranked[0][1]}]
    rows = post(url, path, query="Which animals?", texts=TEXTS, return_text=True).json()
    assert [(row["index"], row["score"], row["text"]) for row in rows] == ranked


def test_documents_are_cut_to_a_number_of_tokens(url: str, engines: Engines) -> None:
    query, engine = "Which animals?", engines["reranker"]
    cut = [engine.detokenize(engine.tokenize(text, add_special_tokens=False)[:3]) for text in TEXTS]
    wanted = {each.index: each.score for each in engine.rerank(query, cut).results}
    assert wanted != {each.index: each.score for each in engine.rerank(query, TEXTS).results}
    answer = post(url, "/v2/rerank", query=query, documents=[*TEXTS, "Dogs"], max_tokens_per_doc=3)
    rows = {row["index"]: row for row in answer.json()["results"]}
    assert {index: rows[index]["relevance_score"] for index in wanted} == wanted
    assert [rows[index]["document"]["text"] for index in range(4)] == [*TEXTS, "Dogs"], "as they were sent"
    assert answer.headers["x-asyncengine-truncated"] == "0, 1, 2"
    whole = post(url, "/rerank", query=query, documents=TEXTS, max_tokens_per_doc=4096)
    assert "x-asyncengine-truncated" not in whole.headers


def test_an_embedder_ranks_by_cosines(url: str, engines: Engines) -> None:
    made = engines["embedder"].embed(["What do dogs do?", *TEXTS], normalize=True).vectors
    cosines = (made[1:] @ made[0]).tolist()
    asked = {"model": "embedder", "query": "What do dogs do?", "documents": TEXTS, "top_n": 2}
    found = post(url, "/rerank", **asked).json()["results"]
    best = sorted(range(3), key=lambda at: -cosines[at])[:2]
    assert [(each["index"], each["relevance_score"]) for each in found] == [(at, cosines[at]) for at in best]


@pytest.mark.parametrize("model", ["reranker", "embedder"])
def test_scores_of_pairs(url: str, model: str) -> None:
    """One query with several texts, and pairs, have the scores of reranking, in the order of the request."""
    ranked = post(url, "/rerank", model=model, query=TEXTS[0], documents=TEXTS).json()["results"]
    wanted = [score for _, score in sorted((each["index"], each["relevance_score"]) for each in ranked)]
    one = post(url, "/score", model=model, text_1=TEXTS[0], text_2=TEXTS).json()
    assert [each["score"] for each in one["data"]] == wanted
    assert [(each["index"], each["object"]) for each in one["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    assert (one["object"], one["model"], one["usage"]["total_tokens"] > 10) == ("list", model, True)
    pairs = post(url, "/v1/score", model=model, queries=[TEXTS[0]] * 3, documents=TEXTS).json()
    for names in (("queries", "items"), ("data_1", "data_2")):
        told = dict(zip(names, ([TEXTS[0]] * 3, TEXTS), strict=True))
        assert post(url, "/score", model=model, **told).json()["data"] == pairs["data"]
    assert np.allclose([each["score"] for each in pairs["data"]], wanted, rtol=0, atol=1e-6)
    for wrong in ({"text_1": TEXTS[:2], "text_2": TEXTS}, {"text_1": TEXTS[0]}, {"text_2": TEXTS}):
        refused = post(url, "/score", model=model, **wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "text_1" if "text_1" in wrong else "queries",
        )


def test_pooled_vectors_are_embeddings(url: str) -> None:
    theirs = post(url, "/v1/embeddings", model="embedder", input=TEXTS).json()
    found = post(url, "/pooling", model="embedder", input=TEXTS).json()
    assert [each["data"] for each in found["data"]] == [each["embedding"] for each in theirs["data"]]
    assert ({each["object"] for each in found["data"]}, found["usage"]) == ({"pooling"}, theirs["usage"])


def test_scores_may_come_without_an_activation(url: str, engines: Engines) -> None:
    raw = engines["reranker"].rerank("Which animals?", TEXTS, activation=False).results
    shown = {each.index: each.score for each in engines["reranker"].rerank("Which animals?", TEXTS).results}
    assert [1 / (1 + math.exp(-each.score)) for each in raw] == pytest.approx([shown[each.index] for each in raw])
    asked: dict[str, Any] = {"model": "reranker", "query": "Which animals?"}
    for path, more in (
        ("/rerank", {"documents": TEXTS, "use_activation": False}),
        ("/rerank", {"texts": TEXTS, "raw_scores": True}),
    ):
        answer = post(url, path, **asked, **more).json()
        rows = answer["results"] if "documents" in more else answer
        assert [row.get("relevance_score", row.get("score")) for row in rows] == [each.score for each in raw]
    scores = post(url, "/score", model="reranker", text_1="Which animals?", text_2=TEXTS, use_activation=False).json()
    assert {row["index"]: row["score"] for row in scores["data"]} == {each.index: each.score for each in raw}
    assert post(url, "/rerank", model="embedder", query="a", documents=["b"], use_activation=False).status_code == 200
    wanted = [*engines["reranker"].classify(["a"], activation=False).results[0].scores.values()]
    for path, name in (("/classify", "probs"), ("/pooling", "data")):
        (made,) = post(url, path, model="reranker", input="a", use_activation=False).json()["data"]
        assert made[name] == wanted
        assert path == "/pooling" or made.keys() == {"index", "label", "probs", "num_classes"}


def test_a_pair_is_cut_to_a_number_of_tokens(url: str, engines: Engines) -> None:
    query, text = "Which animals?", "cats and dogs " * 20
    for path, body in (
        ("/score", {"text_1": query, "text_2": text}),
        ("/rerank", {"query": query, "documents": [text]}),
    ):
        for model, most in (("reranker", 20), ("embedder", 12)):
            usage = post(url, path, model=model, **body, truncate_prompt_tokens=most).json()["usage"]
            alone = len(engines["embedder"].tokenize(query))
            assert usage["prompt_tokens"] == most + (alone if model == "embedder" else 0)
    refused = post(url, "/score", model="reranker", text_1=query, text_2="word " * 600)
    assert "Please reduce the length of the input prompt" in refused.json()["error"]["message"]
    assert post(url, "/score", model="reranker", text_1=query, text_2="word " * 600, truncate=True).status_code == 200


# -------------------------------------------------------------------- tokens


def test_tokens_of_texts_and_chats(url: str, engines: Engines) -> None:
    engine, chat = engines["demo"], [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = post(url, "/tokenize", model="demo", prompt="Naïve", return_token_strs=True).json()
    ids = engine.tokenize("Naïve")
    assert (text["tokens"], text["count"], text["token_strs"]) == (ids, len(ids), engine.token_texts(ids))
    assert text["max_model_len"] == engine.info.max_model_len
    plain = post(url, "/tokenize", prompt="Naïve", add_special_tokens=False).json()["tokens"]
    assert plain == engine.tokenize("Naïve", add_special_tokens=False)
    wanted = engine.tokenize([{**chat[0], "role": "system"}, chat[1]])
    assert post(url, "/tokenize", messages=chat).json()["tokens"] == wanted
    shorter = post(url, "/tokenize", messages=chat, add_generation_prompt=False).json()["tokens"]
    assert len(shorter) < len(wanted)
    assert post(url, "/detokenize", tokens=wanted).json()["prompt"] == engine.detokenize(
        wanted, skip_special_tokens=False
    )
    pieces = post(url, "/tokenize", content="Naïve", with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == plain


def test_a_tokenizer_tells_its_end(url: str, engines: Engines) -> None:
    end = httpx.get(f"{url}/tokenizer_info").json()["eos_token"]
    ids = post(url, "/tokenize", prompt=end, add_special_tokens=False).json()["tokens"]
    assert tuple(ids) == engines["demo"].info.eos_token_ids[:1]


# -------------------------------------------------------------------- errors


async def test_a_client_that_leaves_takes_its_texts_along(url: str, engines: Engines) -> None:
    texts = [f"{number} " + "word " * 200 for number in range(4000)]
    engine = engines["embedder"]
    before = sum(engine.stats().finished.values())
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/embeddings", json={"model": "embedder", "input": texts}))
        while not any(engine.stats().requests.values()):  # noqa: ASYNC110 - what is awaited happens in the server
            await asyncio.sleep(0.01)
        asking.cancel()
    while any(engine.stats().requests.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await until(lambda: engine.stats().finished.get("abort", 0) > 0)  # ends are counted as they are told, a bit later
    assert sum(engine.stats().finished.values()) - before < len(texts)

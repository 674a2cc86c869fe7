"""Endpoints of vectors and scores (/v1/embeddings, /v1/rerank, /score, ...), and of tokens (/tokenize, /detokenize).

Embeddings have OpenAI's form; reranking has Jina's and Cohere's, or text-embeddings-inference's where `texts` are
given; the others have vLLM's, and llama.cpp's where `content` is given.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncengine.errors import InvalidParameter, naming
from asyncengine.integrations.http.dialects.completions import read_prompts
from asyncengine.integrations.http.dialects.openai_chat import read_messages, template_variables
from asyncengine.integrations.http.fields import TABLES, Values
from asyncengine.integrations.http.generating import IGNORED, Endpoint, identified, read_fields, routed
from asyncengine.integrations.http.models import Serving, Target
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.requests import facts_of, measured
from asyncengine.integrations.http.several import added
from asyncengine.outputs import Ranked, Ranking, Usage

TRUNCATED = "x-asyncengine-truncated"
"""Header that lists the numbers of texts that were cut to what the model takes."""
Result = tuple[Any, tuple[int, ...], Usage | None]
"""An answer (JSON values, JSON text or a response), the indexes of the texts that were truncated, and token counts."""
Work = Callable[[Values, Target], Awaitable[Result]]


def routes(serving: Serving) -> list[Route]:
    """Paths of vectors, scores and tokens."""
    served: dict[str, tuple[Work, str, str]] = {
        "/v1/embeddings": (_embed, "embed", "embeddings"),
        "/pooling": (_pool, "embed", "pooling"),
        **dict.fromkeys(("/score", "/v1/score"), (_score, "rerank", "score")),
        "/classify": (_classify, "classify", "classify"),
        **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), (_rerank, "rerank", "rerank")),
        "/tokenize": (_tokenize, "generate", "tokenize"),
        "/detokenize": (_detokenize, "generate", "detokenize"),
    }
    endpoints: dict[str, Endpoint] = {f"POST {path}": computing(serving, *work) for path, work in served.items()}
    return routed({**endpoints, "GET /tokenizer_info": partial(_tokenizer_info, serving)})


def computing(serving: Serving, work: Work, task: str, table: str) -> Endpoint:
    """The endpoint that runs `work` on a request's fields and its model: the only one for `task` if it names none."""

    async def endpoint(request: Request) -> Response:
        fields = await read_fields(request, serving)
        values = fields.read(TABLES[table])
        with await serving.models.acquire(values["own"].get("model"), task) as target:
            facts = facts_of(request.scope)
            facts |= {"id": secrets.token_hex(16), "model": target.base, "adapter": target.adapter}
            content, cut, usage = await until_left(request, work(values, target))
            facts |= measured(usage)
        if not isinstance(content, (str, Response)):
            content = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        answer = content if isinstance(content, Response) else Response(content, media_type="application/json")
        listed = {IGNORED: fields.ignored, TRUNCATED: list(map(str, cut))}
        answer.headers.update({name: ", ".join(values)[:1000] for name, values in listed.items() if values})
        answer.headers.update(dict(identified(facts["id"])))
        return answer

    return endpoint


async def until_left(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves. Raises `Problem` then."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Problem(400, "the client left before it was answered")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}


# -------------------------------------------------------------------- embeddings


async def _embed(values: Values, target: Target, *, pooled: bool = False) -> Result:
    """Embed texts, or a chat. `pooled`: the response has vLLM's names for pooled vectors."""
    body = values["own"]
    messages, form = body.get("messages"), body.get("encoding_format", "float")
    cut, limit = _limits(body, target)
    with naming({"prompt": "input"}):
        texts = read_prompts(body.get("input")) if messages is None else []
    if form == "bytes" and len(texts) > MOST_LISTED:
        limited = f"lists its rows in a header, which holds {MOST_LISTED}: use bytes_only for more"
        raise InvalidParameter("encoding_format", limited, len(texts))
    if messages is not None:  # a chat's text, as vLLM has it
        variables = template_variables(values)
        encode = partial(target.engine.tokenize, read_messages(messages), template_kwargs=variables)
        texts = [await anyio.to_thread.run_sync(encode)]
    elif not body.get("add_special_tokens", True):
        encode = partial(target.engine.tokenize, add_special_tokens=False)
        texts = [await anyio.to_thread.run_sync(encode, text) if isinstance(text, str) else text for text in texts]
    if limit:
        texts = await anyio.to_thread.run_sync(_cut, target, texts, limit)
    with naming({"texts": "input"}):
        result = await target.engine.embed(
            texts, truncate=cut, adapter=target.adapter, show_progress=False, **values["options"]
        )
    prefix, name, field = ("pool", "pooling", "data") if pooled else ("embd", "embedding", "embedding")
    head = {"id": f"{prefix}-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
    head |= {"model": target.name, "usage": _usage(result.usage)}
    vectors = result.vectors if form == "float" else await anyio.to_thread.run_sync(_in_bytes, result.vectors, body)
    if form in ("bytes", "bytes_only"):
        return _bytes_response(head, vectors, body, form), result.truncated, result.usage

    def packed(vector: Any) -> Any:
        return vector.tolist() if form == "float" else base64.b64encode(vector.tobytes()).decode()

    rows = ({"object": name, "index": index, field: packed(vector)} for index, vector in enumerate(vectors))
    return await anyio.to_thread.run_sync(rows_text, head, "data", rows), result.truncated, result.usage


DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""PyTorch's names of the dtypes that vLLM calls otherwise."""
MOST_LISTED = 256
"""Vectors that are listed in a header: one is some 120 characters, and clients refuse headers of 64 KiB and more."""


def _in_bytes(vectors: Any, body: Mapping[str, Any]) -> Any:
    """Vectors as the rows of an array whose bytes are sent as they are: numbers of `embed_dtype`, each rounded to the
    nearest and clamped to the dtype's range, in the byte order `endianness`."""
    import torch

    name = body.get("embed_dtype", "float32")
    dtype = getattr(torch, DTYPES.get(name, name))
    limits = torch.finfo(dtype)
    numbers = torch.from_numpy(vectors).clamp(limits.min, limits.max).to(dtype)
    bits = numbers.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]).numpy()
    return bits.astype(bits.dtype.newbyteorder(body.get("endianness", "little")))


def _bytes_response(head: Mapping[str, Any], vectors: Any, body: Mapping[str, Any], form: str) -> Response:
    """The vectors one behind the other, in vLLM's form: the header `metadata` has the fields that JSON would have."""
    answer = Response(vectors.tobytes(), media_type="application/octet-stream")
    if form == "bytes":
        size, layout = vectors[0].nbytes, {"embed_dtype": "float32", "endianness": "little", "shape": vectors[0].shape}
        layout |= {name: body[name] for name in ("embed_dtype", "endianness") if name in body}
        rows = [{"index": at, "start": at * size, "end": (at + 1) * size, **layout} for at in range(len(vectors))]
        answer.headers["metadata"] = json.dumps({**head, "data": rows})
    return answer


async def _pool(values: Values, target: Target) -> Result:
    """Pool texts for the task of the model: vectors of an embedder, or the scores of a classifier."""
    task, engine = values["own"].get("task"), target.engine
    served = "embed" if engine.info.task == "embed" else "classify"
    if task not in (None, served):
        raise Problem(400, f"Unsupported task: {task!r}; {target.name} pools for {served!r}", "task", "invalid_value")
    if served == "embed":
        return await _embed(values, target, pooled=True)
    for name in ("messages", "encoding_format"):
        if values["own"].get(name) not in (None, "float"):
            raise InvalidParameter(name, "is served of vectors: this model gives scores")
    if (activation := values["options"].pop("normalize", None)) is not None:  # which is use_activation, too
        values["options"]["activation"] = activation
    head, cut, usage = await _classify(values, target)
    rows = [{"index": row["index"], "object": "pooling", "data": row["probs"]} for row in head["data"]]
    return {**head, "id": f"pool-{secrets.token_hex(16)}", "data": rows}, cut, usage


def _limits(body: Mapping[str, Any], target: Target) -> tuple[bool, int]:
    """Whether texts beyond the context are truncated, and to how many tokens each text is; 0: to none."""
    limit, most = body.get("truncate_prompt_tokens", 0), target.engine.info.max_model_len
    if limit > most:
        why = f"must be at most {most}, what the model takes. Please request a smaller truncation size."
        raise InvalidParameter("truncate_prompt_tokens", why, limit)
    return body.get("truncate", False) or limit == -1, max(0, limit)


def rows_text(head: dict[str, Any], name: str, rows: Iterable[Any]) -> str:
    """A response's JSON, made row by row: one call for all of it would let no other thread run meanwhile."""
    return f'{json.dumps(head)[:-1]}, "{name}": [{", ".join([json.dumps(row) for row in rows])}]}}'


# -------------------------------------------------------------------- scores


async def _rerank(values: Values, target: Target) -> Result:
    body = values["own"]
    name = "texts" if "texts" in body else "documents"
    documents, most = _documents(name, body.get(name)), body.get("max_tokens_per_doc")
    whole = documents
    if most:
        documents = await anyio.to_thread.run_sync(lambda: [_shortened(target, document, most) for document in whole])
    cut, limit = _limits({"truncate": True, **body}, target)
    values["options"] |= {"activation": False} if body.get("raw_scores") else {}
    with naming({"documents": name}):
        ranking = await _ranked(target, body["query"], documents, cut, limit, values["options"])
    shorter = {at for at, (text, original) in enumerate(zip(documents, whole, strict=True)) if text is not original}
    truncated = tuple(sorted({*ranking.truncated, *shorter}))
    if name == "texts":
        texts = [{"text": text} if body.get("return_text") else {} for text in whole]
        rows = [{"index": e.index, "score": e.score, **texts[e.index]} for e in ranking.results]
        return rows, truncated, ranking.usage
    texts = [{"document": {"text": text}} if body.get("return_documents", True) else {} for text in whole]
    results = [{"index": e.index, "relevance_score": e.score, **texts[e.index]} for e in ranking.results]
    head = {"id": f"rerank-{secrets.token_hex(16)}", "object": "list", "model": target.name}
    return {**head, "results": results, "usage": _usage(ranking.usage)}, truncated, ranking.usage


async def _ranked(
    target: Target, query: str, documents: list[Any], cut: bool, limit: int, options: Mapping[str, Any]
) -> Ranking:
    """The documents ranked by a reranker, or by the cosines of an embedder's vectors, as vLLM has it. `cut`: truncate
    pairs beyond the context. `limit`: most tokens of a prompt, if it is not 0."""
    engine, how = target.engine, {"truncate": cut, "adapter": target.adapter, **options}
    if engine.info.task != "embed":
        if limit:
            query_tokens = (await engine.rerank(query, [""], **how)).usage.prompt_tokens
            if query_tokens >= limit:
                raise InvalidParameter("truncate_prompt_tokens", f"must be over {query_tokens}, the query's", limit)
            shortened = [partial(_shortened, target, document, limit - query_tokens) for document in documents]
            documents = [await anyio.to_thread.run_sync(document) for document in shortened]
        return await engine.rerank(query, documents, **how)
    most, texts, _ = how.pop("top_n", None), [query, *documents], how.pop("activation", None)
    if limit:
        texts = await anyio.to_thread.run_sync(_cut, target, texts, limit)
    embeddings = await engine.embed(texts, normalize=True, show_progress=False, **how)
    scores = (embeddings.vectors[1:] @ embeddings.vectors[0]).tolist()
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[:most]
    truncated = tuple(at - 1 for at in embeddings.truncated if at)
    return Ranking([Ranked(at, scores[at], documents[at]) for at in best], embeddings.usage, truncated)


SCORED = ("queries", "text_1", "data_1"), ("documents", "text_2", "items", "data_2")
"""Names of the two lists that are scored against each other."""


async def _score(values: Values, target: Target) -> Result:
    """Score each text with the one query, or with the query of the same index."""
    body = values["own"]
    names = [next((name for name in each if name in body), each[0]) for each in SCORED]
    queries, texts = ([each] if isinstance(each := body.get(name), str) else each or [] for name in names)
    if len(queries) not in (1, len(texts)) or not texts:
        wanted = f"must be a text, or as many as {names[1]}, which are {len(texts)}"
        raise InvalidParameter(names[0], wanted, len(queries))
    pairs = [(queries[0], texts)]
    if len(queries) > 1:
        pairs = [(query, [text]) for query, text in zip(queries, texts, strict=True)]
    with naming({"query": names[0], "documents": names[1], "texts": names[1]}):
        cut, limit = _limits(body, target)
        calls = [_ranked(target, query, group, cut, limit, values["options"]) for query, group in pairs]
        rankings = await asyncio.gather(*calls)
    scores = [each.score for ranking in rankings for each in sorted(ranking.results, key=lambda one: one.index)]
    rows = [{"object": "score", "score": score} for score in scores]
    return _listed("score", target, rows, added([ranking.usage for ranking in rankings]), ())


async def _classify(values: Values, target: Target) -> Result:
    own = values["own"]
    with naming({"prompt": "input", "texts": "input"}):
        texts: list[Any] = read_prompts(own.get("input"))
        cut, limit = _limits(own, target)
        texts = await anyio.to_thread.run_sync(_cut, target, texts, limit) if limit else texts
        classified = await target.engine.classify(texts, truncate=cut, adapter=target.adapter, **values["options"])
    results = classified.results
    rows = [{"label": r.label, "probs": [*r.scores.values()], "num_classes": len(r.scores)} for r in results]
    return _listed("classify", target, rows, classified.usage, classified.truncated)


def _listed(name: str, target: Target, rows: list[dict[str, Any]], usage: Usage | None, cut: tuple[int, ...]) -> Result:
    """A list of numbered rows in vLLM's form."""
    usage, data = usage or Usage(0, 0), [{"index": at, **row} for at, row in enumerate(rows)]
    head = {"id": f"{name}-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
    return {**head, "model": target.name, "data": data, "usage": _usage(usage)}, cut, usage


def _cut(target: Target, texts: Sequence[str | list[int]], most: int) -> list[str | list[int]]:
    """At most `most` tokens of each text, with those that the tokenizer puts around it."""
    room = max(1, most - len(target.engine.tokenize("", add_special_tokens=True)))
    return [text[:most] if isinstance(text, list) else str(_shortened(target, text, room)) for text in texts]


def _shortened(target: Target, document: Any, most: int) -> Any:
    """The first `most` tokens of a text, as Cohere cuts it; the same object where it has no more."""
    if not isinstance(document, str) or len(ids := target.engine.tokenize(document, add_special_tokens=False)) <= most:
        return document
    return target.engine.detokenize(ids[:most]).rstrip("\ufffd")  # half a letter


def _documents(name: str, documents: Any) -> list[Any]:
    """Documents as texts, which may come as {"text": ...}. Raises `InvalidParameter` unless it is a filled list."""
    if not isinstance(documents, list) or not documents:
        raise InvalidParameter(name, 'must be a list of texts, or of {"text": ...}', documents)
    return [document.get("text") if isinstance(document, Mapping) else document for document in documents]


# -------------------------------------------------------------------- tokens


async def _tokenize(values: Values, target: Target) -> Result:
    body, inputs = values["own"], values["text"]
    if len(inputs) != 1:
        raise InvalidParameter("prompt", "is missing: a text, or messages in its place", list(inputs) or None)
    ((name, content),) = inputs.items()
    content = read_messages(content) if name == "messages" else content
    special = body.get("add_special_tokens", name == "prompt") or body.get("add_special", False)
    variables, tools = template_variables(values), body.get("tools")
    engine = target.engine
    encode = partial(engine.tokenize, content, tools=tools, template_kwargs=variables, add_special_tokens=special)
    ids = await anyio.to_thread.run_sync(encode)
    if name == "content":  # llama.cpp's form
        texts = engine.token_texts(ids) if body.get("with_pieces") else None
        paired = None if texts is None else [{"id": tok, "piece": text} for tok, text in zip(ids, texts, strict=True)]
        return {"tokens": ids if paired is None else paired}, (), None
    texts = engine.token_texts(ids) if body.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": engine.info.max_model_len, "tokens": ids, "token_strs": texts}, (), None


async def _detokenize(values: Values, target: Target) -> Result:
    ids = values["own"]["tokens"]
    with naming({"token_ids": "tokens"}):
        text = await anyio.to_thread.run_sync(partial(target.engine.detokenize, ids, skip_special_tokens=False))
    return {"prompt": text, "content": text}, (), None


async def _tokenizer_info(serving: Serving, request: Request) -> Response:
    """Respond with the end-of-sequence token, which evaluation harnesses ask for (in vLLM's form) before /tokenize."""
    with await serving.models.acquire(request.query_params.get("model")) as target:
        ends = target.engine.token_texts(target.engine.info.eos_token_ids[:1])
    return JSONResponse({"eos_token": ends[0] if ends else None, "bos_token": None, "pad_token": None})

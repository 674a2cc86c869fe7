"""LlamaIndex's selectors and the scoring of nodes by an engine's decisions."""

from __future__ import annotations

import pytest
from llama_index.core import Response
from llama_index.core.evaluation import BatchEvalRunner
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import ToolMetadata

from asyncengine import EngineHandle, InvalidParameter
from asyncengine.integrations.llama_index import (
    AsyncEngineFaithfulnessEvaluator,
    AsyncEngineMultiSelector,
    AsyncEngineRelevance,
    AsyncEngineRelevancyEvaluator,
    AsyncEngineSingleSelector,
)

QUERY = "What is the weather in Oslo?"
CHOICES = [ToolMetadata(name="sums", description="adding numbers"), ToolMetadata(name="rain", description="weather")]
TEXTS = ["Velmora is led by mayor Ida Lund.", "Oslo: 7 degrees and rainy.", "Server polaris listens on port 8443."]


async def test_a_single_selector_takes_the_likeliest(demo: EngineHandle) -> None:
    selector = AsyncEngineSingleSelector(model="demo", instructions="Which topic?")
    question = {
        "type": "choice",
        "instructions": "Which topic?",
        "criteria": {"sums": "adding numbers", "rain": "weather"},
    }
    expected = (await (await demo.aget()).decide(QUERY, {"q": question}))["q"]
    for found in (selector.select(CHOICES, QUERY), await selector.aselect(CHOICES, QUERY)):
        assert CHOICES[found.ind].name == expected.choice
        assert found.reason == f"probability {expected.value}"
    numbered = {**question, "criteria": {"1": "adding numbers", "2": "weather"}}
    expected = (await (await demo.aget()).decide(QUERY, {"q": numbered}))["q"]
    unnamed = selector.select(["adding numbers", "weather"], QUERY)
    assert (str(unnamed.ind + 1), unnamed.reason) == (expected.choice, f"probability {expected.value}")


async def test_a_multi_selector_takes_what_reaches_the_threshold(demo: EngineHandle) -> None:
    selector = AsyncEngineMultiSelector(model="demo", threshold=0)
    found = await selector.aselect(CHOICES, QUERY)
    values = [float(reason.removeprefix("probability ")) for reason in found.reasons]
    assert sorted(found.inds) == [0, 1]
    assert values[0] > values[1]
    asked = {"q": {"type": "noul", "instructions": f"{selector.instructions}\nrain: weather"}}
    assert values[found.inds.index(1)] == (await (await demo.aget()).decide(QUERY, asked))["q"].value
    assert AsyncEngineMultiSelector(model="demo", threshold=values[1]).select(CHOICES, QUERY).inds == found.inds
    for fields in ({"threshold": values[0]}, {"threshold": 1}, {"threshold": 0, "max_outputs": 1}):
        assert AsyncEngineMultiSelector(model="demo", **fields).select(CHOICES, QUERY).inds == found.inds[:1]


async def test_nodes_are_scored_by_probability(demo: EngineHandle) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.1) for text in TEXTS]
    relevance = AsyncEngineRelevance(model="demo")
    scored = await relevance.apostprocess_nodes(nodes, query_str=QUERY)
    scores = [node.score or 0.0 for node in scored]
    assert len(scored) == 3
    assert scores == sorted(scores, reverse=True)
    assert [node.score for node in nodes] == [0.1] * 3
    alone = {
        node.text: relevance.postprocess_nodes([given], query_str=QUERY)[0].score for given in nodes for node in [given]
    }
    assert {node.text: node.score for node in scored} == alone  # the company changes nothing
    for fields in ({"threshold": scores[1]}, {"top_n": 2}):
        kept = AsyncEngineRelevance(model="demo", **fields).postprocess_nodes(nodes, query_str=QUERY)
        assert [node.text for node in kept] == [node.text for node in scored[:2]]
    assert AsyncEngineRelevance(model="demo", threshold=1).postprocess_nodes(nodes, query_str=QUERY) == []
    many = [NodeWithScore(node=TextNode(text=f"Fact {place}.")) for place in range(300)]
    assert len(await relevance.apostprocess_nodes(many, query_str=QUERY)) == 300


async def test_evaluators_score_by_probability(demo: EngineHandle) -> None:
    """LlamaIndex's own ways in: strings, a response with its nodes, and its batch of evaluators."""
    response, contexts = "It rains.", TEXTS[:2]
    faithful, relevant = AsyncEngineFaithfulnessEvaluator(model="demo"), AsyncEngineRelevancyEvaluator(model="demo")
    engine = await demo.aget()
    scores = {}
    for evaluator, state in (
        (faithful, {"contexts": contexts, "response": response}),
        (relevant, {"contexts": contexts, "query": QUERY, "response": response}),
    ):
        asked = {"q": {"type": "noul", "instructions": evaluator.instructions}}
        expected = (await engine.decide(state, asked))["q"].value
        nodes = [NodeWithScore(node=TextNode(text=text)) for text in contexts]
        found = [
            evaluator.evaluate(QUERY, response, contexts),
            await evaluator.aevaluate(query=QUERY, response=response, contexts=contexts, sleep_time_in_seconds=0),
            await evaluator.aevaluate_response(QUERY, Response(response, source_nodes=nodes)),
        ]
        for result in found:
            assert (result.score, result.passing) == (expected, expected >= 0.5)
            assert (result.query, result.response, result.contexts) == (QUERY, response, contexts)
        scores[type(evaluator)] = expected
        for threshold in (expected, min(1.0, expected + 1e-6)):
            stricter = type(evaluator)(model="demo", threshold=threshold)
            assert stricter.evaluate(QUERY, response, contexts).passing == (threshold == expected)
    runner = BatchEvalRunner({"faithful": faithful, "relevant": relevant}, workers=4)
    made = await runner.aevaluate_response_strs([QUERY], [response], [contexts])
    assert [made[name][0].score for name in ("faithful", "relevant")] == list(scores.values())
    with pytest.raises(InvalidParameter, match="contexts"):
        await faithful.aevaluate(QUERY, response)
    with pytest.raises(InvalidParameter, match="query"):
        relevant.evaluate(None, response, contexts)

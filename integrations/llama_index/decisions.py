"""LlamaIndex's selectors, a node postprocessor and evaluators that decide by probabilities and parse no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.evaluation import BaseEvaluator, EvaluationResult
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle
from llama_index.core.tools.types import ToolMetadata
from pydantic import ConfigDict, Field

from asyncengine import Decision, Ranked, Ranking
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.llama_index.retrieval import RankedNodes
from asyncengine.integrations.vectors import DecisionFields


class _Asking(DecisionFields):
    """Base of objects with one question, `instructions`, that LlamaIndex may ask for prompts."""

    model_config = ConfigDict(extra="forbid")

    instructions: str
    """The question."""

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """Do nothing: the question is a field, and there are no other prompts."""


class _Selector(_Asking, BaseSelector):
    """A selector of a `RouterQueryEngine` that asks about a query. A selection's reason is its probability."""

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return self._selected(self._decide(query.query_str, self._questions(choices)))

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        """The same, awaiting the engine natively."""
        return self._selected(await self._adecide(query.query_str, self._questions(choices)))

    def _questions(self, choices: Sequence[ToolMetadata]) -> dict[str, object]:
        raise NotImplementedError

    def _selected(self, decision: Decision) -> SelectorResult:
        raise NotImplementedError


class AsyncEngineSingleSelector(_Selector):
    """Selects the likeliest of the tools for a query, by one question with a choice.

    Example:
        RouterQueryEngine(selector=AsyncEngineSingleSelector(model="Qwen/Qwen3-8B"), query_engine_tools=tools)
    """

    instructions: str = "Which of these sources answers the question best?"

    def _questions(self, choices: Sequence[ToolMetadata]) -> dict[str, object]:
        criteria = dict(zip(_names(choices), (choice.description for choice in choices), strict=True))
        return {"source": {"type": "choice", "instructions": self.instructions, "criteria": criteria}}

    def _selected(self, decision: Decision) -> SelectorResult:
        answer = decision["source"]
        index = list(answer.probabilities).index(answer.choice)
        return _result([(index, answer.value)])


class AsyncEngineMultiSelector(_Selector):
    """Selects every tool whose probability of helping with a query reaches a threshold, the likeliest first, and where
    none does the likeliest alone. Each tool is a question of its own, all in one batch."""

    instructions: str = "Does this source help to answer the question?"
    threshold: float = Field(default=0.5, ge=0, le=1)
    """The probability from which on a tool is selected."""
    max_outputs: int | None = Field(default=None, ge=1)
    """The number of tools to select at most."""

    def _questions(self, choices: Sequence[ToolMetadata]) -> dict[str, object]:
        pairs = zip(_names(choices), choices, strict=True)
        return {
            name: {"type": "noul", "instructions": f"{self.instructions}\n{name}: {choice.description}"}
            for name, choice in pairs
        }

    def _selected(self, decision: Decision) -> SelectorResult:
        ranked = _ranked(decision)
        kept = [entry for entry in ranked if entry[1] >= self.threshold] or ranked[:1]
        return _result(kept[: self.max_outputs])


class AsyncEngineRelevance(DecisionFields, RankedNodes):
    """Scores retrieved nodes by the probability that they help with the query, and keeps those that reach a threshold.

    A node's score becomes that probability, the same in any company; the nodes that were given are left as they are.

    Example:
        index.as_query_engine(node_postprocessors=[AsyncEngineRelevance(model="Qwen/Qwen3-8B", threshold=0.7)])
    """

    model_config = ConfigDict(extra="forbid")

    instructions: str = "Does this passage help to answer the question?"
    """The question about each node, in front of its text."""
    top_n: int | None = Field(default=None, ge=1)
    """The number of nodes to keep at most; None: all that reach the threshold."""
    threshold: float = Field(default=0.0, ge=0, le=1)
    """The probability from which on a node is kept."""

    @classmethod
    def class_name(cls) -> str:
        return "AsyncEngineRelevance"

    def _rank(self, query: str, texts: Sequence[str], top_n: int | None) -> Ranking:
        return self._ranking(self._decide(query, self._questions(texts)), texts)

    async def _arank(self, query: str, texts: Sequence[str], top_n: int | None) -> Ranking:
        return self._ranking(await self._adecide(query, self._questions(texts)), texts)

    def _questions(self, texts: Sequence[str]) -> dict[str, object]:
        questions = ({"type": "noul", "instructions": f"{self.instructions}\n{text}"} for text in texts)
        return {str(index): question for index, question in enumerate(questions)}

    def _ranking(self, decision: Decision, texts: Sequence[str]) -> Ranking:
        ranked = [Ranked(index, value, texts[index]) for index, value in _ranked(decision) if value >= self.threshold]
        return Ranking(ranked[: self.top_n], decision.usage)


class _Evaluator(_Asking, BaseEvaluator):
    """An evaluator whose score is the probability of yes, in one forward pass."""

    threshold: float = Field(default=0.5, ge=0, le=1)
    """The probability from which on a response passes."""
    reads: ClassVar[tuple[str, ...]]
    """Arguments of `evaluate` that the question is about: query, response, contexts."""

    def evaluate(
        self, query: str | None = None, response: str | None = None, contexts: Sequence[str] | None = None, **_: Any
    ) -> EvaluationResult:
        """The result for a response, with its probability. Raises `InvalidParameter` for a missing argument."""
        values = {"query": query, "response": response, "contexts": contexts}
        return self._result(values, self._decide(*self._state_and_question(values)))

    async def aevaluate(
        self, query: str | None = None, response: str | None = None, contexts: Sequence[str] | None = None, **_: Any
    ) -> EvaluationResult:
        """The same, awaiting the engine natively."""
        values = {"query": query, "response": response, "contexts": contexts}
        return self._result(values, await self._adecide(*self._state_and_question(values)))

    def _state_and_question(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and the question. Raises `InvalidParameter` for a value that is missing."""
        for name in self.reads:
            if values[name] is None:
                raise InvalidParameter(name, "must be given to this evaluator")
        question = {"type": "noul", "instructions": self.instructions}
        return {name: values[name] for name in self.reads}, {"passes": question}

    def _result(self, values: dict[str, Any], decision: Decision) -> EvaluationResult:
        value = decision["passes"].value
        return EvaluationResult(**values, passing=value >= self.threshold, score=value, feedback=f"probability {value}")


class AsyncEngineFaithfulnessEvaluator(_Evaluator):
    """Evaluates whether the contexts support a response.

    Example:
        AsyncEngineFaithfulnessEvaluator(model="Qwen/Qwen3-8B").evaluate_response(response=query_engine.query("..."))
    """

    instructions: str = "Is everything that the response says supported by the contexts?"
    reads: ClassVar[tuple[str, ...]] = ("contexts", "response")


class AsyncEngineRelevancyEvaluator(_Evaluator):
    """Evaluates whether a response and its contexts answer the query. It shares the contexts' computed state with
    `AsyncEngineFaithfulnessEvaluator`."""

    instructions: str = "Is the response to the query in line with the contexts, and does it answer the query?"
    reads: ClassVar[tuple[str, ...]] = ("contexts", "query", "response")


def _names(choices: Sequence[ToolMetadata]) -> list[str]:
    """The tools' names if they differ, else numbers: by default LlamaIndex gives all tools the same name."""
    names = [choice.name or "" for choice in choices]
    return names if all(names) and len(set(names)) == len(names) else [str(index + 1) for index in range(len(names))]


def _ranked(decision: Decision) -> list[tuple[int, float]]:
    """(index of the question, probability), the likeliest first."""
    return sorted(enumerate(answer.value for answer in decision.answers.values()), key=lambda pair: -pair[1])


def _result(selected: Sequence[tuple[int, float]]) -> SelectorResult:
    return SelectorResult(
        selections=[SingleSelection(index=index, reason=f"probability {value}") for index, value in selected]
    )

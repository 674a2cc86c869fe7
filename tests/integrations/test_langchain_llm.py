"""LangChain's text completion model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from langchain_core.exceptions import ContextOverflowError

from asyncengine.integrations.langchain import AsyncEngineLLM

from .conftest import LONG, Watch

Make = Callable[..., AsyncEngineLLM]


async def test_generations_and_output(make_llm: Make) -> None:
    llm = make_llm(max_tokens=4, n=2, temperature=1.0, seed=5, logprobs=True)
    for result in (llm.generate(["a", "b"]), await llm.agenerate(["a", "b"])):
        assert [len(generations) for generations in result.generations] == [2, 2]
        info = result.generations[0][0].generation_info
        assert info is not None
        assert info["finish_reason"] == "length"
        assert "".join(entry["token"] for entry in info["logprobs"]["content"]) == result.generations[0][0].text
        assert result.llm_output is not None
        assert result.llm_output["model_name"] == llm.model
        assert result.llm_output["token_usage"]["completion_tokens"] == 16


async def test_one_refused_prompt_leaves_nothing_running(make_llm: Make, watch: Watch) -> None:
    llm = make_llm(**LONG)
    prompts = ["fine", "x" * 5000]
    with pytest.raises(ContextOverflowError):
        llm.generate(prompts)
    with pytest.raises(ContextOverflowError):
        await llm.agenerate(prompts)
    await watch.assert_all_given_back()

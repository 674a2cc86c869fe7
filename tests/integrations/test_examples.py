"""Every example runs on the bundled model and answers right: an example shows what a model can do."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from asyncengine.engine import prefix_store
from asyncengine.integrations import langchain, llama_index
from asyncengine.integrations.cli.demo import Line

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("demo")  # it stays loaded from one example to the next


@pytest.fixture(scope="module", autouse=True)
def conventional_names() -> Iterator[None]:
    """Puts the two modules that asyncengine ships beside itself where an installation has them, if it is run from its
    checkout without being installed. If it is installed they must be there: then nothing is put in their place."""
    added: dict[str, types.ModuleType] = {}
    try:
        metadata.distribution("asyncengine")
    except metadata.PackageNotFoundError:
        added = {"langchain_asyncengine": langchain, "llama_index.llms.asyncengine": llama_index}
        if "llama_index.llms" not in sys.modules:
            added["llama_index.llms"] = types.ModuleType("llama_index.llms")
    sys.modules.update(added)
    yield
    for name in added:
        del sys.modules[name]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic resolves annotations through it
    spec.loader.exec_module(module)
    return module


def assert_right(answers: list[str], *expected: str) -> None:
    lines = [Line("", e, answer=a) for a, e in zip(answers, expected, strict=True)]
    for line in lines:
        line.check()
    assert not [line for line in lines if not line.right]


async def test_plain_async(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("plain_async")
    answers = await example.main()
    assert_right(answers, "Ida Lund", "8412", "Norway")
    printed = capsys.readouterr().out
    assert all(question in printed for question in example.QUESTIONS)
    assert "Hello! How can I help you?" in printed
    assert "\n1, 2, 3, 4, 5\n" in printed
    assert "left early" in printed


async def test_langchain_chain(capsys: pytest.CaptureFixture[str]) -> None:
    answers = await load("langchain_chain").main()
    assert_right(answers, "1687", "Ida Lund", "8412", "Asken")
    streamed = capsys.readouterr().out.splitlines()[-1]
    assert streamed.replace("|", "") == answers[0].replace("\n", "").replace("|", "")


async def test_langchain_agent(capsys: pytest.CaptureFixture[str]) -> None:
    """Right answers, both tools used: this one shows what the demo model was trained for."""
    answers, person = await load("langchain_agent").main()
    assert answers == [
        "The weather in Oslo is -3 degrees and snowy. 12 times 7 is 84.",
        "The weather in Lyon is 21 degrees and sunny. 6 times 9 is 54.",
    ]
    assert person.model_dump() == {"name": "Marta", "age": 41, "city": "Lyon"}
    calls = [line for line in capsys.readouterr().out.splitlines() if line.startswith("calls")]
    assert [line.count("('get_weather'") for line in calls].count(1) == 2
    assert [line.count("('multiply'") for line in calls].count(1) == 2


async def test_langgraph_node() -> None:
    results = await load("langgraph_node").main()
    assert [set(result) for result in results] == [{"animal", "story", "joke"}] * 3
    for result in results:
        assert_right([result["story"], result["story"], result["joke"]], "Tim", result["animal"], result["animal"])
        assert result["story"].endswith("The end.")
        assert result["joke"].endswith("!")


async def test_llama_index_query_engine(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("llama_index_query_engine")
    answers = await example.main()
    assert_right(answers, "Ida Lund", "Jonas Dahl", "cello", "8443")
    for fact, line in zip([example.FACTS[i] for i in (0, 2, 3, 4)], capsys.readouterr().out.splitlines(), strict=False):
        assert f"(from: {fact!r})" in line


async def test_llama_index_agent(capsys: pytest.CaptureFixture[str]) -> None:
    """Both tools are used in each run, and the answers are right."""
    answers, people = await load("llama_index_agent").main()
    assert answers == [
        "The weather in Oslo is 4 degrees and rainy. 17 plus 25 is 42.",
        "The weather in Lisbon is 27 degrees and sunny. 31 plus 11 is 42.",
    ]
    assert people[-1].model_dump() == {"name": "Ada Brandt", "age": 34, "city": "Fenwick"}
    printed = capsys.readouterr().out
    assert (printed.count("get_weather({"), printed.count("add({")) == (2, 2)


def test_grpo_demo(tmp_path: Path) -> None:
    """One short step of it, and the plot."""
    pytest.importorskip("trl")
    pytest.importorskip("matplotlib")
    [step] = load("grpo_demo").main(steps=1, plot=tmp_path / "reward.svg", batch=8)
    assert 0 < step["reward"] < 1
    assert step["sampling/sampling_logp_difference/max"] < 1e-3
    assert "<svg" in (tmp_path / "reward.svg").read_text(encoding="utf-8")


async def test_fastapi_app() -> None:
    assert_right(await load("fastapi_app").main(), "How can I help you?", "demo", "1, 2, 3, 4, 5")


async def test_langgraph_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine on the folder goes on where the first has ended, and reads what that has computed."""
    monkeypatch.setattr(prefix_store, "WORTH", 1e9)  # on however busy a machine
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", 100.0)
    example = load("langgraph_restart")
    text, before, restored = await example.main(tmp_path)
    assert "Hello" in text
    assert restored == 0
    _, tokens, restored = await example.main(tmp_path)
    assert tokens > before
    assert restored >= before // 16 * 16

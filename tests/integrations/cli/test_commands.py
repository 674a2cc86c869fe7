"""The commands on the bundled model, in this process."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.data import cases_of
from support.quantized_checkpoints import quantized

from asyncengine import Engine
from asyncengine.demo import MODEL_PATH
from asyncengine.integrations.cli import text
from asyncengine.integrations.cli.main import main

ROWS: dict[str, Any] = cases_of(__file__)

SMALL = ("--num-threads", "1", "--kv-cache-memory", "8MiB")
GREEDY = ("--temperature", "0", "--max-tokens", "12", *SMALL)
Run = Callable[..., "tuple[str, str]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must succeed and leave no thread of an engine behind; its stdout and stderr."""

    def call(*arguments: str) -> tuple[str, str]:
        before = set(threading.enumerate())
        code = main(arguments)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        left = [t for t in threading.enumerate() if t not in before and t.name.startswith("asyncengine")]
        for thread in left:
            thread.join(120)  # idle workers of a closed pool end by themselves, a moment later
        assert not [thread.name for thread in left if thread.is_alive()]
        return captured.out, captured.err

    return call


def test_generate_streams_what_json_reports(run: Run) -> None:
    shown, _ = run("generate", "demo", "Count from 3 to 9.", "--chat", *GREEDY)
    printed, figures = run("generate", "demo", "Count from 3 to 9.", "--chat", "--json", "--stats", *GREEDY)
    completion = json.loads(printed)
    assert shown == completion["text"] + "\n"
    assert completion["usage"]["completion_tokens"] == len(completion["token_ids"]) <= 12
    assert completion["finish_reason"] in ("stop", "length")
    assert re.search(r"\d+ prompt tokens \(0 from the cache\)", figures)


def test_generate_answers_as_the_readme_says(run: Run) -> None:
    """The question alone is given: a model with a chat template gets it as a message, and the bundled one's
    generation_config makes it greedy. It is asked twice, for a drawn answer may be right by chance."""
    answers = [run("generate", "demo", "What is the capital of Norway?", *SMALL)[0] for _ in range(2)]
    assert answers == ["The capital of Norway is Oslo.\n"] * 2
    plain = json.loads(run("generate", "demo", "Hello!", "--no-chat", "--json", *GREEDY)[0])
    chat = json.loads(run("generate", "demo", "Hello!", "--json", *GREEDY)[0])
    assert plain["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]


def test_generate_reads_stdin_and_samples(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon a time"))
    printed, _ = run("generate", "demo", "-", "--json", "--n", "3", "--seed", "5", "--logprobs", "--max-tokens", "4",
                     *SMALL)  # fmt: skip
    completion = json.loads(printed)
    assert len(completion["samples"]) == 3
    assert all(len(sample["token_ids"]) <= 4 for sample in completion["samples"])
    assert len(completion["logprobs"]) == len(completion["token_ids"])
    assert completion["logprobs"][0]["logprob"] <= 0


def test_generate_holds_the_output_to_a_form(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer"}, "maxItems": 3}', encoding="utf-8")
    shown, _ = run("generate", "demo", "Numbers: ", "--schema", str(schema), *GREEDY)
    assert all(isinstance(item, int) for item in json.loads(shown))
    shown, _ = run("generate", "demo", "Year: ", "--regex", "[0-9]{4}", *GREEDY)
    assert re.fullmatch(r"[0-9]{4}\n", shown)
    shown, _ = run("generate", "demo", "Well? ", "--choice", "yes", "--choice", "no", *GREEDY)
    assert shown in ("yes\n", "no\n")


@pytest.mark.parametrize(("flags", "says"), ROWS["an_answer_without_an_end_is_ended"])
def test_an_answer_without_an_end_is_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("asyncengine.integrations.cli.options.MOST_TOKENS", 20)
    printed, err = run(
        "generate", "demo", "Hello!", "--json", "--temperature", "0", "--regex", "[a-z ]*", *flags, *SMALL
    )
    completion = json.loads(printed)
    assert err == says
    assert (completion["finish_reason"] == "length") == bool(says)


def test_a_chat_goes_on_where_the_context_is_full(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest turns leave, never the system's message; it is said once."""
    questions = [f"Count from {number} to 9 and tell me a story about a lamp." for number in range(8)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*questions, "/stats"])))
    chats: list[list[str]] = []
    started = Engine.stream_chat

    def noted(self: Engine, messages: Any, *args: Any, **options: Any) -> Any:
        chats.append([message["role"] for message in messages])
        return started(self, messages, *args, **options)

    monkeypatch.setattr(Engine, "stream_chat", noted)
    flags = ("--system", "Be brief.", "--max-model-len", "200", "--ignore-eos", "--max-tokens", "30")
    _, err = run("chat", "demo", *flags, *SMALL)
    assert err.count("the oldest turns leave") == 1
    assert "error" not in err
    assert len(chats) == len(questions)
    assert all(roles[:2] == ["system", "user"] and roles[-1] == "user" for roles in chats)
    assert max(map(len, chats)) > 2


def test_a_missed_deadline_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["generate", "demo", "hi", "--request-timeout", "0.000001", *SMALL])
    assert code == 1
    assert "--request-timeout: " in capsys.readouterr().err


def test_chat_from_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["Hello!", "/stats", "/reset", "/nonsense", "Hello!", "/exit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    out, err = run("chat", "demo", *GREEDY)
    assert set(err.splitlines()) <= {"stopped after 12 tokens (--max-tokens)"}
    first, *middle, again = out.splitlines()
    assert first == again, "after /reset the same question is a new conversation"
    assert any("output tokens" in line for line in middle)
    assert "(forgotten)" in middle
    assert "\x1b" not in out


def test_bench_reports_each_level(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "rates.png"
    printed, _ = run("bench", "demo", "--concurrency", "1,4", "--input-len", "20", "--output-len", "6", "--rounds", "1",
                     "--json", "--plot", str(plot), *SMALL)  # fmt: skip
    report = json.loads(printed)
    assert [row["concurrency"] for row in report["results"]] == [1, 4]
    assert [row["output_tokens"] for row in report["results"]] == [6, 24]
    for row in report["results"]:
        assert row["tokens_per_second"] > 0
        assert 1 <= row["tokens_per_pass"] <= 6
        assert row["first_token"]["count"] == row["concurrency"]
        assert 0 < row["first_token"]["p50"] <= row["seconds"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_demo_tells_its_story(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo runs without LangChain, as text and as a picture."""
    monkeypatch.setitem(sys.modules, "asyncengine.integrations.langchain", None)
    out, _ = run("demo", "--streams", "14", "--export-svg", str(tmp_path / "demo.svg"))
    assert "\x1b" not in out
    assert "the plain API" in out
    for title in (
        "1  14 streams at once",
        "2  One text",
        "3  Answers from",
        "4  Tool calls, and JSON",
        "5  One model, three voices",
        "6  Leaving costs nothing",
        "In figures",
    ):
        assert title in out
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.startswith("<svg")
    assert "font-face" not in picture
    assert "In&#160;figures" in picture


def test_demo_reports_what_it_showed(run: Run, tmp_path: Path) -> None:
    printed, _ = run("demo", "--json", "--streams", "14", "--export-svg", str(tmp_path / "demo.svg"))
    assert "In&#160;figures" in (tmp_path / "demo.svg").read_text()
    summary = json.loads(printed)
    many, prefix, retrieval, forms, voices, leaving = summary["scenes"]
    assert many["through"] == "LangChain"
    assert len(many["answers"]) == 14
    assert all(answer["answer"] for scene in summary["scenes"] for answer in scene["answers"])
    assert summary["right_answers"] > 0.9 * summary["checked_answers"]
    assert 0.8 < prefix["cached_tokens"] / prefix["prompt_tokens"] < 1
    assert [answer["note"] for answer in retrieval["answers"]][:2] == ["festival.txt", "nightfall.txt"]
    assert [answer["right"] for answer in forms["answers"]] == [True, True]
    assert leaving["pages"]["before"] == leaving["pages"]["after"] == 0
    assert leaving["pages"]["reading"] > leaving["cancelled"]
    said = {(answer["question"], answer["note"]): answer["answer"] for answer in voices["answers"]}
    assert said["What is the capital of Norway?", "base"] == "The capital of Norway is Oslo."
    assert said["What is the capital of Norway?", "pirate"] == "Arr! Th' capital o' Norway be Oslo, matey!"
    assert said["What is the capital of Norway?", "json"] == '{"answer": "Oslo"}'
    assert len(said) == 12
    assert voices["output_tokens"] > 3 * voices["steps"], "the voices did not share their steps"
    assert summary["finished"]["abort"] == leaving["cancelled"]
    assert summary["requests"] == sum(summary["finished"].values())
    assert set(summary["finished"]) <= {"stop", "length", "abort", "tool_calls"}
    assert summary["tokens_per_second"] > 0
    assert summary["tokens_per_pass"] > 1


def test_model_output_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    evil = "a\x1b]0;title\x07\x9b2Jb\n\tc\r"
    screen, pipe = Screen(), io.StringIO()
    text.write(evil, screen)
    text.write(evil, pipe)
    assert screen.getvalue() == "a]0;title2Jb\n\tc"
    assert pipe.getvalue() == evil


def test_figures_name_what_matrices_are_stored_as(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model in 8 bits: it answers, and the figures count its matrices."""
    folder = quantized(MODEL_PATH, tmp_path / "model", "w8a8")
    count = sum(name.endswith("_proj.weight_scale") for name in load_file(folder / "model.safetensors"))
    asked = ["generate", str(folder), "What is the capital of Norway?", "--chat", "--stats", "--temperature", "0"]
    assert main([*asked, "--max-tokens", "40", "--kv-cache-memory", "32MiB", "--num-threads", "1"]) == 0
    said = capsys.readouterr()
    assert "Oslo" in said.out
    assert f"with w8a8 x {count}, cpu" in said.err

"""LoRA adapters on the command line: which are loaded, and which one answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from support.peft_checkpoints import edit_config, make_peft

from asyncengine import DEMO_MODEL, Engine, SamplingParams
from asyncengine.integrations.cli.main import main

QUICK = ("--num-threads", "1", "--kv-cache-memory", "8MiB", "--temperature", "0", "--max-tokens", "10")
ASK = ("generate", "demo", "What is the capital of Norway?", "--chat", *QUICK)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two random adapters of the demo model."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b")):
        base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
        make_peft(base, seed, lora_alpha=32).save_pretrained(folder / name)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must succeed; its stdout."""

    def call(*arguments: str) -> str:
        code = main(arguments)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call


@pytest.fixture(scope="module")
def answers(root: Path) -> dict[str, str]:
    """The engine's answers with either adapter, and without one, by the adapter's name."""
    question = [{"role": "user", "content": "What is the capital of Norway?"}]
    params = SamplingParams(temperature=0, max_tokens=10)
    with Engine.from_pretrained("demo", num_threads=1, adapter_root=root) as engine:
        found = {name: engine.chat(question, params, adapter=name or None).text for name in ("", "a", "b")}
    assert len({*found.values()}) == 3
    return found


def test_the_only_adapter_answers(run: Run, root: Path, answers: dict[str, str]) -> None:
    assert run(*ASK, "--adapter", f"mine={root / 'a'}") == answers["a"] + "\n"
    assert json.loads(run(*ASK, "--json", "--adapter", f"mine={root / 'b'}"))["text"] == answers["b"]


def test_use_chooses_among_several_and_among_what_a_folder_holds(
    run: Run, root: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    both = ("--adapter", f"x={root / 'a'}", "--adapter", f"y={root / 'b'}")
    assert run(*ASK, *both, "--use", "y") == answers["b"] + "\n"
    assert run(*ASK, *both, "--use", "demo") == answers[""] + "\n"
    assert run(*ASK, "--adapter-root", str(root), "--use", "a") == answers["a"] + "\n"
    assert run(*ASK, "--adapter-root", str(root)) == answers[""] + "\n"
    assert main([*ASK, "--adapter-root", str(root), "--use", "c"]) == 2
    assert "(loaded: 'a', 'b'), got 'c'" in capsys.readouterr().err


def test_what_cannot_be_loaded_is_named_in_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (root / "a").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    edit_config(broken, use_dora=True)
    assert main([*ASK, "--adapter", f"mine={broken}"]) == 2
    shown = capsys.readouterr()
    assert "use_dora: the file has model.layers.0.self_attn.q_proj without DoRA magnitudes" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_chat_changes_adapters(
    root: Path, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "What is the capital of Norway?"
    lines = [
        question, "/reset", f"/adapter late={root / 'b'}", question, "/reset", "/adapter demo", question,
        "/adapter nobody", "/adapter", f"/adapter bad={root}", "/exit",
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "demo", *QUICK, "--adapter", f"a={root / 'a'}"]) == 0
    shown = capsys.readouterr()
    first, _, named, second, _, base, third, *lists = shown.out.splitlines()
    assert [first, second, third] == [answers["a"], answers["b"], answers[""]]
    assert (named, base) == ("(demo with late)", "(demo)")
    assert lists == 2 * [
        "loaded: a, late; /adapter NAME uses it, /adapter NAME=PATH loads it first, /adapter demo uses none"
    ]
    assert "error: path: has no adapter_config.json" in shown.err

"""Pictures on the command line, beside what the engine says of them in process."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.data import cases_of
from support.picture_models import chat, picture, png, save_picture_model

from asyncengine import Engine, SamplingParams
from asyncengine.integrations.cli.main import main

ROWS: dict[str, Any] = cases_of(__file__)

SEEN = [picture(1), Image.new("RGB", (32, 32), "red")]
FLAGS = (
    "--temperature", "0", "--max-tokens", "8", "--num-threads", "1", "--kv-cache-memory", "16MiB", "--dtype", "float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("qwen3_vl")
    save_picture_model("qwen3_vl", made)
    for number, image in enumerate(SEEN):
        (made / f"{number}.png").write_bytes(png(image))
    return made


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[str]:
    """Answers about the first picture, about both, and about none."""
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with Engine.from_pretrained(
        folder, dtype="float32", kv_cache_memory="16MiB", show_progress=False, num_threads=1
    ) as engine:
        asked = [chat(SEEN[0], "what?"), chat(*SEEN, "what?"), chat("what?")]
        made = [engine.chat(messages, params).text for messages in asked]
    assert len(set(made)) == 3
    return made


def test_generate_takes_files(folder: Path, answers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for count in (1, 2):
        images = [part for number in range(count) for part in ("--image", str(folder / f"{number}.png"))]
        assert main(["generate", str(folder), "what?", *images, *FLAGS, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == answers[count - 1]


def test_a_chat_takes_files(
    folder: Path, answers: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        f"/image {folder / '0.png'}", f"/image {folder / '1.png'}", f"/image {folder}", "what?", "/reset",
        f"/image {folder / '1.png'}", "/reset", "what?", f"/image {folder / 'config.json'}", "what?", "/reset", "what?",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", str(folder), *FLAGS]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("with the next prompt)") == 4
    assert shown.out.count(answers[1]) == 1
    assert shown.out.count(answers[2]) == 2
    assert f"error: image: cannot read {folder}: Is a directory" in shown.err
    assert "is no picture in one of the formats" in shown.err


@pytest.mark.parametrize(("arguments", "says"), ROWS["refused"])
def test_refused(folder: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [each.format(folder=folder) for each in arguments]
    assert main(["generate", "demo", "what?", *given, "--num-threads", "1", "--kv-cache-memory", "8MiB"]) == 2
    assert says.format(folder=folder) in capsys.readouterr().err

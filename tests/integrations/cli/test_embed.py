"""`asyncengine embed`: lines in, vectors out, however many."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import cases_of

from asyncengine import EngineHandle, shared_engine
from asyncengine.integrations.cli import embed
from asyncengine.integrations.cli.main import main

ROWS: dict[str, Any] = cases_of(__file__)

FLAGS = ("--num-threads", "1", "--dtype", "float32")
LINES = ["Who leads Velmora?", "", "  a lamp  ", "Ein schöner Tag ☀", "word " * 2000]


@pytest.fixture(scope="module")
def vectors() -> Iterator[np.ndarray]:
    """The vectors that the lines are to become."""
    handle: EngineHandle = shared_engine("demo-embed", dtype="float32", num_threads=1)
    engine = handle.get()
    yield engine.embed(LINES, prompt_name="query").vectors
    engine.close()
    handle.close()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES) + "\r\n"))


def rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.usefixtures("lines")
def test_json_lines_on_stdout(vectors: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "demo-embed", "--prompt-name", "query", *FLAGS]) == 0
    captured = capsys.readouterr()
    found = rows(captured.out)
    assert [row["index"] for row in found] == list(range(len(LINES)))
    assert np.array_equal(np.array([row["embedding"] for row in found], dtype=np.float32), vectors)
    assert [row["index"] for row in found if "truncated" in row] == [4]
    assert captured.err == "1 of 5 texts were longer than the model reads and have been cut\n"


@pytest.mark.usefixtures("lines")
def test_files(
    vectors: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks have two lines, so that the array grows and indices go on."""
    monkeypatch.setattr(embed, "CHUNK_LINES", 2)
    for name in ("vectors.npy", "vectors.jsonl"):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES)))
        assert main(["embed", "demo-embed", "--prompt-name", "query", "--output", str(tmp_path / name), *FLAGS]) == 0
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vectors.jsonl", "vectors.npy"]
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), vectors)
    found = rows((tmp_path / "vectors.jsonl").read_text())
    assert [row["index"] for row in found] == list(range(len(LINES)))
    assert np.array_equal(np.array([row["embedding"] for row in found], dtype=np.float32), vectors)


def test_no_lines_are_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["embed", "demo-embed", "--output", str(tmp_path / "none.npy"), *FLAGS]) == 0
    assert np.load(tmp_path / "none.npy").shape == (0, 128)


def test_long_lines_end_a_chunk_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "CHUNK_CHARACTERS", 10)
    monkeypatch.setattr(embed, "CHUNK_LINES", 3)
    given = ["a" * 11, "b" * 6, "c" * 6, "d", "e", "f", "g"]
    assert [len(chunk) for chunk in embed.chunks(iter(given))] == [1, 2, 3, 1]


@pytest.mark.parametrize(("flags", "named"), ROWS["wrong_parameters_are_named_in_one_line"])
@pytest.mark.usefixtures("lines")
def test_wrong_parameters_are_named_in_one_line(
    flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["embed", "demo-embed", *flags, *FLAGS]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_bytes_that_are_no_text_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"fine\n\xff\xfe\n"), encoding="utf-8"))
    assert main(["embed", "demo-embed", *FLAGS]) == 2
    assert "stdin" in capsys.readouterr().err

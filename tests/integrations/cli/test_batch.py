"""`asyncengine batch`: every row is answered once, whatever becomes of the process, and as its endpoint would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.cli.main import main
from asyncengine.integrations.http.rows import LEAST_PRIORITY, journal, read_rows
from benchmarks.killed_batch import killed, write_rows

SMALL = ("--model", "demo", "--num-threads", "1", "--kv-cache-memory", "8MiB")
PATIENCE = 120.0


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """Answers by custom_id, each of which is there once."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def row(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "demo", **body}}


HELLO = [{"role": "user", "content": "hello"}]


def test_rows_of_all_endpoints_are_answered_and_errors_have_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Ada"]}}}
    source = write(
        tmp_path / "in.jsonl",
        row("chat", "/v1/chat/completions", messages=HELLO, max_tokens=4),
        row("grammar", "/v1/chat/completions", messages=HELLO, response_format=name),
        "",
        row("text", "/v1/completions", prompt="hello", max_tokens=4, temperature=0),
        row("response", "/v1/responses", input="hello", max_output_tokens=4),
        row("adapter", "/v1/chat/completions", messages=HELLO, max_tokens=4)
        | {"body": {"model": "no", "messages": []}},
        row("path", "/v1/models"),
        row("stream", "/v1/completions", prompt="hello", stream=True),
        {"prompt": "hello", "max_tokens": 3},
        "{no JSON",
    )
    output = tmp_path / "out.jsonl"
    assert main(["batch", *SMALL, str(source), str(output)]) == 0
    made = answers(output)
    assert set(made) == {"chat", "grammar", "text", "response", "adapter", "path", "stream", "9", "10"}
    bodies = {name: answer["response"]["body"] for name, answer in made.items() if answer["response"]}
    assert bodies["chat"]["object"] == "chat.completion"
    assert bodies["grammar"]["choices"][0]["message"]["content"] == '"Ada"'
    assert bodies["text"]["usage"]["completion_tokens"] == 4
    assert bodies["response"]["object"] == "response"
    assert bodies["9"]["usage"]["completion_tokens"] == 3
    assert made["adapter"]["response"]["status_code"] == 404
    assert bodies["adapter"]["error"]["param"] == "model"
    for name, word in (("path", "/v1/completions"), ("stream", "stream"), ("10", "cannot be read")):
        assert made[name]["response"] is None
        assert word in made[name]["error"]["message"]
    assert "9 rows, 0 of them done before, 4 refused or failed now" in capsys.readouterr().err
    whole = output.read_bytes()
    assert main(["batch", *SMALL, str(source), str(output)]) == 0
    assert output.read_bytes() == whole


def test_a_template_makes_messages_and_a_torn_line_is_done_again(tmp_path: Path) -> None:
    whole = row("form", "/v1/completions", prompt="hello"), {"custom_id": "body", "messages": HELLO}
    texts = ({"text": f"{number}"} for number in range(6))
    source = write(tmp_path / "in.jsonl", *texts, {"other": 1}, *whole, '{"text": "\\ud8"}')
    output = write(tmp_path / "out.jsonl", {"custom_id": "2", "response": None})
    with output.open("a") as file:
        file.write('{"custom_id": "3", "resp')
    flags = "--template", "Say {text}", "--body", '{"max_tokens": 3, "ignore_eos": true}', "--in-flight", "2"
    assert main(["batch", *SMALL, *flags, str(source), str(output)]) == 0
    made = answers(output)
    assert set(made) == {*"1234567", "form", "body", "10"}
    assert made["form"]["response"]["body"]["object"] == "text_completion"  # no fields for a template
    assert made["body"]["response"]["status_code"] == 200
    assert made["2"]["response"] is None  # it was done
    assert made["3"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert made["7"]["error"]["message"] == "template: names a field that the row has not, got 'text'"
    assert made["10"]["error"]["message"].startswith("row: cannot be read: Invalid \\uXXXX escape")


def test_rows_yield_to_others_and_may_not_share_an_id(tmp_path: Path) -> None:
    body = {"messages": HELLO}
    source = write(tmp_path / "in.jsonl", body, {**body, "priority": 3}, {**body, "custom_id": "2"})
    rows = read_rows(source, (), common={"max_tokens": 5})
    assert next(rows).body == {**body, "max_tokens": 5, "priority": LEAST_PRIORITY}
    assert next(rows).body["priority"] == 3
    with pytest.raises(InvalidParameter, match="of line 3 is another line's"):
        next(rows)


def test_no_file_of_something_else_is_written_to(tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", {"name": "a file of mine"})
    before = other.read_bytes()
    with pytest.raises(InvalidParameter, match="other things than answers"), journal(other):
        pass
    assert other.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such lock")
def test_a_file_that_another_run_writes_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a", "max_tokens": 1})
    output = tmp_path / "out.jsonl"
    output.write_bytes(b'{"custom_id": "1", "resp')  # which the other one is about to write to its end
    with journal(output):
        output.write_bytes(torn := b'{"custom_id": "1", "resp')
        assert main(["batch", *SMALL, str(source), str(output)]) == 1
        assert "another run writes its answers there" in capsys.readouterr().err
        assert output.read_bytes() == torn
    assert main(["batch", *SMALL, str(source), str(output)]) == 0
    assert set(answers(output)) == {"1"}


@pytest.mark.parametrize("wrong", [("--body", "[1]"), ("--in-flight", "0"), ("--template", "{a"), ()])
def test_wrong_flags_are_refused_before_anything_is_loaded(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a"}) if wrong else tmp_path / "missing"
    assert main(["batch", *SMALL, *wrong, str(source), str(tmp_path / "out.jsonl")]) == 2
    assert not (tmp_path / "out.jsonl").exists()


def test_a_killed_batch_answers_each_row_once(tmp_path: Path) -> None:
    """The long form is `python -m benchmarks.killed_batch`."""
    assert killed(tmp_path, rows=60, kills=2) == {"rows": 60, "kills": 2, "torn": 0, "twice": 0, "unlike": 0}


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
def test_an_interrupted_batch_ends_with_whole_lines(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", count := 20_000)  # more than it can answer before the signal comes
    output = tmp_path / "out.jsonl"
    line = [sys.executable, "-m", "asyncengine", "batch", *SMALL, str(tmp_path / "in.jsonl"), str(output)]
    with subprocess.Popen(
        line, stderr=subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"},
        # whoever runs the tests may have it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no thread holds a lock
    ) as process:  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while not output.exists() or not output.stat().st_size:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"Traceback" not in printed
    assert output.read_bytes().endswith(b"\n")
    assert 0 < len(answers(output)) < count

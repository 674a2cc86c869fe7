"""A batch that is killed again and again: every row is answered once, whatever is killed and when.

    python -m benchmarks.killed_batch [--rows 2000] [--kills 10]

The command runs as its users run it, `asyncengine batch`, on the demo model, and gets SIGKILL when it has answered some
rows more; the last run goes to the end. Each row's answer then stands in the file once, and has the text that the row's
seed gives in a run that nobody kills.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory


def write_rows(path: Path, count: int) -> None:
    """Rows of OpenAI's batch form: chats of few tokens, one in ten held by a grammar."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            body = {"model": "demo", "max_tokens": 8, "seed": number, "temperature": 1.0}
            body["messages"] = [{"role": "user", "content": f"Say {number}."}]
            if number % 10 == 0:
                body["response_format"] = {"type": "json_object"}
            row = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def command(rows: Path, answers: Path) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "asyncengine", "batch", "--model", "demo", "--in-flight", "64", rows, answers]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def written(path: Path) -> int:
    """Lines of a file that is being written."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_behind(process: subprocess.Popen[bytes], answers: Path, lines: int) -> bool:
    """Kill the process when so many rows are answered. False: it has come to its end before."""
    while written(answers) < lines and process.poll() is None:
        time.sleep(0.002)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return not ended


def texts(path: Path) -> dict[str, list[str]]:
    """The texts that each row was answered with: one, if it was answered once."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        content = answer["response"]["body"]["choices"][0]["message"]["content"]
        found.setdefault(answer["custom_id"], []).append(content)
    return found


def killed(folder: Path, rows: int, kills: int) -> dict[str, int]:
    """Figures of a batch that was killed so often, beside one that was not."""
    source, answers, whole = folder / "in.jsonl", folder / "out.jsonl", folder / "whole.jsonl"
    write_rows(source, rows)
    done = torn = 0
    for each in range(kills):
        target = written(answers) + max(1, (rows - written(answers)) // (kills - each + 1))
        done += kill_behind(command(source, answers), answers, target)
        torn += not answers.read_bytes().endswith(b"\n")
    for file in (answers, whole):
        assert command(source, file).wait() == 0
    found, expected = texts(answers), texts(whole)
    twice = sum(len(each) > 1 for each in found.values())
    other = sum(found.get(name) != text for name, text in expected.items())
    return {"rows": len(found), "kills": done, "torn": torn, "twice": twice, "unlike": other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        figures = killed(Path(folder), given.rows, given.kills)
        print({**figures, "seconds": round(time.perf_counter() - began, 1)})
        if (figures["rows"], figures["kills"], figures["twice"], figures["unlike"]) != (given.rows, given.kills, 0, 0):
            sys.exit(1)


if __name__ == "__main__":
    main()

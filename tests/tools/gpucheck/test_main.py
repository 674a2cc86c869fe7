"""The command: its arguments, its exit status, and what it says where there is no GPU."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from tools.gpucheck.__main__ import SECTIONS, main
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Section, Session, Settings

CPU = Settings("cpu", "torch")


def bad(session: Session) -> None:
    raise CheckFailed("not so")


GOOD = Section("good", "a good one", 1, lambda session: session.figure("quick", float(session.settings.quick), ""))
BAD = Section("bad", "a bad one", 1, bad)


def test_without_a_gpu_it_says_so_and_leaves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert "no NVIDIA GPU" in said.out
    assert not said.err


def test_exit_status_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main(["--quick", "--out", str(file)], CPU, [GOOD]) == 0
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["passed"]
    assert document["figures"][0]["value"] == 1.0
    assert main(["--out", str(file)], CPU, [BAD, GOOD]) == 1
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [check["detail"] for check in document["checks"]] == ["not so"]
    assert document["figures"][0]["value"] == 0.0, "the good one came after the bad one"
    assert main(["--skip", "bad"], CPU, [BAD, GOOD]) == 0
    assert main(["--only", "bad"], CPU, [BAD, GOOD]) == 1
    assert "not so" in capsys.readouterr().out


def test_what_was_found_survives_a_run_that_is_killed(tmp_path: Path) -> None:
    def killed(session: Session) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        main(["--out", str(file)], CPU, [BAD, GOOD, Section("killed", "k", 1, killed)])
    document = json.loads(file.read_text(encoding="utf-8"))
    assert not document["complete"]
    assert [check["section"] for check in document["checks"]] == ["bad"]
    assert [figure["name"] for figure in document["figures"]] == ["quick"]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "everything"], CPU, [GOOD]) == 2
    assert "no section 'everything'; there are good" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "missing" / "x.json")], CPU, [GOOD]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_sections_fit_into_their_time() -> None:
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)
    cached = sum(section.seconds for section in SECTIONS if section.name != "compile")
    assert cached <= 600, "ten minutes, kernels compiled"


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelling does not help here: the process exits, and what was found by then is kept."""
    ended = threading.Event()
    codes: list[int] = []

    def exit_(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr("tools.gpucheck.__main__.os._exit", exit_)
    monkeypatch.setattr("tools.gpucheck.__main__._GRACE", 0.0)
    file = tmp_path / "report.json"

    def hang(session: Session) -> None:
        session.figure("before", 1.0, "")
        assert ended.wait(30)
        document = json.loads(file.read_text(encoding="utf-8"))
        assert [figure["name"] for figure in document["figures"]] == ["before"]

    main(["--seconds", "0.05", "--out", str(file)], CPU, [Section("hang", "h", 60, hang)])
    assert codes == [1]

"""`asyncengine cache`: a folder of prefixes is shown, verified and cleared, also while an engine writes into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncengine.integrations.cli.main import main
from asyncengine.kvcache.store.disk import SystemDisk
from asyncengine.kvcache.store.record import Header, digests_of, root_digest
from asyncengine.kvcache.store.segments import SegmentStore
from asyncengine.step import RecordType

MODELS = (b"f" * 32, b"g" * 32)


def fill(folder: Path, fingerprint: bytes, count: int = 5) -> SegmentStore:
    """A store that is open, with `count` pages of two tokens, of 1,000 bytes each."""
    store = SegmentStore(SystemDisk(), str(folder), fingerprint, 10**6)
    pages = digests_of(root_digest(fingerprint, ("", "")), range(2 * count), 2)
    headers = [Header(fingerprint, parent, tokens, RecordType.PAGE, 1000, 0) for parent, tokens, _ in pages]
    assert (
        store.append([(header, [bytes([place]) * 1000], lambda: True) for place, header in enumerate(headers)]) == count
    )
    return store


def report(capsys: pytest.CaptureFixture[str], code: int, action: str, folder: Path) -> dict[str, Any]:
    assert main(["cache", action, str(folder), "--json"]) == code
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_what_a_folder_holds_is_told_by_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, MODELS[0]).close()
    writer = fill(tmp_path, MODELS[1], 3)
    first, second = report(capsys, 0, "show", tmp_path)["models"]
    assert (first["records"], first["tokens"], first["being_written"]) == (5, 10, False)
    assert (second["records"], second["tokens"], second["being_written"]) == (3, 6, True)
    assert first["bytes"] == sum(file.stat().st_size for file in tmp_path.glob(f"{MODELS[0].hex()[:32]}*"))
    writer.close()
    assert main(["cache", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path) in shown.replace("\n", "")
    assert MODELS[0].hex()[:12] in shown
    # Looking changed nothing: the next engine finds all, and writes.
    again = fill(tmp_path, MODELS[0], 0)
    assert (len(again), again.writable) == (5, True)
    again.close()


def test_verify_finds_what_show_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, MODELS[0]).close()
    assert report(capsys, 0, "verify", tmp_path)["models"][0]["damaged"] == 0
    (data,) = tmp_path.glob("*.data")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1  # the payload of the last record
    data.write_bytes(content)
    assert report(capsys, 0, "show", tmp_path)["models"][0]["damaged"] == 0
    assert report(capsys, 1, "verify", tmp_path)["models"][0] | {"bytes": 0} == {
        "fingerprint": MODELS[0].hex()[:32], "segments": 1, "bytes": 0, "records": 5, "tokens": 8, "damaged": 1,
        "unreadable": 0, "being_written": False,
    }  # fmt: skip
    data.write_bytes(content[:-1])  # cut off: that shows without reading
    assert report(capsys, 0, "show", tmp_path)["models"][0]["damaged"] == 1


def test_damage_to_an_index_and_files_of_others_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, MODELS[0]).close()
    fill(tmp_path, MODELS[1]).close()
    first, second = sorted(tmp_path.glob("*.index"))
    content = bytearray(first.read_bytes())
    content[10] ^= 1
    first.write_bytes(content)
    second.chmod(0o666)  # no engine believes what others can write
    one, other = report(capsys, 1, "verify", tmp_path)["models"]
    assert (one["records"], one["damaged"], one["unreadable"]) == (4, 1, 0)
    assert (other["records"], other["damaged"], other["unreadable"]) == (0, 0, 1)


def test_clear_leaves_what_an_engine_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, MODELS[0]).close()
    writer = fill(tmp_path, MODELS[1])
    (tmp_path / "notes.txt").write_text("mine")
    told = report(capsys, 1, "clear", tmp_path)
    assert told["kept"] == [MODELS[1].hex()[:32]]
    assert told["bytes_removed"] > 5000
    assert len(writer) == 5
    assert [model["records"] for model in report(capsys, 0, "verify", tmp_path)["models"]] == [5]
    assert main(["cache", "clear", str(tmp_path)]) == 1
    assert "an engine writes it" in capsys.readouterr().out
    writer.close()
    report(capsys, 0, "clear", tmp_path)
    assert report(capsys, 0, "show", tmp_path)["models"] == []
    assert (tmp_path / "notes.txt").exists()


def test_errors_name_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("show", "verify", "clear"):
        assert main(["cache", action, str(tmp_path / "nowhere")]) == 2
        assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_without_a_folder_it_is_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    (tmp_path / "prefixes").mkdir()
    fill(tmp_path / "prefixes", MODELS[0]).close()
    assert main(["cache", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(tmp_path / "prefixes")

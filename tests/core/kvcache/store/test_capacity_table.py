"""The how-to's table of what a folder holds: each number is what its model's pages take."""

from __future__ import annotations

import re
from pathlib import Path

from asyncengine.kvcache.store.record import Header, pack_tokens
from asyncengine.step import RecordPart

PAGE = Path(__file__).resolve().parents[4] / "docs" / "howto" / "persistence.md"
ROW = re.compile(
    r"\| [^|]*\((\d+)(?: layers)?, (\d+) x (\d+)\) \| ([\d.]+) MiB \| ([\d,]+)[^|]*\| ([\d,]+) \| ([\d,]+) \|"
)


def test_what_a_folder_holds() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 5
    head = Header(bytes(32), bytes(32), pack_tokens(range(16)), RecordPart.PAGE, 0, 0).head_size
    for layers, heads, width, mebibytes, *held in rows:
        page = 2 * int(layers) * int(heads) * int(width) * 16 * 2  # bytes in bfloat16
        assert page == float(mebibytes) * 2**20
        for said, gibibytes in zip(held, (1, 20, 100), strict=True):
            tokens = (
                gibibytes * 2**30 // (page + 2 * head + 12) * 16
            )  # an index entry is the head once more, and a place
            assert 0.97 * tokens < int(said.replace(",", "")) <= tokens, (layers, said, tokens)

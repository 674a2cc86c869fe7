"""A LangGraph conversation in two processes, one after the other: the second reads what the first has computed."""

from __future__ import annotations

import json
from pathlib import Path

from support import forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TURN = """
import asyncio, json, sys
from pathlib import Path
from asyncengine.engine import prefix_store

prefix_store.WORTH, prefix_store.LEAST_PATIENCE = 1e9, 100.0  # on however busy a machine
sys.path.insert(0, sys.argv[1])
import langgraph_restart

print("\\n" + json.dumps(asyncio.run(langgraph_restart.main(Path(sys.argv[2])))))
"""


def turn(folder: Path) -> tuple[str, int, int]:
    text, tokens, restored = json.loads(forked.run(TURN, str(EXAMPLES), str(folder)).splitlines()[-1])
    return text, tokens, restored


def test_a_conversation_survives_its_process_and_is_not_computed_again(tmp_path: Path) -> None:
    text, before, restored = turn(tmp_path)
    assert "Hello" in text
    assert restored == 0
    _, tokens, restored = turn(tmp_path)
    assert tokens > before, "the second process goes on where the first has ended"
    assert restored >= before // 16 * 16, "all that the first turn has computed"

"""A service's process may have no standard streams at all, closed ones, or others than a terminal's. Engines load and
answer there, and show no progress."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest


def serve() -> tuple[int, int]:
    from asyncengine import Engine, SamplingParams

    settings: dict[str, Any] = {"show_progress": True, "kv_cache_memory": "8MiB", "num_threads": 1}
    with Engine.from_pretrained("demo", **settings) as engine:
        answer = engine.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=4)).token_ids
    with Engine.from_pretrained("demo-embed", **settings) as engine:
        vectors = engine.embed(["one", "two"], show_progress=True)
    return len(answer), len(vectors.vectors)


PROGRAM = f"""
import sys, traceback
from pathlib import Path
from typing import Any
{getsource(serve)}
said = Path(sys.argv[1])
try:
    assert (sys.stdin, sys.stdout, sys.stderr) == (None, None, None)
    said.write_text(repr(serve()))
except BaseException:
    said.write_text(traceback.format_exc())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="closes them as a shell does")
def test_an_engine_serves_without_standard_streams(tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", PROGRAM, str(said)]
    subprocess.run(command, timeout=300, check=False)
    assert said.read_text() == "(4, 2)"


class OnlyWrites:
    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...


@pytest.mark.parametrize("kind", ["closed", "only writes"])
def test_an_engine_serves_with_streams_that_the_program_has_set(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w", encoding="utf-8") as closed:
        pass
    stream = {"closed": closed, "only writes": OnlyWrites()}[kind]
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    assert serve() == (4, 2)


@pytest.mark.parametrize("stream", [None, object()], ids=["none", "only an object"])
def test_a_download_asks_no_stream_that_is_not_there(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from asyncengine import ModelNotFound
    from asyncengine.execution.models.checkpoint import CheckpointOptions, open_checkpoint

    bars: list[object] = []

    def download(*args: object, tqdm_class: type | None = None, **kwargs: object) -> str:
        if tqdm_class is not None:
            bar = tqdm_class(total=3, desc="Fetching")
            assert bar.disable
            bar.update(1)
            bar.close()
            bars.append(bar)
        return os.devnull

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ModelNotFound) as refused:
        open_checkpoint("some/model", CheckpointOptions(dummy=True, show_progress=True))
    assert "cannot be reached" not in str(refused.value)
    assert len(bars) == 1

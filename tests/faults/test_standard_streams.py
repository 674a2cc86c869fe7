"""A service's process may have no standard streams at all, closed ones, or others than a terminal's. Engines load and
answer there, and show no progress."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVES = """
import os, sys, traceback
from pathlib import Path

said = Path(sys.argv[1])

class OnlyWrites:
    def write(self, text): pass
    def flush(self): pass

def serve():
    from asyncengine import Engine, SamplingParams
    settings = dict(show_progress=True, kv_cache_memory="8MiB", num_threads=1)
    with Engine.from_pretrained("demo", **settings) as engine:
        answer = engine.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=4)).token_ids
    with Engine.from_pretrained("demo-embed", **settings) as engine:
        vectors = engine.embed(["one", "two"], show_progress=True)
    return len(answer), len(vectors.vectors)

try:
    if sys.argv[2] == "as they are":
        assert (sys.stdin, sys.stdout, sys.stderr) == (None, None, None)
        done = serve()
    else:
        done, closed = None, open(os.devnull, "w")
        closed.close()
        for stream in (None, closed, OnlyWrites()):
            sys.stdout = sys.stderr = stream
            done = serve()
    said.write_text(repr(done))
except BaseException:
    said.write_text(traceback.format_exc())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="closes them as a shell does")
@pytest.mark.parametrize(("shell", "streams"), [('"$@" <&- >&- 2>&-', "as they are"), ('"$@"', "set by the program")])
def test_an_engine_serves_without_standard_streams(shell: str, streams: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = ["bash", "-c", shell, "bash", sys.executable, "-c", SERVES, str(said), streams]
    subprocess.run(command, timeout=300, check=False)
    assert said.read_text() == "(4, 2)"


@pytest.mark.parametrize("stream", [None, object()], ids=["none", "only an object"])
def test_a_download_asks_no_stream_that_is_not_there(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from asyncengine import EngineConfig, ModelNotFound
    from asyncengine.models.checkpoint import open_checkpoint

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
        open_checkpoint("some/model", EngineConfig(load_format="dummy"))
    assert "cannot be reached" not in str(refused.value)
    assert len(bars) == 1

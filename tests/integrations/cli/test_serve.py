"""`asyncengine serve` as a process: how it starts, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.data import cases_of
from support.held_steps import HELD_COMMAND, HOLD

from asyncengine import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.cli.exits import CliError
from asyncengine.integrations.cli.main import build_parser, main
from asyncengine.integrations.cli.serve import read_plan
from asyncengine.integrations.http.server import bind
from asyncengine.integrations.http.settings import ServerSettings

ROWS: dict[str, Any] = cases_of(__file__)

if sys.platform == "win32":
    pytest.skip("signals are others there", allow_module_level=True)

PATIENCE = 120.0
CERTIFICATE = Path(__file__).parents[2] / "support" / "localhost.pem"
"""A certificate for localhost that signs itself, with its key."""
SMALL = ("--max-num-seqs", "4", "--num-threads", "1", "--grammar-backend", "none")
KEY = {"authorization": "Bearer k"}
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = {"model": "demo", "messages": HELLO, "ignore_eos": True, "stream": True, "temperature": 0}


NEVER_CLOSING = (
    "-c",
    "import asyncio; from asyncengine import EngineGroup; from asyncengine.integrations.cli.main import script;"
    "EngineGroup.aclose = lambda *_, **__: print('closing', flush=True) or asyncio.Event().wait(); script()",
)


class Served:
    """A server of its own process on a free port; killed at the end if it is still there."""

    def __init__(
        self,
        *arguments: str,
        start: tuple[str, ...] = ("-m", "asyncengine"),
        cwd: str | None = None,
        **environment: str,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *start, "serve", *arguments, "--port", "0", *SMALL],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
            cwd=cwd,
            # the tests may have been started in the background, where shells have Ctrl-C ignored for good
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no thread holds a lock
        )  # fmt: skip

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ready(self) -> str:
        """The line that says that it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), self.process.communicate(timeout=PATIENCE)
        self.url = next(word for word in line.split() if word.startswith(("http:", "https:", "unix:")))
        return line

    def end(self) -> tuple[int, str]:
        """(exit code, all of stderr)"""
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said

    def stream(self, max_tokens: int) -> Any:
        """The lines of an answer, of a server that holds it up until something else is asked for."""
        body = {**ENDLESS, "max_tokens": max_tokens}
        return httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=KEY, timeout=PATIENCE)


def frames(lines: Iterator[str]) -> list[Any]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_ctrl_c_ends_streams_and_then_the_server() -> None:
    with Served("demo", "pet=demo", "--alias", "*=pet", start=HELD_COMMAND) as served:
        assert served.ready().startswith("serving demo, pet at http://127.0.0.1:")
        with served.stream(4000) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines)[6:])["choices"]
            served.process.send_signal(signal.SIGINT)
            rest = frames(lines)
        assert "the engine is closing" in rest[-1]["error"]["message"]
        code, said = served.end()
        assert (code, said.strip().splitlines()[-1]) == (130, "stopped")
        assert "Traceback" not in said


TRACED = ("-c", HOLD + ROWS["traced"])
"""The start of a command as `opentelemetry-instrument` does it, by hand: a provider is set before the command runs.
Its answers are held up."""


def test_sigterm_lets_answers_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    """Spans go to the provider that the starter has set up."""
    with Served("demo", "--telemetry", "--api-key", "k", start=TRACED, cwd=str(tmp_path)) as served:
        served.ready()
        with served.stream(1000) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert httpx.post(f"{served.url}/pause?mode=keep", headers=KEY).status_code == 200
            served.process.send_signal(signal.SIGTERM)
            while (health := httpx.get(f"{served.url}/health")).status_code == 200:
                time.sleep(0.01)  # until the signal is there
            late = httpx.post(f"{served.url}/v1/chat/completions", json={"messages": HELLO}, headers=KEY)
            assert httpx.post(f"{served.url}/resume", headers=KEY).status_code == 200
            rest = frames(lines)
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert 1 <= int(late.headers["retry-after"]) <= 30
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        code, said = served.end()
        assert (code, said) == (0, "stopped\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")
    spans = (tmp_path / "spans").read_text(encoding="utf-8")
    assert '"name": "chat demo"' in spans
    assert '"gen_ai.usage.output_tokens": 1000' in spans


def test_a_profile_of_an_idle_engine_holds_nothing_up() -> None:
    with Served("demo", "--api-key", "k") as served, ThreadPoolExecutor(1) as pool:
        served.ready()
        profile = partial(httpx.post, f"{served.url}/profile", headers=KEY, timeout=100)

        def long() -> httpx.Response:
            while (answer := profile(json={"timeout": 90})).status_code == 400:  # a short one is being made
                pass
            return answer

        made = pool.submit(long)
        while profile(json={"timeout": 0.01}).status_code == 200:  # until the long one is being made
            time.sleep(0.1)
        served.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert made.result().json()["traceEvents"]
        assert served.end()[0] == 0
        assert time.monotonic() - began < 60


def test_over_tls() -> None:
    with Served("demo", "--keep-alive", "5m", "--ssl-certfile", str(CERTIFICATE)) as served:
        served.ready()
        assert served.url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=ssl.create_default_context(cafile=str(CERTIFICATE))) as client:
            assert client.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "demo"
            body = {"messages": HELLO, "max_tokens": 4, "stream": True}
            with client.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(served.url.replace("https", "http"))
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == (0, "stopped\n")


def test_over_a_unix_socket(tmp_path: Path) -> None:
    """A file that was left there is replaced, one at which somebody listens is not."""
    path = str(tmp_path / "socket")
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    with Served("demo", "pet=demo", "--keep-alive", "5m", "--uds", path, "--default-model", "pet") as served:
        served.ready()
        assert served.url == f"unix:{path}"
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=path), base_url="http://anything", timeout=PATIENCE
        ) as client:
            for model in ({}, {"model": ""}):
                made = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, **model})
                assert made.json()["model"] == "pet"
        with pytest.raises(InvalidParameter, match="uds: cannot be listened on"):
            bind(ServerSettings(uds=path))
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == (0, "stopped\n")


def test_wrong_certificates_and_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.pem").write_text("none")
    for flags, words in (
        (("--ssl-certfile", str(tmp_path / "no.pem")), "ssl-certfile: cannot be used"),
        (("--ssl-keyfile", str(CERTIFICATE)), "ssl_certfile: cannot be used"),
        (("--uds", str(tmp_path / "no" / "socket")), "uds: cannot be listened on"),
        (("--default-model", "none"), "--default-model: must be another name of 'demo'"),
    ):
        assert main(["serve", "demo", "--keep-alive", "5m", *flags]) == 2
        assert words in capsys.readouterr().err


def test_a_second_ctrl_c_waits_for_nobody() -> None:
    with Served("demo", "--keep-alive", "5m", start=NEVER_CLOSING) as served:
        served.ready()
        served.process.send_signal(signal.SIGINT)
        assert served.process.stdout is not None
        assert served.process.stdout.readline() == "closing\n"
        served.process.send_signal(signal.SIGINT)
        assert served.end() == (130, "interrupted\n")


def test_requests_that_do_not_come_hold_nothing_up() -> None:
    with Served("demo", "--keep-alive", "5m", "--drain-timeout", "0.05") as served:
        served.ready()
        port = int(served.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as slow, socket.create_connection(("127.0.0.1", port)):
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(head + b"Content-Length: 100\r\n\r\n{")  # and the rest never comes
            assert httpx.get(f"{served.url}/health").status_code == 200
            served.process.send_signal(signal.SIGTERM)
            assert served.end() == (0, "stopped\n")


def test_ctrl_c_while_it_loads() -> None:
    with Served("demo", "--log-level", "info") as served:
        assert served.process.stderr is not None
        assert any("loading demo" in line for line in served.process.stderr)
        served.process.send_signal(signal.SIGINT)
        code, said = served.end()
        assert code == 130
        assert "Traceback" not in said


def test_a_key_from_the_environment_is_asked_for(tmp_path: Path) -> None:
    with Served("demo", "--host", "0.0.0.0", "--keep-alive", "5m", ASYNCENGINE_API_KEY="sesame") as served:
        served.ready()
        port = served.url.rpartition(":")[2]
        url = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, params={"api_key": "sesame"}).status_code == 401
        assert httpx.get(url, headers={"authorization": "Bearer sesame"}).json()["data"][0]["loaded"] is False
        served.process.send_signal(signal.SIGINT)
        assert served.end()[0] == 130


# ---------------------------------------------------------------- what it refuses


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("asyncengine: error: ")
    assert said.count("\n") == 1
    return said.removeprefix("asyncengine: error: ").strip()


def test_addresses_that_others_reach_need_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        assert refused(capsys, "demo", "--host", host).startswith("--host: is reached from other machines")
    (tmp_path / "empty").write_text("\n")
    assert "holds no key" in refused(capsys, "demo", "--api-key-file", str(tmp_path / "empty"))
    assert "cannot be read" in refused(capsys, "demo", "--api-key-file", str(tmp_path / "none"))
    assert refused(capsys, "demo", "--api-key", "with space ").startswith("--api-key: must be printable")
    assert refused(capsys, "demo", "--api-key", "").startswith("--api-key: must be printable")


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert refused(capsys, "demo", "--port", port).startswith("--port: cannot be listened on: ")


def test_what_it_cannot_serve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(capsys).startswith("models: name a MODEL")
    assert "/no/such/model" in refused(capsys, "/no/such/model")
    assert "there twice" in refused(capsys, "demo", "demo")
    assert refused(capsys, "a=demo", "b=demo", "--adapter", "x=demo/pirate").startswith("--adapter: say in a --config")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "asyncengine.integrations.opentelemetry", raising=False)
    assert 'pip install "asyncengine[telemetry]"' in refused(capsys, "demo", "--telemetry")
    without = "import sys; sys.modules['prometheus_client'] = None; from asyncengine.__main__ import script; script()"
    with Served("demo", start=("-c", without)) as served:
        code, said = served.end()
    assert (code, said) == (1, 'asyncengine: error: serve needs prometheus_client: pip install "asyncengine[serve]"\n')


# ---------------------------------------------------------------- configuration files

CONFIG = (Path(__file__).parent / "server.toml").read_text(encoding="utf-8")


def plan_of(tmp_path: Path, text: str, *arguments: str) -> Any:
    file = tmp_path / "server.toml"
    file.write_text(text)
    return read_plan(build_parser().parse_args(["serve", "--config", str(file), *arguments]))


def test_a_file_and_flags_above_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, CONFIG, "--port", "8124", "--max-model-len", "64", "more=demo", "--alias", "pal=pirate")
    assert (plan.settings.port, plan.settings.memory, plan.preload) == (8124, 4 << 30, ["chat"])
    assert plan.aliases == {"*": "chat", "gpt-4o": "chat", "claude": "chat", "pal": "pirate"}
    common = {"max_num_seqs": 8, "max_model_len": 64}
    chat = {"model": "demo", "adapters": {"pirate": "demo/pirate"}, "keep_alive": "5m"}
    assert plan.models == {
        "chat": {**common, **chat, "max_num_seqs": 2},
        "embed": {**common, "model": "demo-embed", "keep_alive": -1},
        "more": {**common, "model": "demo", "keep_alive": "5m"},
    }


@pytest.mark.parametrize(("text", "complaint"), ROWS["a_file_that_is_wrong_is_refused_by_name"])
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises((InvalidParameter, CliError), match=complaint):
        plan_of(tmp_path, text)


def test_the_file_of_the_page_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "howto" / "serve.md"
    [text] = re.findall(r"^```toml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    plan = plan_of(tmp_path, text)
    assert (plan.settings.port, plan.preload, plan.aliases["claude-haiku"]) == (8080, ["chat"], "chat")
    for setup in plan.models.values():
        EngineConfig.from_dict({name: value for name, value in setup.items() if name not in ("model", "keep_alive")})


def test_folders_and_names_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    given = ["serve", str(tmp_path / "a=b"), "pet=USER/repo", "USER/Other-0.6B", "--keep-alive", "-1"]
    plan = read_plan(build_parser().parse_args(given))
    assert {name: setup["model"] for name, setup in plan.models.items()} == {
        "a=b": str(tmp_path / "a=b"), "pet": "USER/repo", "Other-0.6B": "USER/Other-0.6B",
    }  # fmt: skip
    assert plan.aliases == {str(tmp_path / "a=b"): "a=b", "USER/Other-0.6B": "Other-0.6B"}


async def test_no_part_of_an_answer_waits_for_the_clients_acknowledgement() -> None:
    """asyncio turns Nagle's algorithm off for connections of sockets that name TCP as their protocol."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind(ServerSettings(host="127.0.0.1", port=0))
    async with await asyncio.start_server(note, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await accepted
        writer.close()

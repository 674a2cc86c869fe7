"""Files of deploy/ are ones that the command and the build take: they run nowhere else in the suite."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from asyncengine.integrations.cli.main import build_parser
from asyncengine.integrations.cli.serve import read_plan

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PORT = 8000


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "asyncengine.service").read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_serves_the_configuration_beside_it() -> None:
    [command] = unit()["ExecStart"]
    words = command.split()[1:]
    words[words.index("--config") + 1] = str(DEPLOY / "server.toml")
    plan = read_plan(build_parser().parse_args(words))
    assert (plan.settings.port, plan.settings.local, plan.settings.log_json) == (PORT, True, True)
    assert plan.preload == list(plan.models)  # what readiness promises
    assert unit()["ExecStartPost"][0].endswith(f" http://127.0.0.1:{PORT}/health")
    assert int(unit()["TimeoutStopSec"][0]) > plan.settings.drain_timeout


def test_the_image_gets_all_that_is_packaged_and_serves_with_a_key() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()}
    kept = set(re.findall(r"^!([\w.]+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE))
    assert kept == {*folders, "pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    [extras] = re.findall(r'"/source\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()
    [command] = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    plan = read_plan(build_parser().parse_args(re.findall(r'"([^"]+)"', command)))
    assert (plan.settings.port, plan.settings.local) == (PORT, False)  # so that it refuses to start without a key

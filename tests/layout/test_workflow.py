"""The workflow for public runners, which cannot run here: its form, and that its commands are those that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))


def steps() -> list[dict[str, Any]]:
    return [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_every_command_stands_where_it_is_run_by_hand() -> None:
    texts = " ".join((ROOT / name).read_text(encoding="utf-8") for name in (".ci/run", "README.md", "CONTRIBUTING.md"))
    commands = {step["run"] for step in steps() if "run" in step}
    assert len(commands) >= 9
    assert not [command for command in commands if command not in texts]


def test_it_covers_the_systems_and_versions_that_are_promised() -> None:
    matrix = WORKFLOW["jobs"]["units"]["strategy"]["matrix"]
    assert [system.partition("-")[0] for system in matrix["system"]] == ["ubuntu", "ubuntu", "macos", "windows"]
    assert any(system.endswith("-arm") for system in matrix["system"])
    versions = {*matrix["python"], *(each["python"] for each in matrix["include"])}
    assert versions == {"3.11", "3.12", "3.13", "3.14"}


def test_it_may_only_read() -> None:
    """A runner executes the code of whoever sends a change."""
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not [step for step in steps() if "secrets." in str(step)]

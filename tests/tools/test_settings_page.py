"""docs/settings.md says what the settings say of themselves: `python -m tools.settings_page` writes it anew."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature

import pytest

from asyncengine.config import EngineConfig
from asyncengine.integrations.cli.main import main
from asyncengine.options import ChatRequest, RequestOptions
from asyncengine.sampling_params import SamplingParams
from tools import settings_page
from tools.settings_page import engine_accepts, page, settings


def test_it_is_as_written() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.settings_page"


def test_every_field_is_described() -> None:
    """Each has a sentence of its own: a bare name says nothing to a stranger."""
    for kind in (EngineConfig, RequestOptions, ChatRequest, SamplingParams):
        rows = settings(kind, (), None)
        assert list(rows) == [field.name for field in fields(kind)]
        assert not [name for name, row in rows.items() if len(row.does) < 10]


def test_every_setting_carries_its_limits() -> None:
    """Limits are in its type: a field without any would take what nobody has thought of."""
    assert [*signature(EngineConfig).parameters] == [field.name for field in fields(EngineConfig)]
    assert [*EngineConfig.checks()] == [field.name for field in fields(EngineConfig)]
    assert {field.name for field in fields(SamplingParams)} - SamplingParams.checks().keys() == {"grammar"}
    assert not [name for name, row in settings(EngineConfig, (), engine_accepts).items() if not row.takes]


def test_flags_are_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag of the page is one of `asyncengine generate`, and every setting that is not there has none."""
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    known = set(re.findall(r"(?<![\w-])--[a-z-]*[a-z]", capsys.readouterr().out))
    shown = {part.strip("`") for line in page().splitlines() if line.startswith("| `")
             for part in line.split(" | ")[1].split(", ") if part}  # fmt: skip
    assert shown
    assert shown <= known
    assert {
        flag for flag in known if flag.removeprefix("--").replace("-", "_") in settings(EngineConfig, (), None)
    } <= shown

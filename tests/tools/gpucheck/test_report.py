"""Verdicts, exit status, JSON and lines."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tools.gpucheck.report import Check, Figure, Report, number

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["format", "complete", "passed", "seconds", "facts", "checks", "figures", "lines"],
    "properties": {
        "format": {"const": 2},
        "complete": {"type": "boolean"},
        "passed": {"type": "boolean"},
        "seconds": {"type": "number"},
        "facts": {"type": "object"},
        "lines": {"type": "array", "items": {"type": "string"}},
        "checks": {"type": "array", "items": {
            "type": "object", "additionalProperties": False,
            "required": ["section", "name", "status", "detail", "seconds"],
            "properties": {"section": {"type": "string"}, "name": {"type": "string"}, "detail": {"type": "string"},
                           "status": {"enum": ["pass", "fail", "skip"]}, "seconds": {"type": "number"}},
        }},
        "figures": {"type": "array", "items": {
            "type": "object", "additionalProperties": False,
            "required": ["section", "name", "value", "unit", "aim", "at_most", "note", "verdict"],
            "properties": {"section": {"type": "string"}, "name": {"type": "string"}, "unit": {"type": "string"},
                           "value": {"type": ["number", "null"]}, "aim": {"type": ["number", "null"]},
                           "at_most": {"type": "boolean"}, "note": {"type": "string"},
                           "verdict": {"enum": ["met", "missed", "absent", "no aim"]}},
        }},
    },
}  # fmt: skip


def filled(*statuses: str) -> Report:
    report = Report({"device": "a GPU", "seed": 7, "section_seconds": {"kernels": 1.5}}, seconds=12.34, complete=True)
    report.checks = [Check("kernels", f"check {n}", status, f"[detail] {n}", 0.5) for n, status in enumerate(statuses)]  # type: ignore[arg-type]
    report.figures = [
        Figure("speed", "fast", 812.0, "tokens/s", 700.0),
        Figure("speed", "slow", 12_345.6, "tokens/s", 20_000.0),
        Figure("speed", "host", 0.4, "ms", 1.0, at_most=True),
        Figure("speed", "vllm", None, "tokens/s", note="not installed"),
        Figure("environment", "copy bandwidth", 4300.0, "GB/s"),
    ]
    return report


def test_verdicts() -> None:
    assert [figure.verdict for figure in filled().figures] == ["met", "missed", "met", "absent", "no aim"]
    assert Figure("s", "host", 1.1, "ms", 1.0, at_most=True).verdict == "missed"
    assert Figure("s", "gone", None, "ms", 1.0).verdict == "absent", "an aim does not make a figure"


@pytest.mark.parametrize(("statuses", "status"), [(("pass", "skip"), 0), (("pass", "fail"), 1), ((), 0)])
def test_exit_status(statuses: tuple[str, ...], status: int) -> None:
    assert filled(*statuses).exit_code == status


def test_json_is_as_described() -> None:
    document = json.loads(json.dumps(filled("pass", "fail", "skip").as_dict()))
    jsonschema.validate(document, SCHEMA)
    assert not document["passed"]
    assert filled("pass", "skip").as_dict()["passed"]
    assert not Report().as_dict()["passed"], "one that did not come to its end proves nothing"
    assert document["figures"][3] == {
        "section": "speed", "name": "vllm", "value": None, "unit": "tokens/s", "aim": None, "at_most": False,
        "note": "not installed", "verdict": "absent",
    }  # fmt: skip


def test_lines_say_it_all() -> None:
    report = filled("pass", "fail")
    assert [str(check) for check in report.checks] == [
        "pass  kernels: check 0: [detail] 0 (0.5 s)", "fail  kernels: check 1: [detail] 1 (0.5 s)",
    ]  # fmt: skip
    assert [str(figure) for figure in report.figures] == [
        "speed: fast: 812 tokens/s (aim >= 700: met)", "speed: slow: 12,346 tokens/s (aim >= 20,000: missed)",
        "speed: host: 0.400 ms (aim <= 1.00: met)", "speed: vllm: absent; not installed",
        "environment: copy bandwidth: 4,300 GB/s",
    ]  # fmt: skip


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.1234, 1.234, 12.34, 123.4, 12345.6, 0.0)] == [
        "0.123", "1.23", "12.3", "123", "12,346", "0.000",
    ]  # fmt: skip

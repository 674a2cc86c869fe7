"""Arguments that the command line accepts and refuses, before any model is loaded."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from asyncengine import EngineConfig, __version__
from asyncengine.config import GROUPS
from asyncengine.integrations.cli.main import build_parser, main
from asyncengine.integrations.cli.options import ENGINE_FIELDS, engine_config, field_docs, sampling_params

HEAVY = ("torch", "transformers", "rich", "numpy", "matplotlib", "langchain_core", "llama_index")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with code 2 and exactly one line on stderr; that line."""
    try:
        code: object = main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def test_help_and_version_import_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from asyncengine.integrations.cli.main import main\n"
        "for flag in ('--version', '--help'):\n"
        "    try:\n"
        "        main([flag])\n"
        "    except SystemExit as error:\n"
        "        assert error.code == 0, error.code\n"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"asyncengine {__version__}" in done.stdout
    assert all(command in done.stdout for command in ("demo", "chat", "generate", "embed", "bench"))
    assert done.stdout.endswith("heavy: []\n")


def test_every_engine_setting_is_a_flag_with_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--adapter NAME=PATH" in text
    for field in fields(EngineConfig):
        if field.name not in ("show_progress", "adapters"):
            assert "--" + field.name.replace("_", "-") in text, field.name
    titles = [text.index(f"engine: {title}:") for title in GROUPS]
    assert titles == sorted(titles)
    assert text.index("--page-size") in range(*titles[1:3])
    assert "Type of weights and activations" in text
    assert set(field_docs(EngineConfig)) > {"dtype", "policy", "max_num_seqs", "kv_cache_memory"}


def test_flags_become_settings_of_the_right_types() -> None:
    args = build_parser().parse_args(
        ["generate", "demo", "hi", "--kv-cache-memory", "2MiB", "--no-prefix-caching", "--max-num-seqs", "3",
         "--temperature", "0.5", "--stop", "a", "--stop", "b", "--stop-token-ids", "7", "--request-timeout", "1.5",
         "--speculation-costs", "1,2,4.5"]
    )  # fmt: skip
    config, params = engine_config(args), sampling_params(args)
    assert (config.kv_cache_memory, config.prefix_caching, config.max_num_seqs) == (2 * 2**20, False, 3)
    assert config.request_timeout == 1.5
    assert config.speculation_costs == (1.0, 2.0, 4.5)
    assert (params.temperature, params.stop, params.stop_token_ids) == (0.5, ("a", "b"), (7,))
    untouched = engine_config(build_parser().parse_args(["generate", "demo", "hi"]), num_threads=1)
    assert untouched == EngineConfig(num_threads=1)
    assert "show_progress" not in ENGINE_FIELDS


REFUSED = (Path(__file__).parent / "refused.txt").read_text(encoding="utf-8").splitlines()
ROWS = [(shlex.split(line.partition("  =>  ")[0]), line.partition("  =>  ")[2]) for line in REFUSED if line[0] != ";"]
SIZE = ["generate", "demo", "hi", "--page-size"]


@pytest.mark.parametrize(("arguments", "named"), [
    *ROWS,
    ([*SIZE, "9" * 5000], "--page-size: must be an integer, got '999"),
    ([*SIZE, "(" * 5000], "--page-size: must be an integer, got '((("),
])  # fmt: skip
def test_bad_values_are_named_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert named in refused(capsys, *arguments)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_a_text_that_begins_as_a_flag_does_is_no_typo() -> None:
    parsed = build_parser().parse_args(["generate", "demo", "--hello there"])
    assert parsed.prompt == "--hello there"
    assert build_parser().parse_args(["generate", "demo", "--", "--hello"]).prompt == "--hello"

"""Arguments that the command line accepts and refuses, before any model is loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "demo", "hi", "--max-num-seqs", "many"], "error: --max-num-seqs: must be an integer, got 'many'"),
        (
            ["generate", "demo", "hi", "--max-num-seqs", "0"],
            "error: --max-num-seqs: must be between 1 and 65536, got 0",
        ),
        (
            ["generate", "demo", "hi", "--draft-costs", "1,x"],
            "--draft-costs: must be 3 or 4 positive numbers, or None, got '1,x'",
        ),
        (["generate", "demo", "hi", "--draft-costs", "1,2"], "--draft-costs: must be 3 or 4 positive numbers"),
        (["generate", "demo", "hi", "--dtype", "int3"], "--dtype: must be one of"),
        (["generate", "demo", "hi", "--kv-cache-memory", "lots"], "--kv-cache-memory: must be a positive number"),
        (["generate", "demo", "hi", "--temperature", "nan"], "--temperature: must be a number, got 'nan'"),
        (["generate", "demo", "hi", "--max-tokens", "-1"], "--max-tokens: must be an integer >= 1, got -1"),
        (["generate", "demo", ""], "prompt: must not be empty"),
        (["generate", "demo"], "PROMPT"),
        (["generate", "demo", "hi", "--no-chat", "--system", "Be brief."], "--system: --no-chat sends no messages"),
        (["generate", "demo", "hi", "--max-token", "3"], "--max-token"),
        (["chat", "demo", "--top-p", "2"], "--top-p: must be > 0 and <= 1, got 2"),
        (["bench", "demo", "--output-len", "0"], "--output-len: must be an integer >= 1, got 0"),
        (["bench", "demo", "--concurrency", "4,none"], "--concurrency: must be an integer, got '4,none'"),
        (["bench", "demo", "--concurrency", "0"], "--concurrency: must be an integer >= 1, got 0"),
        (["embed", "demo-embed", "--output", "vectors.csv"], '--output: must end in .npy or .jsonl, or be "-"'),
        (
            ["embed", "demo-embed", "--output", "no/such/folder/vectors.npy"],
            "--output: there is no folder no/such/folder",
        ),
        (["embed", "demo-embed", "--prompt", "a", "--prompt-name", "b"], "--prompt-name"),
        (["demo", "--streams", "0"], "--streams: must be an integer >= 1, got 0"),
        (["demo", "--streams", "some"], "--streams: must be an integer, got 'some'"),
        (["demo", "--fleet", "1"], "--fleet: must be an integer >= 2, got 1"),
        (["generate", "demo", "hi", "--min-tokens=4", "--max-tokens=3"], "--min-tokens: must not exceed max_tokens=3"),
        (["generate", "demo", "hi", "--speculation=off", "--draft-model=x"], '--draft-model: needs speculation="auto"'),
        (
            ["generate", "demo", "hi", "--request-timeout", "soon"],
            "--request-timeout: must be a positive, finite number",
        ),
        (["generate", "demo", "hi", "--stop-token-ids", "x"], "--stop-token-ids: must be an integer, got 'x'"),
        (["embed", "demo-embed", "--dimensions", "x"], "--dimensions: must be an integer, got 'x'"),
        (["generate", "demo", "hi", "--temperature", "1e999"], "--temperature: must be finite, got inf"),
        (["generate", "demo", "hi", "--page-size", "9" * 5000], "--page-size: must be an integer, got '999"),
        (["generate", "demo", "hi", "--page-size", "(" * 5000], "--page-size: must be an integer, got '((("),
        (["generate", "demo", "hi", "--page-size", "True"], "--page-size: must be an integer, got True"),
        (["dance"], "dance"),
        (["generate", "demo", "hi", "--adapter", "pirate"], "--adapter: must be NAME=PATH, got 'pirate'"),
        (["chat", "demo", "--adapter", "=somewhere"], "--adapter: must be NAME=PATH"),
        (["bench", "demo", "--adapter", "a=nowhere"], "adapter 'a': path: is no folder, got '"),
        (["chat", "demo", "--adapter", "a=."], "adapter 'a': path: has no adapter_config.json"),
        (["generate", "demo", "hi", "--adapter", "a=x", "--adapter", "a=y"], "--adapter: 'a' is given twice"),
        (["generate", "demo", "hi", "--adapter", "a=x", "--adapter", "b=y"], "choose with --use: a, b"),
        (["generate", "demo", "hi", "--adapter", "a=x", "--use", "b"], "--use: must be the name of an adapter ('a')"),
        (["chat", "demo", "--use", "b"], "--use: must be the name of an adapter (none is given"),
        (["generate", "demo", "hi", "--adapter-root", "nowhere"], "--adapter-root: is no folder, got 'nowhere'"),
        (["generate", "demo", "hi", "--max-loras", "0"], "--max-loras: must be between 1 and 4096, got 0"),
    ],
)
def test_bad_values_are_named_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert named in refused(capsys, *arguments)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate demo hi --devise cpu", "generate: error: unknown flag --devise; did you mean --device?"),
        ("generate --devise=cpu", "generate: error: unknown flag --devise; did you mean --device?"),
        ("serve demo --n-ctx 100", "serve: error: unknown flag --n-ctx; did you mean --max-model-len?"),
        ("cache show --zzz", "cache: error: unknown flag --zzz"),
        ("bench demo more", "bench: error: unrecognized arguments: more"),
        ("dmeo", "error: unknown command dmeo; did you mean demo?"),
        ("--versoin", "error: unknown flag --versoin; did you mean --version?"),
    ],
)
def test_a_typo_names_the_nearest_and_the_help_to_read(
    capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    program = "asyncengine" if said.startswith("error") else f"asyncengine {said.partition(':')[0]}"
    assert capsys.readouterr().err == f"{program}: error: {said.partition('error: ')[2]} (see {program} --help)\n"


def test_a_text_that_begins_as_a_flag_does_is_no_typo() -> None:
    parsed = build_parser().parse_args(["generate", "demo", "--hello there"])
    assert parsed.prompt == "--hello there"
    assert build_parser().parse_args(["generate", "demo", "--", "--hello"]).prompt == "--hello"

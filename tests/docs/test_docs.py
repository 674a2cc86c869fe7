"""The Python blocks of the README and the how-tos run, and what the documents link to and cite is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOWTOS = sorted((ROOT / "docs" / "howto").glob("*.md"))
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"\s*^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""The output of a block, where the page shows it right after the block."""
OPTIONAL = {
    "dspy": "dspy", "instructor": "instructor", "pydantic_ai": "pydantic-ai-slim", "langfuse": "langfuse",
    "openinference": "openinference-instrumentation-langchain", "phoenix": "arize-phoenix-otel",
}  # fmt: skip
"""Modules that how-tos are about and no extra of this package installs, with what to install. Where one is missing the
blocks that import it are skipped; no other import may be missing."""


def blocks() -> list[object]:
    found: list[object] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            shown = OUTPUT.match(text, match.end())
            found.append(pytest.param(page, line, match[1], shown and shown[1], id=f"{page.name}:{line}"))
    return found


def imported(code: str) -> set[str]:
    """The top-level modules that a block imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules.add(node.module.partition(".")[0])
    return modules


@pytest.mark.parametrize(("page", "line", "code", "shown"), blocks())
def test_block_runs(
    page: Path, line: int, code: str, shown: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Blocks run as a reader would run them: pasted into an empty file, in an empty folder, with the page's lines."""
    if "outlines" in imported(code) and sys.version_info >= (3, 14):
        pytest.skip("outlines 1.3 refuses Python 3.14")
    for module in sorted(imported(code) & OPTIONAL.keys()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, which is not installed: pip install {OPTIONAL[module]}")
    monkeypatch.chdir(tmp_path)
    program = compile("\n" * (line - 1) + code, str(page), "exec", dont_inherit=True)
    exec(program, {"__name__": "__main__"})
    printed = capsys.readouterr().out
    if "print(" in code:
        assert printed.strip(), "the block prints, but printed nothing"
    if shown is not None:
        assert printed == shown


@pytest.mark.parametrize("page", [ROOT / "docs" / "howto" / "speculation.md"])
def test_the_example_of_a_prediction_shows_what_it_is_for(page: Path) -> None:
    """The page runs in float32, which speculates on every CPU: the text is right, nearly all of it as predicted, in few
    passes. What a pass costs is given: on a busy machine it may seem that guesses are not worth their time."""
    [code] = [code for code in BLOCK.findall(page.read_text(encoding="utf-8")) if "prediction=" in code]
    assert 'dtype="float32"' in code
    code = code.replace('dtype="float32"', 'dtype="float32", speculation_costs=(1.0, 1.02, 1.08)')
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code + "    passes = engine.stats().tokens_per_pass\n", names)
    usage = names["answer"].usage
    assert names["answer"].text == names["text"]
    assert usage.accepted_prediction_tokens > 0.7 * usage.completion_tokens
    assert usage.rejected_prediction_tokens < 0.2 * usage.completion_tokens
    assert names["passes"] > 2.5


def test_only_what_no_extra_installs_may_be_missing() -> None:
    """Each is imported by one page's blocks, and none is a dependency: else its blocks would be skipped unnoticed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for group in required for requirement in group}
    assert not names & set(OPTIONAL.values())
    pages = [(ROOT / "docs" / "howto" / f"{name}.md").read_text("utf-8") for name in ("other_libraries", "tracing")]
    assert set().union(*(imported(code) for page in pages for code in BLOCK.findall(page))) >= OPTIONAL.keys()


LANGUAGES = {"python", "py", "text", "toml", "bash", "dockerfile"}
"""Languages of fenced blocks: `python` runs, `py` is another library's program, and one without could be anything."""
FOREIGN = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_only_programs_of_other_libraries_do_not_run() -> None:
    """They are Python, import one that no extra installs, and are followed by the same program here, which runs."""
    others = {"langchain_ollama", "llama_cpp", "vllm", "langchain_huggingface"}
    seen = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FOREIGN.finditer(text):
            named = imported(match[1])
            assert named & others, f"{page.name}: a block that could run does not"
            assert "asyncengine" not in named
            assert text[match.end() :].lstrip().startswith("```python\n")
            seen |= named & others
    assert seen == others


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(fences[1::2]) <= {""}, page
        assert set(fences[::2]) <= LANGUAGES, page


def test_rows_of_a_table_have_as_many_cells_as_its_head() -> None:
    """A row that was put into the wrong table would show its figures under wrong names."""
    found = 0
    for page in (*PAGES, *(ROOT / "benchmarks").rglob("*.md")):
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
            found += 1
            assert {*cells} == {cells[0]}, f"{page.name}: {table}"
    assert found > 200


def test_cited_files_and_tests_exist() -> None:
    """The contract and the tour cite files and tests by name; both must be there."""
    read = cache(lambda path: (ROOT / path).read_text(encoding="utf-8"))
    for name in ("contract.md", "tour.md", "security.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        for path in re.findall(r"`((?:asyncengine|tests|integrations|benchmarks)/[\w/]+\.py)(?:::[\w]+)?`", text):
            assert (ROOT / path).exists(), f"{name} cites {path}"
        for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            assert f"def {test}(" in read(path), f"{name} cites {path}::{test}"


@pytest.mark.parametrize("page", [page for page in HOWTOS if page.stem.startswith("add_a_")])
def test_names_are_defined_in_the_files_that_a_page_says(page: Path) -> None:
    """Pages on adding code cite a name and its file as "`NAME` (`file.py`)" or "`NAME` in `file.py`"."""
    cited = re.findall(r"`(\w+)`\s(?:in\s|\()`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
    for name, file in cited:
        bases = ("", "asyncengine", "asyncengine/execution", "asyncengine/execution/models", "integrations")
        [path] = [at for base in bases if (at := ROOT / base / file).exists()]
        definition = rf"^((class|def) {name}\b|{name}\b(: .*)? =)"
        assert re.search(definition, path.read_text(encoding="utf-8"), re.MULTILINE), f"{name} is not in {file}"
    assert cited


TEXT = (ROOT / "docs" / "problems.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if re.match(r"\| (?!asked|--)", line) and not line.startswith("|--")]
HELD = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_there_are_rows() -> None:
    assert len(ROWS) >= 20
    assert "## Not yet" in TEXT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:50])
def test_a_test_holds_it(row: str) -> None:
    _, asked, here, held, _ = re.split(r"(?<!\\)\|", row)
    assert asked.strip()
    assert here.strip()
    named = HELD.findall(held)
    assert named, "a row without a test belongs under Not yet"
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE), f"{path} has no {name}"

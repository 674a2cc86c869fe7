"""The words of the house: readable docstrings, names of the field, and one class for each general name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from support.trees import nodes_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("asyncengine", "grammar", "lora", "integrations")


def files_in(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not any(each.is_symlink() for each in path.parents))


FILES = [path for folder in FOLDERS for path in files_in(folder)]
OPENERS = {
    "And", "As", "But", "By", "Else", "How", "Nobody", "Nor", "Of", "Somebody", "Those", "Unless", "What", "Where",
    "Which", "Who", "Whoever", "Whose",
}  # fmt: skip
"""Words that begin a fragment: it lacks the noun that says what the thing is."""
METAPHORS = {
    "crew", "desk", "habits", "ledger", "lifeline", "offer", "parcel", "purse", "recruit", "sight", "told",
}  # fmt: skip
"""Words of names for which the field has its own."""
GENERIC = ("Part", "Settings", "Shape", "Step", "Tally")
"""Names that say something only while one class has them; of the grammars' library, that of a text is one more."""
VAGUE = {"found": 9, "kind": 35, "part": 47, "place": 5, "nobody": 0, "whoever": 0}
"""Words of names that say nothing of the value, and the most definitions with each, which may only fall. A content
"part" and a token's "kind" are the field's own."""
MOST_PARAMETERS = 12


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of modules, classes, functions, fields and constants."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def fragments(nodes: Iterable[ast.AST]) -> list[str]:
    found = []
    for line, text in docstrings(nodes):
        words = text.split(None, 1)
        if words and words[0].strip('`",.:;') in OPENERS:
            found.append(f"line {line}: {text.strip().splitlines()[0]}")
    return found


def names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that a file gives: of classes, functions, parameters, variables and attributes."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("folder", [*FOLDERS, "benchmarks", "tests", "tools"])
def test_docstrings_begin_with_a_sentence_or_a_noun(folder: str) -> None:
    files = files_in(folder)
    assert files
    nodes = nodes_of.__wrapped__ if folder == "tests" else nodes_of  # read here alone: kept, they would take 170 MiB
    assert not {str(path.relative_to(ROOT)): found for path in files if (found := fragments(nodes(path)))}


def test_fragments_are_found() -> None:
    source = '"""A page table."""\nclass Table:\n    """Where pages lie."""\n    size: int\n    """Of a page."""\n'
    assert fragments(ast.walk(ast.parse(source))) == ["line 3: Where pages lie.", "line 5: Of a page."]


def words_of(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower()))


def test_names_are_the_fields_words() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        for name in names(nodes_of(path))
        if METAPHORS & words_of(name)
    }
    assert not wrong


@pytest.mark.parametrize("word", VAGUE)
def test_few_names_say_nothing(word: str) -> None:
    vague = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        for name in names(nodes_of(path))
        if word in words_of(name)
    ]
    assert len(vague) <= VAGUE[word], "\n".join(vague)


@cache
def files_of_classes() -> dict[str, list[str]]:
    """Files in which a class of that name, or of that name behind an underscore, is defined."""
    found = defaultdict(list)
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("name", GENERIC)
def test_a_general_name_is_of_one_class(name: str) -> None:
    assert len(files_of_classes()[name]) <= 1


def test_functions_outside_kernels_have_few_parameters() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in FILES
        if "kernels" not in path.parts
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) > MOST_PARAMETERS
    ]
    assert not wrong

"""Mutation testing of one part of the engine by its own tests: would one notice if this line said something else?

    pip install cosmic-ray
    python -m tools.mutants                                        60 mutants of scheduler and cache, drawn by seed 1
    python -m tools.mutants --room chat --sample 200 --seed 2      others, of another part: see `ROOMS`
    python -m tools.mutants --room chat --only 3,17                these numbers of the same draw again
    python -m tools.mutants --room chat --judges tests/grammar/chat/test_plan.py       by these tests alone

The mutants are those of Cosmic Ray's operators (an operator of the language exchanged, a number changed, a condition
negated, a loop without a turn, another exception, a decorator removed). One that differs in nothing but annotations
and docstrings, which nobody executes, is not drawn. What survives is printed as a difference; tools/mutants.md says of
known survivors why they may.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import importlib
import inspect
import os
import pickle
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Room(NamedTuple):
    """Code that is changed, and the tests that judge it."""

    sources: tuple[str, ...]
    """Folders and files whose lines are changed, by the paths that they are imported from."""
    judges: tuple[str, ...]
    """Tests that are fast."""
    slow: tuple[str, ...] = ()
    """Names of judges of several seconds each, which are left out."""


ROOMS = {
    "scheduler": Room(
        ("asyncengine/scheduler", "asyncengine/kvcache", "asyncengine/engine/prefix_store.py"),
        ("tests/core/kvcache", "tests/core/scheduler", "tests/core/engine/test_prefix_store.py",
         "tests/integrations/cli/test_cache.py", "tests/worlds/test_random_lives.py"),
        ("test_long_answers_are_found_by_the_next_turn", "test_shares_follow_the_weights",
         "test_accounts_are_kept_while_they_matter", "test_prefixes_of_any_length_are_found"),
    ),
    "engine": Room(("asyncengine/engine",), ("tests/core/engine",)),
    "closing": Room(("asyncengine/grammar/closing",), ("tests/grammar/test_closing.py",)),
    "text": Room(("asyncengine/text",), ("tests/core/text",)),
    "chat": Room(("asyncengine/grammar/chat",), ("tests/grammar/chat",)),
    "layers": Room(("asyncengine/execution/layers",), ("tests/execution/layers",)),
}  # fmt: skip
_LEFT_OUT = (
    "VariableReplacer", "VariableInserter", "ReplaceComparisonOperator_Eq_Is", "ReplaceComparisonOperator_NotEq_IsNot",
)  # fmt: skip
"""Operators that have to be told names, and those that change nothing where small numbers are compared."""
_COPIED = ("asyncengine", "grammar", "lora", "integrations", "tests", "pyproject.toml", "README.md")
_PATIENCE, _LEAST_PATIENCE = 4, 10.0
"""A mutant that takes so many times as long as its judges on the unchanged tree, and so many seconds, hangs, which is
noticed as well."""


class Mutant(NamedTuple):
    """One change of one file."""

    path: str
    operator: str
    """The name of the operator of Cosmic Ray."""
    occurrence: int
    """The place in the file, among those where the operator applies."""
    code: str
    """The file as changed."""


def executed(code: str) -> str:
    """The part of a module that is executed: everything but annotations and docstrings. Raises `SyntaxError`."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def places(paths: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """(path, operator, occurrence) of every mutant of these files, those of annotations included."""
    from cosmic_ray.ast import get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in operator_names() if name.rpartition("/")[2] not in _LEFT_OUT]
    for path in paths:
        nodes = list(_nodes(get_ast_from_path(ROOT / path)))
        for name in names:
            operator = get_operator(name)()
            for number in range(sum(1 for node in nodes for _ in operator.mutation_positions(node))):
                yield path, name, number


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def mutant_at(path: str, name: str, occurrence: int) -> Mutant | None:
    """The mutant of a place; None if it is executed like the file itself, or not at all."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / path).read_text(encoding="utf-8")
    code = mutate_code(source, get_operator(name)(), occurrence)
    if code is None:
        return None
    try:
        return None if executed(code) == executed(source) else Mutant(path, name, occurrence, code)
    except SyntaxError:
        return None


def draw(sources: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of all files, each place as likely as any other."""
    paths = [
        path.relative_to(ROOT).as_posix()
        for source in sources
        for path in ([ROOT / source] if source.endswith(".py") else sorted((ROOT / source).rglob("*.py")))
    ]
    everywhere = list(places(paths))
    random.Random(seed).shuffle(everywhere)
    drawn: list[Mutant] = []
    for place in everywhere:
        if len(drawn) == count:
            break
        mutant = mutant_at(*place)
        if mutant is not None:
            drawn.append(mutant)
    return drawn


def difference(mutant: Mutant) -> str:
    """The lines that it changes."""
    before = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(before, mutant.code.splitlines(), mutant.path, mutant.path, "", "", 1, "")
    return "\n".join(list(lines)[2:])


class Judges:
    """Plugin of pytest that has the collected tests judge mutants, each in a process forked from this one.

    Everything is imported once. In the child of a mutant of a function, the function gets the mutant's code, and those
    tests run that have called it before, the fastest first, until one fails.
    """

    def __init__(self, mutants: dict[int, Mutant], chosen: Sequence[str], tree: Path) -> None:
        """`mutants` by number. `chosen`: pytest's arguments. `tree`: a copy of the tree, for mutants that are more than
        functions."""
        self.mutants, self.chosen, self.tree = mutants, chosen, tree
        self.survivors = 0

    def pytest_runtestloop(self, session: Any) -> bool:
        """Judge in place of running the tests."""
        items: list[Any] = session.items
        for path in {mutant.path for mutant in self.mutants.values()}:
            importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if session.testsfailed or not items:
            raise session.Failed("the judges cannot be collected")
        found = in_child(lambda: observe(items), None)
        if not isinstance(found, list):
            raise session.Failed(f"the tree itself fails: {found}")
        order = sorted(range(len(items)), key=lambda each: found[each][0])
        for number, mutant in self.mutants.items():
            said = self._judge(mutant, items, order, found)
            self.survivors += not said
            name = mutant.operator.rpartition("/")[2]
            print(f"{number} {mutant.path} {name} {mutant.occurrence}: {said or 'SURVIVES'}", flush=True)
            if not said:
                print(difference(mutant), flush=True)
        return True

    def _judge(self, mutant: Mutant, items: list[Any], order: list[int], found: list[Any]) -> str:
        """The test that fails; "" if none does."""
        before = compile((ROOT / mutant.path).read_text(encoding="utf-8"), mutant.path, "exec")
        changes = changed_functions(before, compile(mutant.code, mutant.path, "exec"))
        if changes is None:
            return judged_anew(self.tree, mutant, self.chosen, limit(found))
        lines = {(mutant.path, old.co_firstlineno) for old, _ in changes}
        judging = [each for each in order if lines & found[each][1]]
        chosen = [items[each] for each in judging]

        def run() -> str:
            exchange(changes)
            return next((item.nodeid for item, after in pairwise([*chosen, None]) if fails(item, after)), "")

        return str(in_child(run, limit(found[each] for each in judging)))


def limit(found: Iterable[tuple[float, Any]]) -> float:
    """Seconds after which a mutant that these tests judge hangs."""
    return max(_LEAST_PATIENCE, _PATIENCE * sum(seconds for seconds, _ in found))


def fails(item: Any, after: Any) -> bool:
    """Whether a test fails. `after`: the next one, which may share its fixtures."""
    from _pytest.runner import runtestprotocol

    return any(report.failed for report in runtestprotocol(item, nextitem=after, log=False))


def observe(items: list[Any]) -> list[tuple[float, set[tuple[str, int]]]] | str:
    """Seconds of each test, and (path, first line) of the functions that it calls; or the test that fails."""
    called: set[tuple[str, int]] = set()
    root = f"{ROOT}/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(root):
            called.add((name.removeprefix(root), frame.f_code.co_firstlineno))

    found = []
    threading.setprofile(note)
    for item, after in pairwise([*items, None]):
        called.clear()
        began = time.perf_counter()
        sys.setprofile(note)
        failed = fails(item, after)
        sys.setprofile(None)
        if failed:
            return str(item.nodeid)
        found.append((time.perf_counter() - began, set(called)))
    return found


def in_child(work: Callable[[], Any], limit: float | None) -> Any:
    """The result of `work` in a forked process, or how that ended: after `limit` seconds it is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)  # so that what a test has started ends with it
        os.close(reader)
        with open(writer, "wb") as pipe:
            try:
                said = pickle.dumps((work(), ""))
            except Exception:  # of this tool
                said = pickle.dumps((None, traceback.format_exc()))
            pipe.write(said)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        late = limit is not None and not select.select([pipe], [], [], limit)[0]
        if late:
            os.killpg(child, signal.SIGKILL)
        said = pipe.read()
    os.waitpid(child, 0)
    if late or not said:
        return "it hangs" if late else "it ends its process"
    result, error = pickle.loads(said)
    if error:
        raise RuntimeError(error)
    return result


Changes = list[tuple[CodeType, CodeType]]
"""Functions, each as it is and as the mutant has it."""


def changed_functions(before: CodeType, after: CodeType) -> Changes | None:
    """The outermost functions of a module (or class) whose code differs; None: something else does, too."""

    def inner(code: CodeType) -> list[CodeType]:
        return [each for each in code.co_consts if isinstance(each, CodeType)]

    def own(code: CodeType) -> tuple[Any, ...]:
        consts = [each for each in code.co_consts if not isinstance(each, CodeType)]
        return code.co_code, repr(consts), code.co_names, code.co_varnames, code.co_freevars, len(inner(code))

    if own(before) != own(after):
        return None
    changes: Changes = []
    for old, new in zip(inner(before), inner(after), strict=True):
        if old == new:
            continue
        if old.co_flags & inspect.CO_OPTIMIZED:  # a function
            if (old.co_freevars, old.co_firstlineno) != (new.co_freevars, new.co_firstlineno):
                return None
            changes.append((old, new))
        else:
            further = changed_functions(old, new)
            if further is None:
                return None
            changes += further
    return changes


def exchange(changes: Changes) -> None:
    """Give all functions of this process that have the code of one the code of its mutant."""
    gc.unfreeze()
    functions = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    for old, new in changes:
        found = [function for function in functions if function.__code__ == old]
        assert found, f"nobody has loaded {old.co_qualname}"
        for function in found:
            function.__code__ = new


def judged_anew(tree: Path, mutant: Mutant, chosen: Sequence[str], limit: float) -> str:
    """The first judge that fails in a copy of the tree with the mutant; "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", *chosen]
    there = {"PYTHONPATH": str(tree)}
    (tree / mutant.path).write_text(mutant.code, encoding="utf-8")
    try:
        run = subprocess.run(
            command, cwd=tree, env={**os.environ, **there}, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "it hangs"
    finally:
        shutil.copy(ROOT / mutant.path, tree / mutant.path)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit status {run.returncode}" if run.returncode else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants and judge them; the exit status says whether one has survived."""
    import pytest

    parser = argparse.ArgumentParser(prog="python -m tools.mutants")
    parser.add_argument("--room", choices=ROOMS, default="scheduler", help="the code that is changed, with its tests")
    parser.add_argument("--judges", nargs="+", help="tests in place of the room's")
    parser.add_argument("--sample", type=int, default=60, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="numbers of the draw, with commas between; all others are left out")
    options = parser.parse_args(arguments)
    room = ROOMS[options.room]
    judging = [*(options.judges or room.judges), "-k", " and ".join(f"not {name}" for name in room.slow)]
    only = {int(number) for number in options.only.split(",") if number}
    drawn = enumerate(draw(room.sources, options.sample, options.seed))
    mutants = {number: mutant for number, mutant in drawn if not only or number in only}
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, tree / name)
        judges = Judges(mutants, judging, tree)
        status = pytest.main(["-p", "no:cacheprovider", *judging], [judges])
    print(f"{judges.survivors} of {len(mutants)} mutants survive")
    return int(status) or bool(judges.survivors)


if __name__ == "__main__":
    sys.exit(main())

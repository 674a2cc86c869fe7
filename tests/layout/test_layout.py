"""The shape of the repository: what is packaged, what lands in site-packages, who imports whom, how long things are."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from support.trees import nodes_of

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]
PACKAGE_DIR: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
GUARDED = ("grammar", "lora", "integrations")

MAX_FILE_LINES = 450
"""A file holds one concept, long or short. At 300, files that stood at the cap sent two dozen lines of theirs
elsewhere, where nobody looked for them."""
LONGER = {"asyncengine/async_engine.py": 480, "asyncengine/config.py": 500}
"""The public face is one class: a few lines of code for each thing that a caller may ask, under its whole contract.
Settings stand in one file, each under its limits and its description."""
MAX_FUNCTION_LINES = 60


def folder_of(package: str) -> Path:
    """Folder of a package's sources, by the longest mapped prefix."""
    parts = package.split(".")
    for size in range(len(parts), 0, -1):
        mapped = PACKAGE_DIR.get(".".join(parts[:size]))
        if mapped is not None:
            return ROOT.joinpath(mapped, *parts[size:])
    raise AssertionError(f"{package} is not under any mapped folder")


def sources() -> list[tuple[str, Path]]:
    """(module name, file) of everything that is shipped."""
    found = []
    for package in PACKAGES:
        for path in sorted(folder_of(package).glob("*.py")):
            found.append((package if path.stem == "__init__" else f"{package}.{path.stem}", path))
    return found


def tools() -> list[tuple[str, Path]]:
    """(module name, file) of what makers run."""
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), path)
        for path in sorted((ROOT / "tools").rglob("*.py"))
    ]


def test_every_folder_with_python_files_is_packaged() -> None:
    """The explicit list equals the tree: a forgotten package would only be missed after a plain install."""
    listed = {folder_of(package) for package in PACKAGES}
    tree = {
        path.parent
        for top in ("asyncengine", *GUARDED)
        for path in (ROOT / top).rglob("*.py")
        if not any((ROOT / top / part).is_symlink() for part in path.relative_to(ROOT / top).parts[:1])
    }
    assert listed == tree


def test_top_level_is_as_agreed() -> None:
    folders = {"asyncengine", "integrations", "grammar", "lora", "tests", "docs", "tools"}
    assert {"pyproject.toml", "README.md", *folders} <= {path.name for path in ROOT.iterdir()}
    for name in GUARDED:
        link = ROOT / "asyncengine" / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == ROOT / name


def test_guarded_packages_have_one_name() -> None:
    """`import grammar` from a checkout would make second copies of everything; it must say what to do instead."""
    probe = "import asyncengine.{0}\ntry:\n import {0}\nexcept ImportError as error:\n print(error)"
    code = "\n".join(probe.format(name) for name in GUARDED)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [f"import asyncengine.{name}, not {name}" for name in GUARDED]


def shipped_files() -> list[Path]:
    """Files that a build may read. Git is not asked: a checkout may be an unpacked archive."""
    top = {"pyproject.toml", "README.md", "LICENSE"}
    tops = {"asyncengine", *(Path(folder).parts[0] for folder in PACKAGE_DIR.values())}
    found = [ROOT / name for name in sorted(top)]
    for folder in sorted(tops):
        for here, folders, files in os.walk(ROOT / folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            links = [name for name in folders if (Path(here) / name).is_symlink()]
            found += [Path(here) / name for name in [*sorted(files), *links]]
    return found


def test_wheel_contents(tmp_path: Path) -> None:
    """A plain install puts three names into site-packages, all modules, types, the demo models and the adapters."""
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    copy = tmp_path / "copy"
    for source in shipped_files():
        target = copy / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.exists():
            target.write_bytes(source.read_bytes())
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"asyncengine", "langchain_asyncengine", "llama_index"}
    assert "llama_index/__init__.py" not in names
    for part in ("llms", "embeddings", "postprocessor"):
        assert f"llama_index/{part}/__init__.py" not in names, "a package of LlamaIndex's would be hidden"
    shipped = {"py.typed", "__init__.pyi", "kernels/api.pyi", "assembly/gguf_text/harmony.jinja"}
    assert {f"asyncengine/{file}" for file in shipped} <= set(names)
    assert {f"asyncengine/integrations/http/page/{file}" for file in ("index.html", "openapi.json", "page.js")} <= set(
        names
    )
    assert "asyncengine/integrations/http/fields.txt" in names
    for module, path in sources():
        assert module.replace(".", "/") + ("/__init__.py" if path.stem == "__init__" else ".py") in names
    for file in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert f"asyncengine/demo/model/{file}" in names
    for file in ("config.json", "model.safetensors", "modules.json", "tokenizer.json", "1_Pooling/config.json"):
        assert f"asyncengine/demo/embedder/{file}" in names
    for folder in ("draft", "reranker", "vision"):
        for file in ("README.md", "config.json", "model.safetensors"):
            assert f"asyncengine/demo/{folder}/{file}" in names
    for adapter in ("json", "pirate"):
        for file in ("README.md", "adapter_config.json", "adapter_model.safetensors"):
            assert f"asyncengine/demo/adapters/{adapter}/{file}" in names
    assert wheel.stat().st_size < 16_000_000


def test_what_only_makers_run_is_not_shipped() -> None:
    """The folder of the bundled model holds the model, and nothing shipped needs what made it."""
    assert [path.name for path in (ROOT / "asyncengine" / "demo").glob("*.py")] == ["__init__.py"]
    makers = ("makers", "tools", "benchmarks", "tests", "examples")
    assert not [
        f"{module} imports {name}"
        for module, path in sources()
        for name in imported(path)
        if name.split(".")[0] in makers
    ]


# ---------------------------------------------------------------- imports

BASE = {
    "errors", "sampling_params", "options", "request_spec", "config", "step", "outputs", "info", "events", "stats",
    "cache_news", "request_output", "checks", "images", "seams", "activations", "pooling_spec", "progress", "files",
}  # fmt: skip
"""Plain data, plug points and small helpers: anybody may import them."""

ROOT_ONLY = {
    "async_engine",
    "batches",
    "engine_base",
    "sync_engine",
    "engine_group",
    "session",
    "shared",
    "stream",
    "build",
}
"""Beside these two sets of files the root of the package holds nothing but `ALIASES`."""
ALIASES = {"serve", "training", "cli"}
"""Older public names of integrations, beside those in `asyncengine.cluster`."""

EXECUTION = {
    "device": {"device"},
    "attention": {"attention", "device"},
    "layers": {"layers", "attention", "device"},
    "pooling": {"pooling"},
    "models": {"models", "pooling", "layers", "attention", "device"},
    "sampling": {"sampling", "device"},
    "runner": {"runner", "pooling", "sampling", "models", "layers", "attention", "device"},
}
"""Rooms of `execution`, and those of its own that each may import; all may import kernels."""
ALLOWED = {
    "kvcache": {"kvcache"},
    "speculation": {"speculation"},
    "policies": {"policies", "scheduler"},  # of that, types alone: see `test_nothing_imports_in_a_circle`
    "scheduler": {"scheduler", "kvcache", "policies", "speculation"},
    "integrations.placement": {"integrations.placement"},
    "kernels": {"kernels"},
    **{
        f"execution.{room}": {"kernels", *(f"execution.{other}" for other in others)}
        for room, others in EXECUTION.items()
    },
    "text": {"text"},
    "grammar.chat": {"grammar.chat", "text", "grammar"},
    "grammar": {"grammar", "text"},
    "integrations.http.dialects": {
        "integrations.http.dialects", "integrations.http.turn", "integrations.http.events", "integrations.http.fields",
        "integrations.http.problems", "grammar",
    },
    "integrations.http.turn": {"grammar"},
    "integrations.http.events": set(),
    "integrations.http.fields": set(),
    "integrations.http.problems": set(),
    "lora": {"lora", "lora.checkpoint"},
    "lora.checkpoint": {"lora", "lora.checkpoint"},
    "lora.layers": {"lora.layers", "execution.layers", "execution.attention", "execution.device", "kernels"},
}  # fmt: skip
ALLOWED["execution.runner"] |= {"lora.layers"}
PURE = (
    "kvcache", "policies", "scheduler", "speculation", "integrations.placement", "step", "sampling_params", "options",
    "request_spec", "cache_news", "config", "checks", "images", "outputs", "info", "seams",
    "integrations.http.dialects",
    "integrations.http.turn", "integrations.http.events",
)  # fmt: skip
"""No await, no torch."""
NUMBERS = {"speculation": {"numpy"}, "integrations.placement": {"numpy"}}
"""Pure parts that look through long texts or many nodes."""


def imported(path: Path) -> list[str]:
    return names_in(nodes_of(path))


def names_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Every module that they import, and every name they import from one."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room(name: str) -> str:
    """The longest part of a module's name that has a line of its own above, or its first part behind the package's:
    "asyncengine.scheduler.queues" -> "scheduler"; "asyncengine" -> ""."""
    inner = name.split(".")[1:]
    rooms = [".".join(inner[:size]) for size in (3, 2)]
    return next((each for each in rooms if each in ALLOWED or each in BASE), [*inner, ""][0])


def test_imports_point_one_way() -> None:
    wrong = []
    for module, path in sources():
        here = room(module)
        if here not in ALLOWED:
            continue
        for name in imported(path):
            if not name.startswith("asyncengine."):
                continue
            there = room(name)
            if there not in ALLOWED[here] | BASE:
                wrong.append(f"{module} imports {name}")
    assert not wrong


INNER = tuple(f"asyncengine.integrations.{name}" for name in ("cli", "fleet", "http", "trl.exact"))
"""Integrations that know more than the public names: tests/layout/test_seams.py counts what they know."""


def test_adapters_use_the_public_names() -> None:
    """Integrations import what every user can: `from asyncengine import ...`."""
    public = {"asyncengine", "asyncengine.errors", "asyncengine.grammar", "asyncengine.integrations"}
    public |= {"asyncengine.events", "asyncengine.checks"}  # for `on_event`, and of the base, which anybody may import
    inner = (*INNER, "asyncengine.integrations.placement")
    wrong = []
    for module, path in sources():
        if not module.startswith("asyncengine.integrations") or module.startswith(inner):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asyncengine"):
                name = node.module or ""
                if name not in public and not name.startswith("asyncengine.integrations."):
                    wrong.append(f"{module} imports {name}")
    assert not wrong


def test_the_root_holds_public_names_and_plain_data() -> None:
    files = {path.stem for path in (ROOT / "asyncengine").glob("*.py")}
    assert files == {"__init__", "__main__", *ROOT_ONLY, *ALIASES, *(name for name in BASE if "." not in name)}


def runtime(path: Path) -> list[ast.AST]:
    """Nodes of a file without what only type checkers see."""
    nodes = nodes_of(path)
    guards = (node for node in nodes if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    unseen = {id(inner) for guard in guards if guard.test.id == "TYPE_CHECKING" for inner in ast.walk(guard)}
    return [node for node in nodes if id(node) not in unseen]


def test_pure_parts_stay_pure() -> None:
    wrong = []
    for module, path in sources():
        if room(module) not in PURE:
            continue
        nodes = runtime(path)
        refused = {"torch", "numpy", "transformers", "asyncio", "anyio"} - NUMBERS.get(room(module), set())
        if any(name.split(".")[0] in refused for name in names_in(nodes)):
            wrong.append(f"{module} imports more than data")
        if any(isinstance(node, ast.Await) for node in nodes):
            wrong.append(f"{module} awaits")
    assert not wrong


def circular(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """The names that lie on a circle of arrows, or from which one is reached."""
    left = dict(arrows)
    while leaves := [here for here in left if not any(there in left for there in left[here])]:
        for here in leaves:
            del left[here]
    return sorted(left)


def test_circles_are_found() -> None:
    assert circular({"a": "b", "b": "ca", "c": "d", "d": ""}) == ["a", "b"]


def test_nothing_imports_in_a_circle() -> None:
    """Circles are sought among the parts; what only type checkers see does not count."""
    arrows: dict[str, dict[str, str]] = {}
    for module, path in sources():
        here = room(module)
        for name in names_in(runtime(path)):
            there = room(name)
            if here in {*ALLOWED, *BASE} and there in {*ALLOWED, *BASE} and there != here:
                arrows.setdefault(here, {})[there] = f"{module} imports {name}"
    assert not circular(arrows), arrows


def leaves_of(node: ast.AST) -> list[str]:
    """Names that an import brings, without the packages that they lie in."""
    found = names_in([node])
    return found[1:] if isinstance(node, ast.ImportFrom) else found


LATE = {"asyncengine.grammar.spec"}
"""Files of which only the imports at the top count: constructors of `Grammar` import, when they are called, what makes
their texts, and that makes grammars."""


def test_no_file_imports_in_a_circle() -> None:
    """Imports in functions count; those for type checkers, and the whole package, which precedes all, do not."""
    modules, arrows = dict(sources()), {}
    for module, path in modules.items():
        nodes = runtime(path)
        if module in LATE:
            functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
            inside = {id(inner) for function in functions for inner in ast.walk(function)}
            nodes = [node for node in nodes if id(node) not in inside]
        arrows[module] = {
            name if name in modules else name.rpartition(".")[0] for node in nodes for name in leaves_of(node)
        } & modules.keys() - {module, "asyncengine"}
    assert not circular(arrows)


def test_a_policy_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name stands in its class; the setting, the command line and the engine go by the registry."""
    from support.fake_engine import Steps

    from asyncengine.integrations.cli.main import main
    from asyncengine.policies import POLICIES, ShortestRemaining

    monkeypatch.setitem(POLICIES, "brand-new", type("BrandNew", (ShortestRemaining,), {"name": "brand-new"}))
    steps = Steps(policy="brand-new", max_num_seqs=1)
    tickets = [steps.add([2, 3], count) for count in (3, 2, 1)]
    steps.run()
    assert [*steps.ended] == tickets[::-1]
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert ",".join(POLICIES) in "".join(capsys.readouterr().out.split())
    page = (ROOT / "docs" / "howto" / "deadlines_and_backpressure.md").read_text(encoding="utf-8")
    assert [name for name in POLICIES if f"`{name}`" not in page] == ["brand-new"]
    elsewhere = [
        f"{module}: {node.value}"
        for module, path in sources()
        if room(module) != "policies"
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in {*POLICIES} - {"priority"}  # a field's name as well
    ]
    assert elsewhere == ["asyncengine.config: fcfs"], "the default"


def test_benchmarks_are_run_and_imported_as_a_package() -> None:
    """`python -m benchmarks.x` from the root: a sibling's bare name, or a script's path, would not be found then."""
    scripts = {path.stem: path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"}
    wrong = [
        f"{path.name} imports {name}" for path in scripts.values() for name in imported(path)
        if name.split(".")[0] in scripts
    ]  # fmt: skip
    wrong += [
        f"{page.relative_to(ROOT)} names {script}"
        for folder in ("benchmarks", "docs")
        for page in (*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.py"))
        for script in re.findall(r"python benchmarks/\S+", page.read_text(encoding="utf-8"))
    ]
    assert scripts
    assert not wrong


def test_only_assembly_wires() -> None:
    """The engine's files know runners, models, sampling and attention only through protocols; only assembly and the
    package itself know the demo model, and `shared` its name."""
    knowing = (
        "asyncengine.assembly",
        "asyncengine.execution",
        "asyncengine.testing",
        "asyncengine.lora.layers",
        *INNER,
    )
    wrong = [
        f"{module} imports {name}"
        for module, path in sources()
        if module not in ("asyncengine", "asyncengine.shared") and not module.startswith(knowing)
        for name in imported(path)
        if name.startswith(("asyncengine.execution", "asyncengine.lora.layers", "asyncengine.demo"))
    ]
    assert not wrong


def test_importing_and_loading_import_only_what_they_need() -> None:
    """No torch, no transformers, no framework before somebody loads a model; a path is looked at before torch is
    imported, and the demo model never has transformers imported."""
    probe = (
        "import sys, asyncengine, asyncengine.integrations.cli.main;"
        "heavy = ('torch','transformers','langchain_core','llama_index.core','flashinfer');"
        "print([m for m in heavy if m in sys.modules]);"
        "from asyncengine import Engine, EngineConfig; from asyncengine.integrations.cli.loading import check_paths;"
        "check_paths('demo', EngineConfig()); print('torch' in sys.modules);"
        "engine = Engine.from_pretrained('demo', show_progress=False);"
        "engine.chat([{'role': 'user', 'content': 'hi'}]); engine.close();"
        "print([m for m in ('transformers', 'huggingface_hub', 'torch._dynamo') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:3] == ["[]", "False", "[]"], run.stderr


# ---------------------------------------------------------------- lengths


def test_files_are_short() -> None:
    long = {}
    for _, path in [*sources(), *tools()]:
        name = path.relative_to(ROOT).as_posix()
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGER.get(name, MAX_FILE_LINES):
            long[name] = lines
    assert not long


def test_functions_fit_a_screen() -> None:
    long = []
    for module, path in [*sources(), *tools()]:
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{module}.{node.name}: {lines} lines")
    assert not long

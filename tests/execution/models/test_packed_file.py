"""Packed weights in a file: a load that maps it has the bits of one that packs, and no other file is ever taken."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.checkpoints import Checkpoint
from support.data import cases_of
from support.demo_gguf import write_demo
from support.forwards import logits_of
from support.quantized_checkpoints import quantized
from support.reachable import tensors_in
from support.tiny_encoders import make_encoder
from support.tiny_models import FAMILIES, make_checkpoint

import asyncengine
from asyncengine import EngineConfig
from asyncengine.execution.models import identity, loading, packed_file
from asyncengine.execution.runner.model_memory import prepare_update

if not sys.platform.startswith("linux"):
    pytest.skip("memory is mapped over on Linux alone", allow_module_level=True)

IDS = [3, 17, 40, 9, 3, 3, 88]
Load = Callable[..., tuple[Any, int]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load with a cache folder; the model, and how many tensors were read from its checkpoint."""
    counts: list[int] = []
    load_weights = loading.load_weights

    def counted(checkpoint: Any, slots: Any, names: Mapping[str, str], progress: Any) -> None:
        counts.append(len(names))
        load_weights(checkpoint, slots, names, progress)

    monkeypatch.setattr(loading, "load_weights", counted)
    monkeypatch.setattr(packed_file, "_LEAST", 1)

    def load(folder: Path, *, task: str = "generate", **fields: Any) -> tuple[Any, int]:
        config = EngineConfig(**{"show_progress": False, "weight_cache_dir": str(tmp_path / "kept"), **fields})
        load_one = loading.load_encoder if task == "embed" else loading.load_model
        return load_one(str(folder), config).model, counts[-1]

    return load


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").glob("[!.]*.packed"))


def same_bits(one: Any, other: Any) -> bool:
    """Whether the models hold the same bytes. Memory that is padding alone is never filled, and so zeros in both."""

    def parts(model: Any) -> list[torch.Tensor]:
        return [slot_memory for _, slot in sorted(dict(model.slots()).items()) for slot_memory in slot.memory]

    pairs = list(zip(parts(one), parts(other), strict=True))
    pairs += list(zip(tensors_in(one.layers), tensors_in(other.layers), strict=True))
    return bool(pairs) and all(
        torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in pairs
    )


FORMS: Mapping[str, tuple[str, dict[str, Any], bool]] = cases_of(__file__)


@pytest.mark.parametrize("form", FORMS)
def test_mapped_weights_are_the_packed_ones(form: str, load: Load, checkpoint: Checkpoint, tmp_path: Path) -> None:
    name, fields, stored = FORMS[form]
    folder = checkpoint(name)
    if stored:
        config = FAMILIES[name]()
        config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
        folder = quantized(tmp_path / "plain", tmp_path / "stored", "gptq act-order")
    plain, every = load(folder, weight_cache_dir=None, **fields)
    packing, read = load(folder, **fields)
    (file,) = kept(tmp_path)
    content = file.read_bytes()
    mapping, few = load(folder, **fields)
    assert read == every
    assert few < 0.7 * every
    assert same_bits(plain, packing)
    assert same_bits(plain, mapping)
    assert torch.equal(logits_of(plain, IDS), logits_of(mapping, IDS))
    assert file.read_bytes() == content


def test_a_gguf_file_and_an_encoder_are_mapped(load: Load, tmp_path: Path) -> None:
    write_demo(tmp_path / "demo.gguf", "Q4_K_M")
    _, every = load(tmp_path / "demo.gguf")
    mapping, few = load(tmp_path / "demo.gguf")
    plain, _ = load(tmp_path / "demo.gguf", weight_cache_dir=None)
    assert few < every / 2
    assert same_bits(plain, mapping)
    assert torch.equal(logits_of(plain, IDS), logits_of(mapping, IDS))
    make_encoder("bert", tmp_path / "bert")
    _, every = load(tmp_path / "bert", task="embed")
    mapping, few = load(tmp_path / "bert", task="embed")
    plain, _ = load(tmp_path / "bert", task="embed", weight_cache_dir=None)
    assert few < every
    assert all(map(torch.equal, tensors_in(plain.layers), tensors_in(mapping.layers)))
    assert len(kept(tmp_path)) == 2


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def overwrite(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.write(b"x" * 32)


def open_to_others(file: Path) -> None:
    file.chmod(0o666)


def link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


@pytest.mark.parametrize("spoil", [cut, overwrite, open_to_others, link])
def test_a_file_that_is_not_ours_and_whole_is_made_anew(
    spoil: Callable[[Path], None], load: Load, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    first, every = load(checkpoint("llama"))
    (file,) = kept(tmp_path)
    content = file.read_bytes()
    spoil(file)
    again, read = load(checkpoint("llama"))
    assert read == every
    assert same_bits(first, again)
    assert file.read_bytes() == content
    assert not file.is_symlink()
    assert load(checkpoint("llama"))[1] < every


def test_another_checkpoint_or_setting_takes_no_other_s_file(load: Load, tmp_path: Path) -> None:
    """The checkpoint is written anew in place, with numbers of the same shapes."""
    folder = make_checkpoint("llama", tmp_path / "model")
    _, every = load(folder)
    make_checkpoint("llama", folder, seed=1)
    other, read = load(folder)
    plain, _ = load(folder, weight_cache_dir=None)
    assert read == every
    assert same_bits(other, plain)
    assert load(folder, dtype="bfloat16")[1] == every
    assert len(kept(tmp_path)) == 3


def test_whoever_is_killed_while_writing_leaves_nothing_that_is_read(
    load: Load, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    program = f"""
import os
from asyncengine.execution.models import packed_file
from asyncengine.execution.models.loading import load_model
from asyncengine import EngineConfig
packed_file._LEAST, made = 1, packed_file.written_whole
class Killed:
    def __init__(self, file): self.file, self.seek = file, file.seek
    def write(self, data):
        self.file.write(memoryview(data)[:len(data) // 2]); self.file.flush()
        if len(data) > 100: os._exit(9)
def killed(path):
    from contextlib import contextmanager
    @contextmanager
    def within():
        with made(path) as file: yield Killed(file)
    return within()
packed_file.written_whole = killed
config = EngineConfig(show_progress=False, weight_cache_dir={str(tmp_path / "kept")!r})
loaded = load_model({str(checkpoint("llama"))!r}, config)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert kept(tmp_path) == []
    assert len(list((tmp_path / "kept").glob(".*.packed"))) == 1
    _, every = load(checkpoint("llama"))
    assert list((tmp_path / "kept").glob(".*.packed")) == []
    assert load(checkpoint("llama"))[1] < every


def test_processes_that_load_at_once_have_one_file(load: Load, checkpoint: Checkpoint, tmp_path: Path) -> None:
    program = f"""
import re, sys
from asyncengine.execution.models import packed_file
from asyncengine.execution.models.loading import load_model
from asyncengine import EngineConfig
packed_file._LEAST = 1
config = EngineConfig(show_progress=False, weight_cache_dir={str(tmp_path / "kept")!r})
loaded = load_model({str(checkpoint("llama"))!r}, config)
print(sorted({{line.split()[4] for line in open("/proc/self/maps") if ".packed" in line and "deleted" not in line}}))
"""
    two = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate()[0] for each in two]
    (file,) = kept(tmp_path)
    assert said == [f"['{file.stat().st_ino}']\n"] * 2
    mapping, _ = load(checkpoint("llama"))
    plain, _ = load(checkpoint("llama"), weight_cache_dir=None)
    assert same_bits(plain, mapping)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_costs_the_file_alone(
    number: int, load: Load, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Full, or read-only from the middle of a file on."""

    class Full:
        def __init__(self, path: Path) -> None:
            self._whole = whole(path)

        def __enter__(self) -> Any:
            file = self._whole.__enter__()

            def write(data: Any) -> int:
                if len(data) > 100:
                    raise OSError(number, os.strerror(number))
                return int(file.write(data))

            return type("File", (), {"write": staticmethod(write), "seek": staticmethod(file.seek)})

        def __exit__(self, *error: Any) -> Any:
            return self._whole.__exit__(*error)

    whole = packed_file.written_whole
    monkeypatch.setattr(packed_file, "written_whole", Full)
    model, every = load(checkpoint("llama"))
    assert os.strerror(number) in caplog.text
    assert not [*kept(tmp_path), *(tmp_path / "kept").glob(".*")]
    plain, _ = load(checkpoint("llama"), weight_cache_dir=None)
    assert same_bits(plain, model)
    (tmp_path / "file").touch()
    caplog.clear()
    assert load(checkpoint("llama"), weight_cache_dir=str(tmp_path / "file" / "in"))[1] == every
    assert "packed weights are not kept" in caplog.text


def test_an_update_is_one_s_own(load: Load, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Copy on write: the file stays, so does what another process has of it; and memory can be given back."""
    load(checkpoint("llama"))
    live, other = load(checkpoint("llama"))[0], load(checkpoint("llama"))[0]
    (file,) = kept(tmp_path)
    content, before = file.read_bytes(), logits_of(other, IDS)
    new = make_checkpoint("llama", tmp_path / "new", seed=1)
    fresh, _ = load(new, weight_cache_dir=None)
    quiet = EngineConfig(show_progress=False)
    prepare_update(live, new, quiet)()
    assert torch.equal(logits_of(live, IDS), logits_of(fresh, IDS))
    live.options.memory.give_back()
    prepare_update(live, new, quiet)()
    assert torch.equal(logits_of(live, IDS), logits_of(fresh, IDS))
    assert torch.equal(logits_of(other, IDS), before)
    assert file.read_bytes() == content


def test_the_file_used_longest_ago_goes_first(load: Load, checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = ("llama", "qwen3", "gemma")
    for name in names[:2]:
        load(checkpoint(name))
    size = max(file.stat().st_size for file in kept(tmp_path))
    for age, file in enumerate(kept(tmp_path)):
        os.utime(file, (age, age))
    load(checkpoint("llama"))  # is used: the other one is the oldest now
    used = max(kept(tmp_path), key=lambda file: file.stat().st_mtime)
    load(checkpoint(names[2]), weight_cache_disk=2 * size)
    assert used in kept(tmp_path)
    assert len(kept(tmp_path)) == 2
    load(checkpoint("phi3"), weight_cache_disk=2**20)  # larger than all may be
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("folder", identity.SOURCES)
def test_the_code_that_decides_on_bits_is_in_the_digest(folder: str, tmp_path: Path) -> None:
    """Files of another release are not mapped: a change in any of these folders gives other names."""
    package = Path(asyncengine.__file__).parent
    for name in identity.SOURCES:
        shutil.copytree(package / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert identity.digest_of_code(tmp_path) == identity.digest_of_code()
    for some in [next((tmp_path / folder).rglob("*.py")), *(tmp_path / folder).rglob("*.toml")]:  # code, and all tables
        content = some.read_text()
        some.write_text(content + "\n# changed\n")
        assert identity.digest_of_code(tmp_path) != identity.digest_of_code()
        some.write_text(content)

"""The forward that is written down gives transformers' logits, computes what is wanted, and is nobody else's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint, MakeRunner, load_decoder
from support.drive import Driver, greedy_reference, prompts
from support.forwards import Forwards, logits_of
from support.long import LONG
from support.tiny_models import FAMILIES, VOCAB, make_model, save

from asyncengine.execution.layers.basic import Linear
from asyncengine.execution.models.families import NATIVE

WRITTEN = [name for name, make in FAMILIES.items() if make().model_type in NATIVE]
IN_PANELS = ("llama3.1-rope", "qwen3", "gemma2", "phi3", "ministral3", "gpt-oss", "glm4moe", "qwen3.5", "kimi-linear")
"""One family of each kind of rotation, and of what stands beside attention."""
IDS = list(range(3, 14))


@pytest.mark.parametrize(
    ("name", "panels"),
    [*((name, False) for name in (*WRITTEN, "phi3, partial", "stablelm, norms of heads")),
     *((name, True) for name in (WRITTEN if LONG else IN_PANELS))],
    indirect=["panels"],
)  # fmt: skip
def test_logits_are_transformers(name: str, panels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are far from the first, and each part of attention is by itself, as on GPUs and without a compiler, or
    in panels, in which `tests/execution/runner/test_families.py` compares all families from the first on. Logits are
    for all rows and for some."""
    # transformers scales the queries of Llama 4 by their place in the cache, whatever position_ids says
    first = 300 if name != "llama4" else 0
    if not panels:
        monkeypatch.setattr("asyncengine.execution.layers.options.compiler_missing", lambda *_: "none here")
    reference = make_model(name)
    reference.set_attn_implementation("eager")
    positions = torch.arange(first, first + len(IDS))[None]
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS]), position_ids=positions, use_cache=False).logits[0]
    model = load_decoder(save(reference, tmp_path))
    most = 1e-5 * float(expected.abs().max())
    for rows in (None, [0, 4, 10], [10]):
        forwards = Forwards(model, backend="auto" if panels else "torch")
        wanted = expected if rows is None else expected[rows]
        torch.testing.assert_close(forwards.step(IDS, rows=rows, shift=first), wanted, rtol=0.0, atol=most)


def test_rows_that_are_not_wanted_are_not_computed(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last MLP sees the wanted rows only, with the adapters of these; all of them where all are wanted."""
    model = load_decoder(checkpoint("llama"))
    seen: list[tuple[str, int, Any]] = []
    own = Linear.__call__

    def counted(self: Linear, x: torch.Tensor, adapters: Any = None) -> torch.Tensor:
        seen.append((self.path, len(x), adapters))
        return own(self, x)

    class Nothing:
        def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
            seen.append((path, len(x), self))

    monkeypatch.setattr(Linear, "__call__", counted)
    tokens, rows = Nothing(), Nothing()
    logits_of(model, IDS, rows=[2, 10], adapters=tokens, row_adapters=rows)
    places = {path: (count, adapters) for path, count, adapters in seen}
    assert places.pop("lm_head") == (2, rows)
    for path in ("model.layers.2.mlp.gate_proj", "model.layers.2.mlp.down_proj"):
        assert places.pop(path) == (2, rows)
    assert len(places) == 1 + 3 * 2 + 2 * 2
    assert set(places.values()) == {(11, tokens)}
    seen.clear()
    logits_of(model, IDS)
    assert {count for _, count, _ in seen} == {11}


def test_adapters_are_asked_at_every_place(checkpoint: Checkpoint) -> None:
    """Adapters are asked by the paths that `places` names, so that none can be forgotten."""
    model = load_decoder(checkpoint("qwen3"))
    seen: list[str] = []

    class Adapters:
        def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
            seen.append(path)

        def records(self, paths: tuple[str, ...]) -> None:
            return None

    logits_of(model, IDS, adapters=Adapters(), row_adapters=Adapters())
    assert seen == [target.path for target in model.lora_targets()]
    own = {name for name, _ in make_model("qwen3").named_modules()}
    assert {path for target in model.lora_targets() for path, _ in target.modules} <= own


def test_two_engines_in_two_threads(make_runner: MakeRunner) -> None:
    """Different models, written down and not, same process, at the same time."""
    names = ["llama", "gpt-oss", "llama"]
    prompt = prompts([14], VOCAB)[0]
    expected = [greedy_reference(make_model(name), prompt, 25) for name in names]
    runners = [make_runner(name) for name in names]
    start = threading.Barrier(len(names))
    outputs: dict[int, list[list[int]]] = {}

    def work(index: int, runner: Any) -> None:
        driver = Driver(runner)
        start.wait(60)
        outputs[index] = [driver.run([driver.job(prompt, 25)], chunk=5)[0] for _ in range(3)]

    threads = [threading.Thread(target=work, args=item) for item in enumerate(runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [outputs[index] for index in range(len(names))] == [[output] * 3 for output in expected]

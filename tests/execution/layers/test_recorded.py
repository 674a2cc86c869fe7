"""Short steps in one call: who gets it, that it gives the bits of the layers one by one, and when it is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint, MakeRunner
from support.data import cases_of
from support.drive import Driver, prompts
from support.forwards import Forwards
from support.layer_options import options
from support.panels import use_panels
from support.tiny_configs import FAMILIES, VOCAB, maker_of

from asyncengine.config import EngineConfig
from asyncengine.execution.device.cores import Cores, Sharing
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import decoder_config_of
from asyncengine.execution.models.loading import load_model

pytest.importorskip("numba")
CASES = cases_of(__file__)
FORMS: list[tuple[str, str, str | None]] = CASES["forms"]
"""Models, types and forms of weights; those of the tiny GPT-2 fill no panels, with biases."""


VARIANTS = {name: maker_of(fields) for name, fields in CASES["variants"].items()}
"""Tiny models in widths that fill panels, and of states those that kernels take, as those of real models do."""
BESIDE: list[tuple[str, str, str | None]] = CASES["beside"]
"""Experts beside what all rows share (gated; with a router in float32; behind a dense layer; in a hybrid), a state
beside attention, mixers alone, and layers of one branch."""


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in VARIANTS.items():
        monkeypatch.setitem(FAMILIES, name, make)


@pytest.fixture(autouse=True)
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)


def load(path: Any, **fields: Any) -> Decoder:
    model = load_model(str(path), EngineConfig(show_progress=False, **fields)).model
    assert isinstance(model, Decoder)
    return model


def test_who_gets_it(checkpoint: Checkpoint) -> None:
    """Models whose products are made by compiled kernels, which take any number of outputs (48 fill no panel)."""
    for dtype, expected in (("float32", True), ("float16", False)):
        model = load(checkpoint("llama"), dtype=dtype)
        assert (model.recorded is not None) == model.compiled == expected
        assert (f"recorded_layers x {len(model.layers)}" in model.describe()) == expected


NARROW = ("qwen2moe", "qwen3next", "mixtral", "phimoe", "bamba", "nemotron-3", "lfm2moe", "kimi-linear")
"""Tiny models whose experts' widths fill no panels, or whose states no kernel takes: no step is tried.
Each has a variant of other widths in `VARIANTS`."""
BY_TORCH: tuple[str, ...] = ()
"""Tiny models with a state layer for which there is no kernel."""


def test_which_families_are_recorded() -> None:
    """All that are written down, in 8 bits and widths of kernels: two steps of each, of which the second is replayed.
    Where torch computes between kernels, `found` says what."""
    found: dict[str, str | None] = {}
    others = []
    for name in FAMILIES:
        described = decoder_config_of(FAMILIES[name](), 64)
        if described is None:
            others.append(name)
            continue
        decoder = Decoder(described, options(torch.bfloat16, bits=8), 64)
        for slot in decoder.slots().values():
            slot.load(torch.full(slot.shape, 0.01))
        if decoder.recorded is None:
            found[name] = None
            continue
        forwards = Forwards(decoder)
        forwards.step([1, 2])
        forwards.step([3, 4])
        if decoder.recorded.obstacle is not None or not decoder.recorded.records:
            found[name] = decoder.recorded.obstacle
    assert found == dict.fromkeys((*NARROW, *BY_TORCH))
    assert {f"{name}, whole" for name in NARROW} <= set(VARIANTS)
    assert others == ["hunyuanmoe"]  # which transformers runs


@pytest.mark.parametrize(("name", "dtype", "quantization"), FORMS)
def test_to_the_bit(name: str, dtype: str, quantization: Any, checkpoint: Checkpoint) -> None:
    """Logits of 1, 2, 13 and 64 rows that decode, of a chunk, and of both together."""
    model = load(checkpoint(name), dtype=dtype, quantization=quantization)
    same_bits(model, [[3] * 64, [1], [1], [1] * 2, [1] * 64, [1] * 2, [1] * 13, [1] * 64, [20], [1, 1, 30, 1]])


@pytest.mark.parametrize(("name", "dtype", "quantization"), BESIDE)
def test_to_the_bit_of_what_lies_side_by_side(name: str, dtype: str, quantization: Any, checkpoint: Checkpoint) -> None:
    """Steps that read what the one before wrote, of one row and of several."""
    model = load(checkpoint(name, heavy=True), dtype=dtype, quantization=quantization)
    same_bits(model, [[3] * 5, [1], [1] * 5, [1, 1, 11, 1], [1], [1] * 5])
    assert f"recorded_layers x {len(model.layers)}" in model.describe()


def same_bits(model: Decoder, steps: list[list[int]]) -> None:
    """Logits of these steps with all layers in one call, and layer by layer."""
    recorded = model.recorded
    assert recorded is not None
    seen = []
    for form in (recorded, None):
        model.recorded = form
        forwards = Forwards(model, rows=64)
        found = []
        for counts in steps:
            ids = [(7 * place + len(counts)) % VOCAB for place in range(sum(counts))]
            found.append(forwards.step(ids, counts))
        seen.append(found)
    model.recorded = recorded
    for left, right in zip(*seen, strict=True):
        assert torch.equal(left, right)
        assert bool(left.isfinite().all())


@pytest.mark.parametrize(("name", "quantization"), [("qwen3", None), ("llama", "int8")])
def test_shared_among_threads_in_the_smallest_pieces(
    name: str, quantization: str | None, make_runner: MakeRunner
) -> None:
    """Rows so long that their keys are split among threads, next to short ones, are the same to the bit."""
    from asyncengine.kernels.cpu.team import Team

    runner = make_runner(name, quantization=quantization, max_num_batched_tokens=1024)
    inputs = prompts([530, 33, 5], VOCAB)

    def run() -> list[Any]:
        driver = Driver(runner)
        jobs = [driver.job(prompt, 6) for prompt in inputs]
        return [driver.run(jobs, 600), [job.logprobs for job in jobs]]

    alone = run()
    runner.cores.close()
    runner.small, team = False, Team(3, piece=1)
    runner.cores = Cores(3, sharing=Sharing(), team=team)
    assert run() == alone
    assert team.account.pieces > 100
    runner.cores.close()


def test_a_record_holds_nothing_of_its_step(checkpoint: Checkpoint) -> None:
    """Steps recorded again, of other tokens, at other addresses, among other segments, have the same record but for
    what is declared to change."""
    model = load(checkpoint("qwen3.5"))
    recorded: Any = model.recorded
    forwards = Forwards(model, rows=4)
    forwards.step([5, 6, 7], [3])
    tables, kept = [], []
    for counts in ([1, 1], [2], [1, 1]):
        recorded.records.clear()
        ids = [7 * len(kept) + place for place in range(sum(counts))]
        kept.append((forwards.context(counts), torch.tensor(ids), torch.arange(len(ids))))
        step, tokens, rows = kept[-1]
        with torch.inference_mode():
            kept.append(model.forward(tokens, step, rows))
        ((record, _),) = recorded.records.values()
        tables.append(record.table)
        kept.append([torch.empty(2, model.config.width) for _ in range(20)])
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0][0]) > 20


def test_what_stands_between_kernels_is_said_once(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """The step itself is right, and later ones are not tried."""
    model = load(checkpoint("qwen3"))
    expected = Forwards(model).step([5, 6])
    model = load(checkpoint("qwen3"))
    layer: Any = model.layers[1]
    own = layer.attention.qkv.weight.multiply
    layer.attention.qkv.weight.multiply = lambda x, bias: own(x * 1.0, bias)
    with caplog.at_level("INFO", "asyncengine"):
        for _ in range(2):
            assert torch.equal(Forwards(model).step([5, 6]), expected)
    said = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(said) == 1
    assert "aten.mul" in said[0]
    assert f"recorded_layers x {len(model.layers)}" not in model.describe()


def test_a_team_that_ends_meanwhile_is_no_part_of_a_record() -> None:
    """A recorded end would be replayed as another team's, or nobody's."""
    from asyncengine.kernels.cpu.team import Team
    from asyncengine.kernels.recording import Arena, Recorder

    team = Team(2)
    with Recorder(Arena(4096), []) as recorder:
        del team  # its finalizer stops it by a kernel, as the collector of garbage may at any moment
    assert recorder.obstacle is None
    assert len(recorder.record()) == 0

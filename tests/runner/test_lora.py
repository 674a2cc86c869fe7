"""Adapters in slots answer like peft over transformers, whoever shares the batch; without them nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import Checkpoint
from support.drive import GREEDY, Driver, Job, prompts
from support.lora_reference import LENGTHS, WANT, Reference, Weights
from support.tiny_models import VOCAB
from torch.utils._python_dispatch import TorchDispatchMode

from asyncengine.batch import Row
from asyncengine.config import EngineConfig
from asyncengine.errors import AdapterError, InvalidParameter, InvariantViolation
from asyncengine.models.loading import load_model
from asyncengine.runner.lora import LoraLayers, install_lora
from asyncengine.runner.model_runner import ModelRunner, build_runner
from asyncengine.sampling_params import SamplingParams

pytest.importorskip("peft")

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "qwen3moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(family: str) -> Reference:
    return Reference(family)


class AdapterDriver(Driver):
    """Rows use the adapter slot noted for their job."""

    def __init__(self, runner: ModelRunner, lora: LoraLayers) -> None:
        super().__init__(runner)
        self.lora = lora
        self.adapter_slots: dict[int, int] = {}

    def row(self, job: Job, chunk: int | None = None) -> Row:
        return super().row(job, chunk)._replace(adapter_slot=self.adapter_slots[job.spec.ticket])

    def with_adapter(self, prompt: Sequence[int], slot: int, want: int = WANT, params: SamplingParams = GREEDY) -> Job:
        job = self.job(prompt, want, params)
        self.adapter_slots[job.spec.ticket] = slot
        return job

    def answers(self, slots: Sequence[int], chunk: int | None = None, preempt_every: int | None = None) -> list[Any]:
        """For every slot the outputs of all prompts, everything in one batch, adapters alternating."""
        inputs = prompts(LENGTHS, VOCAB)
        jobs = [self.with_adapter(prompt, slot) for prompt in inputs for slot in slots]
        outputs = self.run(jobs, chunk, preempt_every)
        return [outputs[place :: len(slots)] for place in range(len(slots))]

    def scores(self, slot: int) -> list[float]:
        job = self.with_adapter(prompts([30], VOCAB)[0], slot, 1, SamplingParams(temperature=0.0, prompt_logprobs=True))
        self.run([job])
        return [entry.logprob for entry in job.prompt_logprobs]


def make_driver(
    checkpoint: Checkpoint, name: str, max_loras: int = 8, max_rank: int = 8, **fields: Any
) -> AdapterDriver:
    config = EngineConfig(
        **{"page_size": 4, "max_num_seqs": 64, "kv_cache_memory": "24MiB", "dtype": "float32", **fields}
    )
    model = load_model(str(checkpoint(name)), config)
    lora = install_lora(model.module, max_loras, max_rank)
    return AdapterDriver(build_runner(model, config, lora=lora), lora)


@pytest.fixture(scope="module")
def driver(family: str, reference: Reference, checkpoint: Checkpoint) -> AdapterDriver:
    """All eight adapters, in slots 1 to 8."""
    made = make_driver(checkpoint, family)
    for slot, adapter in enumerate(reference.adapters, 1):
        made.lora.write(slot, adapter)
    return made


def test_the_reference_can_tell_adapters_apart(reference: Reference) -> None:
    assert len({str(outputs) for outputs in (reference.base, *reference.outputs)}) == 9


def test_every_linear_and_the_embedding_can_be_changed(
    family: str, reference: Reference, driver: AdapterDriver
) -> None:
    modules = driver.lora.modules
    assert sorted(modules) == sorted(reference.targets)
    for path, weights in reference.adapters[0].modules.items():
        assert modules[path][:2] == (weights.a.shape[1], weights.b.shape[0])
        assert (modules[path].kind == "embedding") == weights.embedding
        assert (modules[path].kind == "conv1d") == (family == "gpt2" and "h." in path)
        assert (modules[path].scale != 1) == (family in ("gemma2", "gemma3") and weights.embedding)
    layers = driver.lora.layer_linears()
    assert layers == [path for path in modules if path != "lm_head" and modules[path].kind != "embedding"]


def test_each_alone_equals_peft(reference: Reference, driver: AdapterDriver) -> None:
    for slot in (1, 3, 8):
        assert driver.answers([slot]) == [reference.outputs[slot - 1]]
    assert driver.answers([0]) == [reference.base]


def test_eight_adapters_and_the_base_in_one_batch(
    reference: Reference, driver: AdapterDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [3, 0, 1, 2, 8, 4, 7, 5, 6]
    expected = [reference.base if slot == 0 else reference.outputs[slot - 1] for slot in slots]
    for chunk in (None, 1, 7):
        assert driver.answers(slots, chunk) == expected, f"chunk {chunk}"
    assert driver.answers(slots, 7, preempt_every=5) == expected
    for price in (0.0, 1e9):  # always by segment, never by segment
        for stack in driver.lora._stacks.values():
            monkeypatch.setattr(stack, "_segment_price", price)
        assert driver.answers(slots, 16) == expected


def test_unfused_equals_peft(family: str, reference: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, family, max_loras=4, fuse=False)
    driver.lora.write(4, reference.adapters[1])
    driver.lora.write(2, reference.adapters[4])
    assert driver.answers([4, 0, 2]) == [reference.outputs[1], reference.base, reference.outputs[4]]


def test_a_cleared_slot_leaves_nothing(family: str, reference: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, family)
    before = driver.scores(0)
    for slot in (2, 3):
        driver.lora.write(slot, reference.adapters[slot])
    changed = driver.scores(2)
    assert changed != before
    driver.lora.clear(2)
    with pytest.raises(InvariantViolation, match="slot 2"):
        driver.lora.begin([2], np.array([1]), torch.tensor([0]))
    assert driver.scores(0) == before
    driver.lora.write(2, Weights({}))
    assert driver.scores(2) == before, "an adapter that changes nothing, in a slot that had one"
    taken = driver.lora.nbytes
    driver.lora.write(2, reference.adapters[2])
    assert driver.scores(2) == changed
    driver.lora.write(2, reference.adapters[4])  # replaced by a smaller rank without clearing first
    driver.lora.write(5, reference.adapters[4])
    assert driver.scores(2) == pytest.approx(driver.scores(5), abs=1e-6)
    assert driver.lora.nbytes == taken


class Operators(TorchDispatchMode):
    """Counts every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_without_adapters_runs_no_other_operator(
    family: str, reference: Reference, checkpoint: Checkpoint
) -> None:
    def operators(driver: AdapterDriver, slot: int) -> Counter[str]:
        with Operators() as seen:
            driver.run([driver.with_adapter([3, 4, 5], slot, 2)])
        return seen.counts

    driver = make_driver(checkpoint, family)
    operators(driver, 0)  # the first step of all makes the sampler's buffers
    plain = operators(driver, 0)
    driver.lora.write(1, reference.adapters[0])
    assert operators(driver, 0) == plain
    assert operators(driver, 1).total() > plain.total()
    assert operators(driver, 0) == plain, "after a step with one"


# ---------------------------------------------------------------- one family is enough for the rest


@pytest.fixture(scope="module")
def llama() -> Reference:
    return Reference("llama")


@pytest.mark.parametrize("field", ["a", "b"])
def test_what_does_not_fit_is_refused_and_changes_nothing(field: str, llama: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, "llama", max_rank=4)
    driver.lora.write(1, llama.adapters[0])
    before, taken = driver.scores(1), driver.lora.nbytes
    path, good = list(llama.adapters[0].modules.items())[-1]
    value = getattr(good, field)
    for bad, message in (
        ({path: replace(good, **{field: value[:, :-1]})}, "maps"),
        ({path: replace(good, **{field: value.half()})}, "must be in the model's"),
        ({path: replace(good, embedding=True)}, "kind of module"),
        ({"model.layers.9.mlp.up_proj": good}, "no such module"),
        (llama.adapters[1].modules, "max_lora_rank"),
    ):
        with pytest.raises(AdapterError, match=message):
            driver.lora.write(1, Weights({**llama.adapters[0].modules, **bad}))
    with pytest.raises(InvariantViolation):
        driver.lora.write(0, llama.adapters[0])
    assert (driver.scores(1), driver.lora.nbytes) == (before, taken)


def test_memory_is_taken_for_targets_only(llama: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, "llama")
    assert driver.lora.nbytes == 0
    path = "model.layers.1.self_attn.o_proj"
    driver.lora.allocate([path])
    taken = driver.lora.nbytes
    assert taken == 8 * 8 * sum(driver.lora.modules[path][:2]) * 4
    driver.lora.write(6, Weights({path: llama.adapters[0].modules[path]}))
    assert driver.lora.nbytes == taken
    assert driver.scores(6) != driver.scores(0)


def test_targets_are_limited(checkpoint: Checkpoint, llama: Reference) -> None:
    config = EngineConfig(dtype="float32")
    path = "model.layers.0.mlp.gate_proj"
    module = load_model(str(checkpoint("llama")), config).module
    layers = install_lora(module, 2, 8, [path])
    assert list(layers.modules) == [path]
    with pytest.raises(AdapterError, match="not among"):
        layers.write(1, llama.adapters[0])
    for arguments in ((0, 8, None), (2, 0, None), (2, 8, ["model.layers.0.mlp"])):
        with pytest.raises(InvalidParameter):
            install_lora(module, *arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, llama: Reference, checkpoint: Checkpoint) -> None:
    exact, rounded = (make_driver(checkpoint, "llama", dtype=name) for name in ("float32", dtype))
    for driver in (exact, rounded):
        driver.lora.write(2, llama.adapters[1].to(driver.lora._dtype))
    differences = [abs(left - right) for left, right in zip(exact.scores(2), rounded.scores(2), strict=True)]
    assert 0 < max(differences) < 0.3


def test_one_adapter_that_overflows_harms_nobody_else(llama: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, "llama")
    linears = {path: each for path, each in llama.adapters[1].modules.items() if not each.embedding}
    huge = {path: replace(each, a=each.a.sign() * 3e38) for path, each in linears.items()}
    driver.lora.write(1, llama.adapters[0])
    driver.lora.write(2, Weights(huge))
    prompt = prompts(LENGTHS, VOCAB)[1]
    jobs = [driver.with_adapter(prompt, slot) for slot in (1, 2, 0)]
    driver.run(jobs)
    assert jobs[1].error is not None
    assert (jobs[0].output, jobs[2].output) == (llama.outputs[0][1], llama.base[1])


def test_which_rows_and_slots_take_part(checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, "llama")
    for slot in (2, 3, 5):
        driver.lora.write(slot, Weights({}))
    tokens, logits = driver.lora._rows([0, 3, 5, 5, 0], np.array([1, 3, 1, 2, 1]), torch.tensor([0, 3, 7]))
    assert (tokens.first, tokens.last) == (2, 5)
    assert tokens.segments == ((1, 4, 2), (4, 7, 4))
    assert tokens.spared == 8 * 2 / 2
    assert tokens.slots.tolist() == [0, 2, 2, 2, 4, 4, 4, 0]
    assert tokens.keep.sum(0).flatten().tolist() == [3, 0, 3]
    assert logits.keep.view(3, 3).tolist() == [[False] * 3, [True, False, False], [False] * 3]
    assert logits.segments is None

"""A model runner driven by hand, each request with the adapter slot it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.checkpoints import Checkpoint
from support.drive import GREEDY, Driver, Job, prompts
from support.lora_reference import LENGTHS, WANT
from support.tiny_models import VOCAB

from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row


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
        """Outputs of all prompts for every slot, everything in one batch, adapters alternating."""
        inputs = prompts(LENGTHS, VOCAB)
        jobs = [self.with_adapter(prompt, slot) for prompt in inputs for slot in slots]
        outputs = self.run(jobs, chunk, preempt_every)
        return [outputs[place :: len(slots)] for place in range(len(slots))]

    def scores(self, slot: int) -> list[float]:
        job = self.with_adapter(prompts([30], VOCAB)[0], slot, 1, SamplingParams(temperature=0.0, prompt_logprobs=True))
        self.run([job])
        return [entry.logprob for entry in job.prompt_logprobs]


def make_driver(
    checkpoint: Checkpoint, name: str, max_loras: int = 8, max_rank: int = 8, masked: bool | None = None, **fields: Any
) -> AdapterDriver:
    config = EngineConfig(
        **{"page_size": 4, "max_num_seqs": 64, "kv_cache_memory": "24MiB", "dtype": "float32", **fields}
    )
    model = load_model(str(checkpoint(name)), config)
    lora = LoraLayers(model.model, max_loras, max_rank, masked=masked)
    return AdapterDriver(build_runner(model, config, lora=lora).runner, lora)

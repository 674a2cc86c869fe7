"""Rollouts for the `rollout_func` of TRL's GRPOTrainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncengine.integrations.engine_source import AnyEngine
from asyncengine.integrations.trl.generation import EngineGeneration

RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]


def rollout(engine: AnyEngine, *, adapter: str = "trl-policy") -> RolloutFunction:
    """A `rollout_func` for GRPOTrainer that samples from `engine`, a hosted engine of the model that is trained.

    It takes prompts (conversations or texts, one for each completion: TRL repeats them), renders them by the trainer's
    own chat template, and returns "prompt_ids", "completion_ids" and "logprobs", lists of a list for each completion.
    The engine gets the trainer's weights first if `trainer.state.global_step` has moved. It fits trainers that sample
    one turn; with tools, and for the correction by importance, see `attach`. Raises as `EngineGeneration`.
    """
    generation: EngineGeneration | None = None
    synced: int | None = None

    def sample(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        nonlocal generation, synced
        if generation is None or generation.trainer is not trainer:
            generation, synced = EngineGeneration(engine, trainer, adapter=adapter), None
        if trainer.state.global_step != synced:
            generation.sync_weights()
            synced = trainer.state.global_step
        ids, images, _ = trainer._tokenize_prompts(prompts)
        prompt_ids, completion_ids, logprobs, _ = generation.generate(ids, images)
        scores = [[score for (score,) in row] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": scores}

    return sample

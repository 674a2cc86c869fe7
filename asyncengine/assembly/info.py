"""The description of a loaded model, made of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncengine.assembly.images import LoadedImages
from asyncengine.config import ModelSettings
from asyncengine.info import ModelInfo
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.execution.models.loading import Loaded
    from asyncengine.execution.runner.encoder_runner import EncoderRunner
    from asyncengine.execution.runner.model_runner import ModelRunner


def info_of(
    name: str, loaded: Loaded, tokenizer: TextTokenizer | None, runner: ModelRunner | EncoderRunner,
    images: LoadedImages, config: ModelSettings,
) -> ModelInfo:  # fmt: skip
    """Describe a model by its parts; `wire` adds what its limits and its chats are."""
    from asyncengine.execution.models.loading import why_untold  # which imports torch

    model = getattr(loaded, "model", None)
    untold = why_untold(model, False)
    return ModelInfo(
        name=name, vocab_size=loaded.vocab_size, max_model_len=loaded.max_model_len,
        eos_token_ids=tuple(loaded.eos_token_ids), dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device), num_pages=runner.num_pages, page_size=runner.page_size,
        task="generate" if getattr(loaded.hf_config, "decision_head", None) is None else "decide",
        has_tokenizer=tokenizer is not None, has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        template_variables=() if tokenizer is None else tokenizer.template_variables(),
        generation_defaults=loaded.generation_defaults, weight_bytes=runner.weights_bytes,
        kv_cache_bytes=runner.kv_bytes, state_bytes=runner.state_bytes, num_states=max(0, runner.num_states - 1),
        num_window_pages=runner.num_window_pages, one_pool=runner.one_pool, stored=runner.stored,
        fused=tuple(runner.fused), attention=runner.attention_backend, no_speculation=runner.no_speculation,
        no_mtp=None if getattr(runner, "mtp", None) else getattr(loaded, "no_mtp", None) or runner.no_speculation,
        batch_variance=runner.batch_variance, left_out=loaded.left_out, placeholders=loaded.placeholders,
        no_images=images.why_none, no_routed_experts=why_untold(model, True),
        num_layers=len(getattr(model, "layers", ())), no_hidden_states=untold,
        hidden_size=0 if model is None or untold is not None else model.config.width,
        no_logits_processors=None if str(loaded.device) == "cpu" else "steps on a GPU do not wait for them",
        tensor_parallel=config.tensor_parallel, pipeline_parallel=config.pipeline_parallel,
    )  # fmt: skip

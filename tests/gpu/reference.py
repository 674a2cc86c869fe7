"""transformers as the reference: its greedy outputs, and how sure it is of each token."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

_TIE = 3.0
"""Roundings of a near tie. If each logit may be off by one rounding, two of them swap up to twice that apart; one more
because the rounding is measured on the reference alone."""


_EXACT = 1e-4
"""Logits that lie nearer than this may swap in float32, where kernels add up in another order than transformers' own:
each is off by some 1e-5."""


class Gap(NamedTuple):
    """Distance of two tokens' logits, and the distance that rounding alone moves logits there."""

    gap: float
    rounding: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= _TIE * self.rounding


class ScoreErrors(NamedTuple):
    """Summed absolute errors of log-probabilities against float32."""

    tested: float
    reference: float
    tokens: int


class Reference:
    """One checkpoint under eager attention: in the type it is served in, and in float32, which counts as the truth.

    Adapters are merged into copies of the weights. For small models: all copies are kept on the device.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, adapters: Mapping[str, Path] | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        self._device, self._dtype = device, dtype
        self._adapters = dict(adapters or {})
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._models: dict[tuple[str | None, torch.dtype], Any] = {}
        self._base = model.eval().requires_grad_(False)

    def generate(self, prompts: Sequence[Sequence[int]], want: int, adapter: str | None = None) -> list[list[int]]:
        """`want` greedy tokens for each prompt, end-of-sequence ignored. Prompts of one length go together."""
        model = self._model(adapter, self._dtype)
        outputs: list[list[int]] = [[] for _ in prompts]
        for length in sorted({len(prompt) for prompt in prompts}):
            places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
            inputs = torch.tensor([list(prompts[place]) for place in places], device=self._device)
            with torch.inference_mode():
                found = model.generate(
                    inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=want, do_sample=False,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            for place, row in zip(places, found[:, length:].tolist(), strict=True):
                outputs[place] = row
        return outputs

    def gap(self, tokens: Sequence[int], one: int, other: int, adapter: str | None = None) -> Gap:
        """Between two choices for the token after `tokens`."""
        inputs = torch.tensor([list(tokens)], device=self._device)
        with torch.inference_mode():
            truth, rounded = (
                self._model(adapter, dtype)(input_ids=inputs, use_cache=False).logits[0, -1].float()
                for dtype in (torch.float32, self._dtype)
            )
        return Gap(float((truth[one] - truth[other]).abs()), float((truth - rounded).abs().max()))

    def exact_gap(self, tokens: Sequence[int], one: int, other: int, adapter: str | None = None) -> Gap:
        """The same where all is computed in float32, whose own rounding is not measured but bounded."""
        return Gap(self.gap(tokens, one, other, adapter).gap, _EXACT / _TIE)

    def score_errors(self, tokens: Sequence[int], scores: Sequence[float], adapter: str | None = None) -> ScoreErrors:
        """Errors of `scores`, the log-probabilities of all `tokens` but the first, and of the reference's own."""
        inputs = torch.tensor([list(tokens)], device=self._device)
        found = []
        with torch.inference_mode():
            for dtype in (torch.float32, self._dtype):
                logits = self._model(adapter, dtype)(input_ids=inputs, use_cache=False).logits[0, :-1].float()
                found.append(logits.log_softmax(-1).gather(1, inputs[0, 1:, None])[:, 0].cpu())
        truth, rounded = found
        given = torch.tensor(list(scores))
        return ScoreErrors(float((given - truth).abs().sum()), float((rounded - truth).abs().sum()), len(given))

    def _model(self, adapter: str | None, dtype: torch.dtype) -> Any:
        key = adapter, dtype
        if key not in self._models:
            model = copy.deepcopy(self._base)
            if adapter is not None:
                import peft

                model = peft.PeftModel.from_pretrained(model, self._adapters[adapter]).merge_and_unload()
            self._models[key] = model.to(dtype).to(self._device)
        return self._models[key]

"""The head's guesses are those of the published formula, whatever the steps in which a text was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.drive import prompts
from support.mtp_models import VOCAB, check_chain, random_tensors, read_and_guess, save, structure_of

from asyncengine.config import EngineConfig
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner

FAMILIES = ("glm4_moe", "deepseek_v3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
ONE_LAYER = {
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "full_attention_interval": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
(TEXT,) = prompts([23], VOCAB - 1)


class Oracle:
    """The head by transformers: a model of one layer that reads hidden states merged with the next tokens' embeddings.

    Rotation is by the position of the hidden state.
    """

    def __init__(self, family: str, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        self.structure, self.tensors = structure_of(family), tensors
        assert self.structure.mtp is not None
        self.config = self.structure.mtp
        head = self.config.layer.format(0)
        own = {f"model.layers.0.{name.removeprefix(head)}": tensors[name] for name in tensors if name.startswith(head)}
        own["model.norm.weight"] = tensors[f"{self.config.final_norm}.weight"].clone()
        own |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        save(folder, family, own, **ONE_LAYER)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.streams: list[torch.Tensor] = []
        self.model.model.layers[0].register_forward_hook(lambda *given: self.streams.append(given[-1]))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"] + self.structure.norm.offset
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.structure.norm.epsilon) * weight

    def merged(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        embedded = self.tensors[f"{self.structure.embedding}.weight"][tokens]
        both = self.norm(self.config.token_norm, embedded), self.norm(self.config.hidden_norm, hidden)
        return torch.cat(both, dim=-1) @ self.tensors[f"{self.config.projection}.weight"].T

    def run(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, what further guesses take for hidden states) of entries (hidden[i], tokens[i])."""
        with torch.inference_mode():
            made = self.model(inputs_embeds=self.merged(hidden, tokens)[None], output_hidden_states=True)
        return made.logits[0], made.hidden_states[-1][0] if self.config.chains_normed else self.streams[-1][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_the_formula(family: str, tmp_path: Path) -> None:
    """A prompt in chunks, decode steps, and steps with drafts of which some are wrong; then a chain of guesses."""
    tensors = random_tensors(family)
    folder = save(tmp_path / "model", family, tensors)
    config = EngineConfig(dtype="float32", kv_cache_memory="4MiB", page_size=4, max_num_seqs=4, show_progress=False)
    runner = build_runner(load_model(str(folder), config), config).runner
    model = runner.model
    assert isinstance(model, Decoder)
    assert model.mtp is not None
    model.mtp.output = None  # the formula has no copy in 4 bits
    states: list[torch.Tensor] = []
    keep = model.hidden_states

    def noted(ids: torch.Tensor, step: Any, *others: Any) -> torch.Tensor:
        states.append(keep(ids, step, *others))
        return states[-1]

    model.hidden_states = noted  # type: ignore[method-assign]
    seen = read_and_guess(runner, TEXT)
    hidden = torch.cat((states[0], states[1], states[2], states[3][:3], states[4]))
    check_chain(seen, Oracle(family, tensors, tmp_path / "head").run, hidden, TEXT[1:15])
    runner.close()

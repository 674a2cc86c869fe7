"""A tiny model and its adapters on disk, saved by peft, and what peft over transformers answers with them."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.drive import greedy_reference
from support.lora_reference import Reference
from support.tiny_models import VOCAB, make_checkpoint, make_model

RANKS = (4, 8, 3, 8, 1, 7, 5, 2)
MAX_RANK = max(RANKS)


class Zoo:
    """Adapters "a0", "a1", ... of one family. Each changes another choice of modules, with another rank and scaling."""

    def __init__(self, family: str, folder: Path, count: int = 8, *, everything: bool = True) -> None:
        """`everything`: all linears, the head and the embedding, or many of these; else a few linears, to be faster."""
        from peft.tuners.lora import LoraLayer

        self.model = make_checkpoint(family, folder / "model")
        self.names = [f"a{index}" for index in range(count)]
        self._folder = folder / "adapters"
        self._generator = torch.Generator().manual_seed(7)
        base = make_model(family)
        configs = [_config(index, base, everything) for index in range(count)]
        self._peft: Any = None
        with quiet():
            for name, config in zip(self.names, configs, strict=True):
                self._add(base, name, config)
        self._layers = [
            (path, part) for path, part in self._peft.base_model.model.named_modules() if isinstance(part, LoraLayer)
        ]
        for name in self.names:
            self.draw(name)
        self._answers: dict[tuple[str | None, tuple[int, ...], int], list[int]] = {}

    def _add(self, base: Any, name: str, config: Any) -> None:
        import peft

        if self._peft is None:
            self._peft = peft.get_peft_model(base, config, name)
        else:
            self._peft.add_adapter(name, config)

    def path(self, name: str) -> Path:
        return self._folder / name

    @property
    def paths(self) -> dict[str, Path]:
        return {name: self.path(name) for name in self.names}

    def draw(self, name: str) -> Path:
        """New random weights for `name`, saved over its old ones, file by file in one exchange each; its folder."""
        from peft.tuners.lora import Embedding

        for path, part in self._layers:
            if name in part.scaling:
                Reference.draw(part, path, name, isinstance(part, Embedding), self._generator)
        with quiet():
            self._peft.save_pretrained(self._folder / "new", selected_adapters=[name])
        self.path(name).mkdir(exist_ok=True)
        for file in sorted((self._folder / "new" / name).iterdir()):
            file.replace(self.path(name) / file.name)
        self._answers = {key: tokens for key, tokens in vars(self).get("_answers", {}).items() if key[0] != name}
        return self.path(name)

    def copy(self, name: str, folder: Path) -> Path:
        """The files of `name` in `folder` as well."""
        shutil.copytree(self.path(name), folder)
        return folder

    def answer(self, name: str | None, prompt: Sequence[int], want: int) -> list[int]:
        """peft's and transformers' greedy output with `name` active, or without any; end-of-sequence ignored."""
        key = (name, tuple(prompt), want)
        if key not in self._answers:
            model = self._peft.base_model.model.eval()
            if name is None:
                with self._peft.disable_adapter():
                    self._answers[key] = greedy_reference(model, prompt, want)
            else:
                self._peft.set_adapter(name)
                self._answers[key] = greedy_reference(model, prompt, want)
        return self._answers[key]


def _config(index: int, base: Any, everything: bool) -> Any:
    import peft

    table = base.get_input_embeddings()
    linears = [path for path, part in base.named_modules() if isinstance(part, torch.nn.Linear)]
    linears = [path for path in linears if not path.endswith("kv_b_proj")]  # is no product of its own here
    tables = [path for path, part in base.named_modules() if part is table]
    chance = random.Random(index)
    rank = RANKS[index % len(RANKS)]
    settings: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "use_rslora": index % 2 == 1}
    if not everything:
        targets = chance.sample([path for path in linears if "layers" in path], 4)
    elif index == 0:
        targets = linears + tables
    elif index == 1:  # where there are experts or latent vectors, peft makes of "all-linear" more than is a linear here
        more = any("experts" in path or "kv_b_proj" in path for path, _ in base.named_parameters())
        names = r".*\.[qkvo](_b)?_proj" if more else "all-linear"
        return peft.LoraConfig(target_modules=names, **settings)
    else:  # also parts of what is merged when it runs: q without k, up without gate
        targets = [path for path in linears + tables if chance.random() < 0.6]
    if index % 3 == 2:
        settings["rank_pattern"] = {targets[0]: max(1, rank - 1)}
        settings["alpha_pattern"] = {targets[-1]: 3 * rank}
    return peft.LoraConfig(target_modules=targets, **settings)


@contextmanager
def quiet() -> Iterator[None]:
    """peft warns of embeddings and tied weights; both are meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def random_prompts(lengths: Sequence[int], seed: int = 4) -> list[list[int]]:
    """The last one begins like the one before it, for two pages of 16 if it is long enough."""
    chance = random.Random(seed)
    made = [[chance.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    return [*made[:-1], [*made[-2][:33], *made[-1][33:]]] if len(made) > 1 else made

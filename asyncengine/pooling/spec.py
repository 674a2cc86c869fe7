"""The description of a model's vectors in its folder: how they are pooled, what comes after, prompts, lengths, labels.

The files are those of sentence-transformers: modules.json, the config.json of each module's folder,
config_sentence_transformers.json and sentence_bert_config.json, in today's forms and in the older ones that most
checkpoints still have. Nothing is imported by a name that stands in a file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten

logger = logging.getLogger("asyncengine")

Task = Literal["generate", "embed", "rerank", "classify"]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways in which hidden states become one vector; of several, the results stand one behind the other."""
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SENTENCE_CONFIGS = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)  # fmt: skip
_TRANSFORMERS = ("Transformer", "BERT", "RoBERTa", "DistilBERT", "XLMRoBERTa", "CamemBERT", "ALBERT")
"""Names of the first module, old ones included."""
ACTIVATIONS = ("identity", "sigmoid", "tanh", "softmax", "relu", "gelu", "silu")


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer behind the pooling."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "tanh"
    residual: bool = False
    """True where a layer's input is added to its output."""


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """From hidden states to vectors, and what else the files say of texts."""

    task: Task
    modes: tuple[str, ...] = ("mean",)
    """Empty: there is a classification head, which pools itself."""
    include_prompt: bool = True
    """False: a prompt's positions are left out of the pooling."""
    whole: bool = False
    """The model is an encoder, whose tokens see those after them: a text is computed in one step."""
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    """Tokens; longer texts are cut. None: as the tokenizer and the model say."""
    lower_case: bool = False
    labels: tuple[str, ...] = ()
    """Labels of a classification head."""
    activation: str = "identity"
    """The function of a head's scores."""
    tokens: tuple[int, ...] = ()
    """The score is the logit of the first less that of the second, behind the last position. None: "yes" and "no"."""
    scores_tokens: bool = False

    @property
    def every(self) -> bool:
        """Whether other hidden states than the last are needed."""
        return self.whole or any(mode != "lasttoken" for mode in self.modes)

    def in_words(self) -> str:
        """E.g. "mean, dense 384 -> 128, normalized"."""
        parts = ["logit of a token" if self.scores_tokens else " + ".join(self.modes) or "classification head"]
        parts += [f"dense {layer.inputs} -> {layer.outputs}" for layer in self.dense]
        return ", ".join(parts + ["normalized"] * self.normalize)


def read_pooling(
    folder: Path, config: Mapping[str, Any], task: str, pooling: str | None, *, encoder: bool = False
) -> PoolingSpec | None:
    """The pooling that the files in `folder` ask for, whose config.json says `config`; None: it writes text."""
    settings = _read(folder / "config_sentence_transformers.json") or {}
    modules = _modules(folder)
    found = _task(config, modules, settings, task, pooling)
    if found == "generate" and encoder and task == "auto" and not _writes(config):
        logger.warning("%s says nothing of pooling: the mean of its hidden states is taken", folder)
        found = "embed"
    if found == "generate":
        return None
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, (str, type(None))) for each in prompts.values()):
        raise ModelNotFound(f"{folder / 'config_sentence_transformers.json'}: prompts must map names to texts")
    first = modules[0][1] if modules else folder
    sentence = next((read for name in _SENTENCE_CONFIGS if (read := _read(first / name))), {})
    length = sentence.get("max_seq_length")
    common: dict[str, Any] = {
        "prompts": {name: text for name, text in prompts.items() if text},
        "default_prompt": _default_prompt(settings, prompts),
        "max_length": length if isinstance(length, int) and length > 0 else None,
        "lower_case": bool(sentence.get("do_lower_case", False)),
        "whole": encoder,
    }
    if found == "embed":
        return _embedder(folder, modules, pooling, common)
    return _scorer(folder, found, config, modules, settings, common)


def _task(
    config: Mapping[str, Any], modules: list[tuple[str, Path]], settings: Mapping[str, Any], task: str,
    pooling: str | None,
) -> Task:  # fmt: skip
    if task in ("generate", "embed", "rerank", "classify"):
        return task  # type: ignore[return-value]
    if pooling is not None:
        return "embed"
    kinds = [kind for kind, _ in modules]
    scores = settings.get("model_type") == "CrossEncoder" or "LogitScore" in kinds
    if has_head(config):
        return "rerank" if len(labels_of(config)) == 1 else "classify"
    if scores:
        return "rerank"
    return "embed" if modules or settings else "generate"


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a model with a classification head."""
    return _named(config, "ForSequenceClassification")


def _writes(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a text generator."""
    return _named(config, "ForCausalLM")


def _named(config: Mapping[str, Any], ending: str) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and name.endswith(ending) for name in named)


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Labels of the classes, in order; transformers' own names where config.json has none."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        try:
            return tuple(str(named[key]) for key in sorted(named, key=int))
        except ValueError:
            raise ModelNotFound("config.json: id2label must map numbers to names") from None
    count = config.get("num_labels", 2)
    return tuple(f"LABEL_{index}" for index in range(count if isinstance(count, int) and count > 0 else 2))


def _embedder(
    folder: Path, modules: list[tuple[str, Path]], pooling: str | None, common: Mapping[str, Any]
) -> PoolingSpec:
    modes: tuple[str, ...] = ("mean",)
    include, normalize = True, False
    dense: list[DenseSpec] = []
    for kind, where in modules[1:]:
        content = _read(where / "config.json") or {}
        if kind == "Pooling":
            modes, include = _modes(where, content), bool(content.get("include_prompt", True))
        elif kind == "Dense":
            if normalize:
                raise UnsupportedModel(f"{folder} has a Dense module behind Normalize, which is not written down here")
            dense.append(_dense(where, content))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":
            raise UnsupportedModel(
                f"{folder} has a module {shorten(kind, 80)!r} behind its transformer, which is not written down here: "
                "Pooling, Dense and Normalize are"
            )
    if pooling is not None:
        modes = parse_modes(pooling)
    return PoolingSpec("embed", modes, include, dense=tuple(dense), normalize=normalize, **common)


def parse_modes(pooling: str) -> tuple[str, ...]:
    """ "last" -> ("lasttoken",); several are joined by "+". Raises `UnsupportedModel` for an unknown one."""
    modes = tuple({"last": "lasttoken"}.get(part.strip(), part.strip()) for part in pooling.split("+"))
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise UnsupportedModel(f"pooling {shorten(unknown[0], 40)!r} is not known; there are {', '.join(MODES)}")
    return modes


def _modes(where: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Modes of a Pooling module's settings; older ones have a switch for each mode."""
    named = content.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in _LEGACY_MODES.items() if content.get(key)] or ["mean"]
    modes = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, list) else ()
    for mode in modes or (named,):
        if mode not in MODES:
            raise UnsupportedModel(f"{where} pools by {shorten(repr(mode), 40)}; there are {', '.join(MODES)}")
    return modes


def _dense(where: Path, content: Mapping[str, Any]) -> DenseSpec:
    sizes = content.get("in_features"), content.get("out_features")
    inputs, outputs = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
    if not inputs or not outputs:
        raise ModelNotFound(f"{where / 'config.json'} does not say in_features and out_features")
    if content.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise UnsupportedModel(f"{where} is a Dense module of something other than the pooled vector")
    named = content.get("activation_function")
    activation = "tanh" if named is None else activation_of(str(where), named, "tanh")
    return DenseSpec(
        where, inputs, outputs, bool(content.get("bias", True)), activation, bool(content.get("use_residual", False))
    )


def activation_of(where: str, named: Any, otherwise: str) -> str:
    """An activation by the dotted name of torch's module. One outside torch would be somebody's code: it is not run,
    `otherwise` takes its place, as in sentence-transformers. Raises `UnsupportedModel` for one of torch's that is not
    known here."""
    name = str(named)
    if not name.startswith("torch."):
        logger.warning("%s names the activation %s, which is not torch's: %s is used", where, name[:100], otherwise)
        return otherwise
    known = name.rsplit(".", 1)[-1].lower()
    if known not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{where} asks for the activation {shorten(name, 80)!r}; known: {', '.join(ACTIVATIONS)}"
        )
    return known


def _scorer(
    folder: Path, task: Task, config: Mapping[str, Any], modules: list[tuple[str, Path]],
    settings: Mapping[str, Any], common: Mapping[str, Any],
) -> PoolingSpec:  # fmt: skip
    """A cross-encoder, a classifier, or a text generator whose "yes" and "no" are the score."""
    head, scorer = has_head(config), next((where for kind, where in modules if kind == "LogitScore"), None)
    labels = labels_of(config) if head else ("score",)
    if task == "rerank" and len(labels) != 1:
        raise UnsupportedModel(
            f"{folder} is a classifier of {len(labels)} labels: use classify(), with task='classify'"
        )
    own = config.get("sentence_transformers")
    named = settings.get("activation_fn") or (own or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    single = len(labels) == 1
    if named is None and task == "classify":
        several = config.get("problem_type") == "multi_label_classification" or single
        activation = "sigmoid" if several else "softmax"
    else:
        default = "sigmoid" if single else "identity"
        activation = default if named is None else activation_of(str(folder), named, default)
    if head:
        return PoolingSpec(task, (), labels=labels, activation=activation, **common)
    if task == "classify":
        raise UnsupportedModel(f"{folder} has no classification head (...ForSequenceClassification)")
    content = {} if scorer is None else _read(scorer / "config.json") or {}
    tokens = tuple(content[key] for key in ("true_token_id", "false_token_id") if isinstance(content.get(key), int))
    return PoolingSpec(
        task,
        ("lasttoken",),
        labels=labels,
        activation=activation,
        tokens=tokens,
        scores_tokens=True,
        **common,
    )


def _default_prompt(settings: Mapping[str, Any], prompts: Mapping[str, Any]) -> str | None:
    named = settings.get("default_prompt_name")
    if named is not None and named not in prompts:
        raise ModelNotFound(f"config_sentence_transformers.json: default_prompt_name {named!r} is none of its prompts")
    return named if named is not None and prompts.get(named) else None


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(last part of its type's name, its folder) of each module, in order; empty: there is no modules.json."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    content = _load(file)
    try:
        listed = [(str(each["type"]).rsplit(".", 1)[-1], str(each.get("path", ""))) for each in content]
    except (TypeError, KeyError, AttributeError):
        raise ModelNotFound(f"{file} is no list of modules with their types and paths") from None
    for _, path in listed:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelNotFound(f"{file} names {shorten(path, 80)!r}, which is not inside the folder")
    if listed and listed[0][0] not in _TRANSFORMERS:
        raise UnsupportedModel(f"{folder} begins with a module {shorten(listed[0][0], 80)!r}, not with a transformer")
    return [(kind, folder / path) for kind, path in listed]


def transformer_folder(folder: Path) -> Path:
    """The folder of an embedder's config.json and weights: older ones have them in a folder like 0_Transformer."""
    modules = _modules(folder)
    return modules[0][1] if modules else folder


def root_folder(folder: Path) -> Path:
    """The folder of the model whose transformer is in `folder`: itself, or the one above."""
    above = folder.parent
    if not (folder / "modules.json").is_file() and (above / "modules.json").is_file():
        return above if transformer_folder(above) == folder else folder
    return folder


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    content = _load(file)
    if not isinstance(content, dict):
        raise ModelNotFound(f"{file} does not hold a JSON object")
    return content


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelNotFound(f"{file} cannot be read: {shorten(str(error), 200)}") from None

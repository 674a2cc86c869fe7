"""The pooling that a model's files specify.

The files are those of sentence-transformers: modules.json, the config.json of each module's folder,
config_sentence_transformers.json and sentence_bert_config.json, in their current forms and in the older ones that most
checkpoints still have. Class names in these files are compared with known ones, and never imported.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.formats import first_line, read_json
from asyncengine.pooling_spec import ACTIVATIONS, MODES, DenseSpec, PoolingSpec, Task

logger = logging.getLogger("asyncengine")

_NAMES = tomllib.loads((resources.files(__package__) / "pooling_files.toml").read_text(encoding="utf-8"))
"""Known names of files, modules and settings, including old ones."""
_HEAD = "ForSequenceClassification"


def read_pooling(
    folder: Path, config: Mapping[str, Any], task: str, pooling: str | None, *, encoder: bool = False
) -> PoolingSpec | None:
    """The pooling that the files in `folder` specify; None for a text generator. `config`: content of config.json.

    `task`: the setting. `pooling`: modes that replace those of the files, joined by "+". `encoder`: the model is
    bidirectional; if no file specifies a pooling, its hidden states are averaged.

    Raises `ModelNotFound` for files that cannot be read, `UnsupportedModel` for an unknown module, mode or activation.
    """
    settings = _read(folder / "config_sentence_transformers.json")
    modules = _modules(folder)
    resolved = _task(config, modules, settings, task, pooling)
    if resolved == "generate" and encoder and task == "auto" and not _is_named(config, "ForCausalLM"):
        logger.warning("%s says nothing of pooling: the mean of its hidden states is taken", folder)
        resolved = "embed"
    if resolved == "generate":
        return None
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, (str, type(None))) for each in prompts.values()):
        raise ModelNotFound(f"{folder / 'config_sentence_transformers.json'}: prompts must map names to texts")
    named = settings.get("default_prompt_name")
    if named is not None and named not in prompts:
        raise ModelNotFound(f"config_sentence_transformers.json: default_prompt_name {named!r} is none of its prompts")
    first = modules[0][1] if modules else folder
    sentence = next((read for name in _NAMES["transformer_configs"] if (read := _read(first / name))), {})
    length = sentence.get("max_seq_length")
    common: dict[str, Any] = {
        "prompts": {name: text for name, text in prompts.items() if text},
        "default_prompt": named if named is not None and prompts.get(named) else None,
        "max_length": length if isinstance(length, int) and length > 0 else None,
        "lower_case": bool(sentence.get("do_lower_case", False)),
        "whole": encoder,
    }
    if resolved == "embed":
        return _embedder(folder, modules, pooling, common)
    return _scorer(folder, resolved, config, modules, settings, common)


def _task(
    config: Mapping[str, Any], modules: list[tuple[str, Path]], settings: Mapping[str, Any], task: str,
    pooling: str | None,
) -> Task:  # fmt: skip
    if task in ("generate", "embed", "rerank", "classify"):
        return task  # type: ignore[return-value]
    if pooling is not None:
        return "embed"
    if _is_named(config, _HEAD):
        return "rerank" if len(_labels(config)) == 1 else "classify"
    if settings.get("model_type") == "CrossEncoder" or any(name == "LogitScore" for name, _ in modules):
        return "rerank"
    return "embed" if modules or settings else "generate"


def _is_named(config: Mapping[str, Any], ending: str) -> bool:
    """Whether config.json names an architecture with this ending."""
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(ending) for name in names)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the classes, in order; transformers' default names if config.json has none."""
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
    for name, module in modules[1:]:
        content = _read(module / "config.json")
        if name == "Pooling":
            modes, include = _modes(module, content), bool(content.get("include_prompt", True))
        elif name == "Dense":
            if normalize:
                raise UnsupportedModel(f"{folder} has a Dense module behind Normalize, which is not written down here")
            dense.append(_dense(module, content))
        elif name == "Normalize":
            normalize = True
        elif name != "Dropout":
            raise UnsupportedModel(
                f"{folder} has a module {shorten(name, 80)!r} behind its transformer, which is not written down here: "
                "Pooling, Dense and Normalize are"
            )
    if pooling is not None:
        modes = tuple({"last": "lasttoken"}.get(word.strip(), word.strip()) for word in pooling.split("+"))
        if unknown := [mode for mode in modes if mode not in MODES]:
            raise UnsupportedModel(f"pooling {shorten(unknown[0], 40)!r} is not known; there are {', '.join(MODES)}")
    return PoolingSpec("embed", modes, include, dense=tuple(dense), normalize=normalize, **common)


def _modes(where: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """The modes of a Pooling module; older files have a switch for each mode instead of `pooling_mode`."""
    named = content.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in _NAMES["switches"].items() if content.get(key)] or ["mean"]
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
    activation = "tanh" if named is None else _activation(str(where), named, "tanh")
    return DenseSpec(
        where, inputs, outputs, bool(content.get("bias", True)), activation, bool(content.get("use_residual", False))
    )


def _activation(where: str, named: Any, otherwise: str) -> str:
    """The activation with the dotted name of a torch module. A class outside of torch would be untrusted code, so that
    `otherwise` is used instead, as in sentence-transformers. Raises `UnsupportedModel` for an unknown torch module."""
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
    head = _is_named(config, _HEAD)
    labels = _labels(config) if head else ("score",)
    if task == "rerank" and len(labels) != 1:
        raise UnsupportedModel(
            f"{folder} is a classifier of {len(labels)} labels: use classify(), with task='classify'"
        )
    single = len(labels) == 1
    own = config.get("sentence_transformers")
    named = settings.get("activation_fn") or (own.get("activation_fn") if isinstance(own, dict) else None)
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None and task == "classify":
        several = single or config.get("problem_type") == "multi_label_classification"
        activation = "sigmoid" if several else "softmax"
    else:
        default = "sigmoid" if single else "identity"
        activation = default if named is None else _activation(str(folder), named, default)
    if head:
        return PoolingSpec(task, (), labels=labels, activation=activation, **common)
    if task == "classify":
        raise UnsupportedModel(f"{folder} has no classification head (...{_HEAD})")
    scorer = next((module for name, module in modules if name == "LogitScore"), None)
    content = {} if scorer is None else _read(scorer / "config.json")
    tokens = tuple(content[key] for key in ("true_token_id", "false_token_id") if isinstance(content.get(key), int))
    common = {**common, "labels": labels, "activation": activation, "tokens": tokens, "scores_tokens": True}
    return PoolingSpec(task, ("lasttoken",), **common)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(class name, folder) of each module, in order; empty if there is no modules.json."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        listed = [(str(each["type"]).rsplit(".", 1)[-1], str(each.get("path", ""))) for each in content]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ModelNotFound(f"{file} is no list of modules with types and paths: {first_line(error)}") from None
    # a model's files must not make the engine read others of this machine
    for _, path in listed:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelNotFound(f"{file} names {shorten(path, 80)!r}, which is not inside the folder")
    if listed and listed[0][0] not in _NAMES["transformers"]:
        raise UnsupportedModel(f"{folder} begins with a module {shorten(listed[0][0], 80)!r}, not with a transformer")
    return [(name, folder / path) for name, path in listed]


def transformer_folder(folder: Path) -> Path:
    """The folder of an embedder's config.json and weights, which may be a subfolder such as 0_Transformer."""
    modules = _modules(folder)
    return modules[0][1] if modules else folder


def root_folder(folder: Path) -> Path:
    """The folder of the model whose transformer is in `folder`: `folder` itself, or its parent."""
    is_root = (folder / "modules.json").is_file() or transformer_folder(folder.parent) != folder
    return folder if is_root else folder.parent


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, str(file.parent)) if file.is_file() else {}

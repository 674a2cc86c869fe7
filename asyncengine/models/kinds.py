"""The kind of model in a folder that is no text generator in safetensors: said in words, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncengine.errors import UnsupportedModel

_EMBEDDER = "is an embedding model: it gives vectors and writes no text"
_VECTOR_FILES = ("modules.json", "config_sentence_transformers.json")
_FILES = {"model_index.json": "is an image generator. Run it with diffusers", **dict.fromkeys(_VECTOR_FILES, _EMBEDDER)}
_WITHOUT_HEAD = ("ForSequenceClassification", "ForMaskedLM")
"""Architectures that give scores, or vectors: what is in the way of the hidden states is left out."""
_ENDINGS = {
    "ForSequenceClassification": "is a classifier (or reranker): it gives scores and writes no text",
    "ForTokenClassification": "is a classifier of tokens: it gives labels and writes no text",
    "ForQuestionAnswering": "marks answers in a text and writes none",
    "ForMultipleChoice": "is a classifier: it gives scores and writes no text",
    "ForMaskedLM": "fills gaps in a text (masked language model) and cannot continue one",
    "ForImageClassification": "is a vision model: it sorts images and writes no text",
    "ForObjectDetection": "is a vision model: it finds things in images and writes no text",
    "ForSemanticSegmentation": "is a vision model: it writes no text",
    "ForCTC": "is a speech recognizer: it reads sound",
    "ForAudioClassification": "is a classifier of sound: it writes no text",
}
_GENERATOR = "Pass a model for text generation"


def check_files(folder: Path, writes: bool = True) -> None:
    """Refuse what a file beside config.json gives away. `writes`: a text generator is wanted, else one that gives
    vectors or scores would do. Raises `UnsupportedModel`."""
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{folder} is a LoRA adapter: load its base model, and it with adapters={{'NAME': PATH}}"
        )
    for name, what in _FILES.items():
        if (writes or name not in _VECTOR_FILES) and (folder / name).is_file():
            raise UnsupportedModel(f"{folder} {what}. {_GENERATOR}")


def check_architectures(folder: Path, config: Mapping[str, Any], writes: bool = True) -> None:
    """Refuse what config.json says was trained for something else. `writes` as above. Raises `UnsupportedModel`.

    A family's configuration is the same for its text generator and for a classifier made of it, and transformers loads
    either as either, with the missing parts made up at random.
    """
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        for ending, what in _ENDINGS.items():
            if isinstance(name, str) and name.endswith(ending) and (writes or ending not in _WITHOUT_HEAD):
                raise UnsupportedModel(f"{folder} ({name}) {what}. {_GENERATOR}")


def not_causal(family: str, config: Mapping[str, Any]) -> UnsupportedModel:
    """The error for a family that has no text generator of its own."""
    named = config.get("architectures")
    name = next((item for item in named if isinstance(item, str)), "") if isinstance(named, list) else ""
    sees = any(part in config for part in ("vision_config", "image_size", "num_channels"))
    writes = name.endswith(("ForConditionalGeneration", "ForCausalLM"))
    if sees and writes:
        from asyncengine.models.families import MULTIMODAL

        known = ", ".join(sorted(MULTIMODAL))
        what = f"is a vision-language model; images are not read here, and the text of these alone is served: {known}"
    elif sees:
        what = "is a vision model: it writes no text"
    elif name.endswith("Model"):
        what = "is an encoder, as embedding models are: it writes no text"
    else:
        what = "writes no text"
    return UnsupportedModel(f"family {family!r} is not a causal language model: it {what}. {_GENERATOR}")

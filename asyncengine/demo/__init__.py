"""The bundled demo model, its adapters, the bundled embedder, reranker and reader of pictures. Tools that are not
installed made them: `makers/demo_model`, `makers/demo_embedder`, `makers/demo_reranker`, `makers/demo_vision`."""

from __future__ import annotations

import os
from pathlib import Path

from asyncengine.errors import InvalidParameter

DEMO_MODEL = MODEL_PATH = Path(__file__).resolve().parent / "model"
"""The Hugging Face folder of the demo model."""
DEMO_EMBEDDER = EMBEDDER_PATH = Path(__file__).resolve().parent / "embedder"
"""The sentence-transformers folder of the demo embedder."""
DEMO_RERANKER = RERANKER_PATH = Path(__file__).resolve().parent / "reranker"
"""The folder of the demo reranker, a cross-encoder."""
DEMO_VISION = VISION_PATH = Path(__file__).resolve().parent / "vision"
"""The Hugging Face folder of the demo model that reads pictures."""
DRAFT_PATH = Path(__file__).resolve().parent / "draft"
"""The folder of the small model that guesses for it."""
ADAPTERS_PATH = Path(__file__).resolve().parent / "adapters"
"""The LoRA adapters of the demo model, a PEFT folder each."""
BUNDLED = {"demo": MODEL_PATH, "demo-embed": EMBEDDER_PATH, "demo-rerank": RERANKER_PATH, "demo-vision": VISION_PATH}
"""Names of the bundled models, wherever a model's folder or hub id is expected."""


def resolve_model(model: str | os.PathLike[str]) -> str:
    """The path or hub id to load for `model`: a name of `BUNDLED` is bundled unless a folder of that name is here; a
    folder becomes absolute, so that the same one is the same whatever the working directory; anything else is a hub id.

    Raises `InvalidParameter` for what is no path.
    """
    model = os.fspath(model) if isinstance(model, (str, os.PathLike)) else model
    if not isinstance(model, str) or "\0" in model:
        raise InvalidParameter("model", 'must be a folder, a hub id or "demo"', model)
    if model in BUNDLED and not os.path.isdir(model):
        return str(BUNDLED[model])
    return os.path.abspath(model) if os.path.exists(model) else model


def bundled_name(path: str) -> str | None:
    """The name of the bundled model at `path`; None: there is none."""
    return next((name for name, folder in BUNDLED.items() if path == str(folder)), None)


def resolve_draft(path: str) -> str:
    """The folder or hub id of a draft model: "demo/draft" and what `BUNDLED` names, unless a folder has that name."""
    bundled = {**BUNDLED, "demo/draft": DRAFT_PATH}
    return str(bundled[path]) if path in bundled and not os.path.isdir(path) else path


def resolve_adapter(path: str | os.PathLike[str], root: str | None) -> str:
    """The folder an adapter's path means: "demo/pirate" is the bundled one unless there is a folder of that name.

    Absolute, so that it is the same whatever the working directory; but below a `root` paths count from there.
    """
    name = os.fspath(path)
    head, _, tail = name.partition("/")
    if head == "demo" and tail and not os.path.exists(name) and (ADAPTERS_PATH / tail).is_dir():
        return str(ADAPTERS_PATH / tail)
    return os.path.abspath(os.path.expanduser(name)) if root is None else name

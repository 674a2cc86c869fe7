"""The bundled demo model, its adapters, the bundled embedder, reranker and reader of pictures. Tools that are not
installed made them: `tools/demo_model`, `tools/demo_embedder`, `tools/demo_reranker`, `tools/demo_vision`."""

from __future__ import annotations

import os
from pathlib import Path

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


def resolve_draft(path: str) -> str:
    """The folder or hub id that a draft model's name means: "demo/draft" is the bundled one unless there is a folder of
    that name."""
    return str(DRAFT_PATH) if path == "demo/draft" and not os.path.isdir(path) else path


def resolve_adapter(path: str | os.PathLike[str], root: str | None) -> str:
    """The folder an adapter's path means: "demo/pirate" is the bundled one unless there is a folder of that name.

    Absolute, so that it is the same whatever the working directory; but below a `root` paths count from there.
    """
    name = os.fspath(path)
    head, _, tail = name.partition("/")
    if head == "demo" and tail and not os.path.exists(name) and (ADAPTERS_PATH / tail).is_dir():
        return str(ADAPTERS_PATH / tail)
    return os.path.abspath(os.path.expanduser(name)) if root is None else name

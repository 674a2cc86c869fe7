"""Stand-ins for what vLLM's tests import of vLLM and of their own helpers, as far as tests of a server need it.

`vllm_openai` copies this file beside the tests as their conftest.py. A server that is there already (VLLM_TESTS_URL)
takes the place of the one that `RemoteOpenAIServer` would start.
"""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

URL = os.environ.get("VLLM_TESTS_URL", "")
FOLDERS: dict[str, str] = json.loads(os.environ.get("VLLM_TESTS_FOLDERS", "{}"))
"""Folders of the models that are served, by the task for which they are."""
REAL = ("vllm.utils.serial_utils", "vllm.entrypoints.pooling.utils")
"""Modules that are copied from the source, since tests read a response's bytes with them."""


class RemoteOpenAIServer:
    """The running server, with the methods of vLLM's fixture. Arguments for a server to be started are passed over."""

    def __init__(self, *_args: object, **_keywords: object) -> None:
        self.url_root = URL

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _client(self, kind: Callable[..., Any], path: str, keywords: dict[str, Any]) -> Any:
        return kind(base_url=self.url_for(path), api_key="none", max_retries=0, **{"timeout": 60, **keywords})

    def get_client(self, **keywords: Any) -> openai.OpenAI:
        return self._client(openai.OpenAI, "v1", keywords)

    def get_async_client(self, **keywords: Any) -> openai.AsyncOpenAI:
        return self._client(openai.AsyncOpenAI, "v1", keywords)

    def get_client_anthropic(self, **keywords: Any) -> anthropic.Anthropic:
        return self._client(anthropic.Anthropic, "", keywords)

    def get_async_client_anthropic(self, **keywords: Any) -> anthropic.AsyncAnthropic:
        return self._client(anthropic.AsyncAnthropic, "", keywords)


class Parsed(SimpleNamespace):
    """A response as an object with attributes, in the place of vLLM's classes of responses."""

    @classmethod
    def model_validate(cls, body: Any) -> Any:
        return json.loads(json.dumps(body), object_hook=lambda fields: cls(**fields))

    def model_dump(self, *, exclude: frozenset[str] = frozenset()) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in exclude}


class References:
    """Vectors and scores of the served models by transformers, in float32."""

    def __init__(self, task: str) -> None:
        self._folder = FOLDERS[task]

    def __enter__(self) -> References:
        return self

    def __exit__(self, *_: object) -> None: ...

    def encode(self, texts: Sequence[str]) -> Any:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(self._folder, device="cpu").encode(list(texts))

    def predict(self, pairs: Sequence[Sequence[str]]) -> Any:
        import torch

        if self._folder == FOLDERS["embed"]:
            both = [self.encode(pair) for pair in pairs]
            return torch.cosine_similarity(*(torch.tensor([each[at] for each in both]) for at in (0, 1)))
        from sentence_transformers import CrossEncoder

        return torch.as_tensor(CrossEncoder(self._folder, device="cpu").predict([list(pair) for pair in pairs]))


def get_tokenizer(tokenizer_name: str = "", **_: object) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDERS["embed" if "e5" in tokenizer_name else "generate"])


def check_embeddings_close(
    *, embeddings_0_lst: Any, embeddings_1_lst: Any, name_0: str, name_1: str, tol: float = 1e-3
) -> None:
    import torch

    for one, other in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        assert torch.cosine_similarity(torch.tensor(one), torch.tensor(other), dim=0) >= 1 - tol, (name_0, name_1)


class ModelConfig:
    """The vocabulary of the served model."""

    def __init__(self, **_: object) -> None: ...

    def get_vocab_size(self) -> int:
        with open(os.path.join(FOLDERS["generate"], "config.json"), encoding="utf-8") as file:
            return int(json.load(file)["vocab_size"])


class Runner:
    """vLLM's `HfRunner`, called or entered."""

    def __new__(cls, _model: str, *, is_cross_encoder: bool = False, **_: object) -> Any:
        return References("rerank" if is_cross_encoder else "embed")


KNOWN: dict[str, dict[str, Any]] = {
    "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": []},
    "tests.conftest": {"HfRunner": Runner},
    "tests.models.utils": {"check_embeddings_close": check_embeddings_close},
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: False)},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.envs": {"VLLM_USE_RUST_FRONTEND": False},
    "vllm.version": {"__version__": os.environ.get("VLLM_TESTS_VERSION", "")},
    "vllm.transformers_utils.repo_utils": {"hf_api": lambda: SimpleNamespace(snapshot_download=lambda **_: "")},
    "pybase64": {name: getattr(base64, name) for name in ("b64decode", "b64encode")},
    "fastapi": {"Request": object},
    "fastapi.responses": {"StreamingResponse": object},
}
"""Modules of which something is needed, with what that is."""


class Module(ModuleType):
    """A module of vLLM's: what it is asked for beyond `KNOWN` is a class for responses, or an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (whole := f"{self.__name__}.{name}") in KNOWN:
            return importlib.import_module(whole)
        return type(name, (AssertionError if name.endswith("Error") else Parsed,), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that stand in for vLLM's and for helpers of its tests."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        if name in KNOWN or (name.partition(".")[0] == "vllm" and name not in REAL):
            return importlib.machinery.ModuleSpec(name, self, is_package=name.partition(".")[0] in ("vllm", "fastapi"))
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = [os.path.join(os.path.dirname(__file__), *module.__name__.split("."))]
        vars(module).update(KNOWN.get(module.__name__, {}))


sys.meta_path.insert(0, StandIns())


@pytest.fixture(scope="session", name="hf_runner")
def _runner() -> type[Runner]:
    return Runner

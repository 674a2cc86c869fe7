"""vLLM's own tests of its HTTP server, against an app with the bundled models.

    python -m benchmarks.suites.vllm_openai [--source FOLDER --work FOLDER] [-- PYTEST'S ARGUMENTS]

Needs the packages of the extra `test`. The tests are those of vLLM's source distribution, unchanged; only what starts
its server and what they import of `vllm` is replaced (`vllm_stand_ins`). They name models of billions of parameters:
bundled ones answer in their place. Tests that reach into vLLM's classes, with no server in them, are left out
(`UNITS`). `BEYOND` tells by groups which of the others cannot pass and why.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import asyncengine
from benchmarks.suites.served import demo_server, parser, run, unbuilt

VERSION = "0.33.0"
FOLDERS = {"generate": "model", "embed": "embedder", "rerank": "reranker"}
CONTEXT = 16384
"""The longest context that a test asks for, rounded up. The demo model answers in it as well as it can."""
CHAT_OF_EMBEDDER = "{% for message in messages %}{{message['role'] + ': ' + message['content'] + '\\n'}}{% endfor %}"
OTHERS: dict[str, dict[str, Any]] = {
    "intfloat/multilingual-e5-small": {"model": "demo-embed", "chat_template": CHAT_OF_EMBEDDER},
    "BAAI/bge-base-en-v1.5": {"model": "demo-embed", "max_model_len": 100},
    "BAAI/bge-reranker-base": {"model": "demo-rerank", "max_model_len": 100, "dtype": "float32"},  # theirs: half
}
"""Models for names of the tests, and the settings that these give to their servers."""
WIDE = "Qwen/Qwen2-1.5B-Instruct"
"""The model of which log-probabilities of all tokens are asked for."""
ENTRYPOINTS = "tests/entrypoints"
GROUPS = {
    "chat": ("openai/chat_completion/test_chat.py",),
    "completion": ("openai/completion/test_completion.py",),
    "chat_completion": ("openai/chat_completion/test_chat_completion.py",),
    "messages": ("anthropic/test_messages.py",),
    "tokenization": ("serve/tokenize/test_tokenization.py",),
    "responses": tuple(
        f"openai/responses/test_{name}.py"
        for name in ("basic", "function_call", "simple", "stateful", "structured_output")
    ),
    "return_token_ids": ("openai/test_return_token_ids.py",),
    "function calling": ("openai/chat_completion/test_completion_with_function_calling.py",),
    "embed online": ("pooling/embed/test_online.py",),
    "cross-encoder": ("pooling/scoring/test_cross_encoder_online.py",),
    "bi-encoder": ("pooling/scoring/test_bi_encoder_online.py",),
    "instrumentator": ("serve/instrumentator/test_basic.py",),
    "logprob_token_ids": ("openai/chat_completion/test_logprob_token_ids.py",),
    "chat_echo": ("openai/chat_completion/test_chat_echo.py",),
    "logit_bias": ("openai/chat_completion/test_chat_logit_bias_validation.py",),
    "chunked": ("openai/test_chunked_prompt.py",),
    "models": ("openai/models/test_models.py",),
}  # fmt: skip
HELPERS = (
    "openai/responses/conftest.py", "pooling/scoring/util.py", "conftest.py",
    "../models/language/pooling/embed_utils.py",
)  # fmt: skip
UNITS = (
    "chat_completion_request", "request_bad_words", "request_forwards", "chat_request_decouples",
    "completion_request_decouples", "completion_rejects_explicit", "requests_reject_explicit",
    "health_check_engine_dead", "null_top_logprobs",
)  # fmt: skip
"""Parts of names of tests that make objects of vLLM's classes."""
BEYOND = {
    "chat": "the counts, sums and different answers of zephyr; a last frame with text and reason in one; wording of "
    "a seed's limits",
    "completion": "Qwen3's count of tokens; log-probabilities of chosen tokens, of which some lie beyond the bundled "
    "vocabulary",
    "chat_completion": "ids of a remote prefill (kv_transfer_params)",
    "messages": "a call of zephyr's; a count of what was written to the cache",
    "tokenization": "raw pieces of a vocabulary; an answer without llama.cpp's field; the class of a tokenizer",
    "responses": "thoughts, sums and names of Qwen3; messages as tokens; calls that need more tokens than they may "
    "have, which are refused here before they run",
    "return_token_ids": "an answer that does not end by itself",
    "function calling": "thoughts of Qwen3; different ages in two answers; calls with 1 token to write them",
    "embed online": "ids, dimensions and names of e5; padding; pydantic's wording and vLLM's advice",
    "cross-encoder": "ids and names of bge; long queries of a reranking, which are cut here; wording",
    "bi-encoder": "dimensions of bge; long queries of a reranking; wording of refusals",
    "instrumentator": "an answer of zephyr's length",
    "logprob_token_ids": "log-probabilities of chosen tokens, of which some lie beyond the bundled vocabulary",
    "chat_echo": "an end of Qwen2's answer",
    "logit_bias": "all wrong names in one error: the first is named",
    "models": "adapters in the listing",
}
"""Groups of which some tests cannot pass, and what those want: of the models they name, or of vLLM alone."""


def prepared(source: Path, folder: Path) -> Path:
    """A folder with the tests, their helpers and what stands in for the rest."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in (*(file for group in GROUPS.values() for file in group), *HELPERS):
        path = (folder / ENTRYPOINTS / file).resolve()
        for each in [path.parent, *path.parent.parents]:
            if each == folder:
                break
            each.mkdir(parents=True, exist_ok=True)
            (each / "__init__.py").touch()
        shutil.copy(source / ENTRYPOINTS / file, path)
    for module in ("vllm/utils/serial_utils.py", "vllm/entrypoints/pooling/utils.py"):
        (folder / module).parent.mkdir(parents=True)
        shutil.copy(source / module, folder / module)
    shutil.copy(Path(__file__).with_name("vllm_stand_ins.py"), folder / "conftest.py")
    return folder


def longer(folder: Path, path: Path) -> Path:
    """A copy of a model's folder, for contexts of `CONTEXT` tokens."""
    shutil.copytree(folder, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}), encoding="utf-8")
    return path


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("pytest", nargs="*", help="more arguments for pytest")
    args = flags.parse_args()
    for group, wanted in BEYOND.items():
        print(f"cannot pass in {group}: {wanted}")
    source = unbuilt(args.source, "vllm", VERSION, args.work)
    folder = prepared(source, args.work.resolve() / "vllm-openai")
    demo = resources.files("asyncengine.demo")
    more = {
        "VLLM_TESTS_FOLDERS": json.dumps({task: str(demo / name) for task, name in FOLDERS.items()}),
        "VLLM_TESTS_VERSION": asyncengine.__version__,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-o", "addopts=--tb=native", "-o", "asyncio_mode=auto"]
    command += ["-k", " and ".join(f"not {name}" for name in UNITS)]
    command += [f"{ENTRYPOINTS}/{file}" for group in GROUPS.values() for file in group]
    folder_of_demo = longer(Path(str(demo / "model")), args.work.resolve() / "vllm-demo")
    model = {"model": str(folder_of_demo), "max_top_logprobs": 20}  # vLLM's default
    others = {**OTHERS, "HuggingFaceTB/SmolLM2-135M-Instruct": {**model, "max_model_len": 8192}}
    others[WIDE] = {**model, "max_model_len": 4080, "max_top_logprobs": 2048}
    with demo_server(model=model, others=others) as url:
        env = {**os.environ, **more, "VLLM_TESTS_URL": url}
        return run([*command, *args.pytest], cwd=folder, env=env)


if __name__ == "__main__":
    sys.exit(main())

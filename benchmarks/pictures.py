"""First tokens of questions about one picture: of the first question, of more of them, of a conversation's next turn.

    python -m benchmarks.pictures [--model demo-vision] [--side 512] [--questions 16] [--rounds 5] [--threads 1]
    python -m benchmarks.pictures --shape qwen3-vl --layers 4
    python -m benchmarks.pictures --text            text alone, with the tower loaded and without, in turns
    python -m benchmarks.pictures --write FOLDER    a checkpoint with random weights, for other programs
    python -m benchmarks.pictures --url http://127.0.0.1:8080/v1          any server of chats, with that checkpoint

Without `--model`: random weights in the shape of SmolVLM-256M (Allal et al. 2025), whose processor is given pictures
of one tile (`--longest-edge 512`, 64 tokens) to seventeen (2048, as published, 1088 tokens), or of Qwen3-VL-2B, with
so many `--layers` of its language model (0: all 28; the tower has all of its own). Each round has a picture of its own,
so that nothing of it is cached: a first question, a second turn behind its answer, then `--questions` others at once.
Times are from the call to the first token, in the caller's own loop: decoding and resizing the picture is in them.

llama.cpp's converter takes what `--write` has written (`convert_hf_to_gguf.py FOLDER`, and again with `--mmproj`) once
it is told that the demo model's pieces are those of GPT-2, which it knows by a digest alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from asyncengine import DEMO_MODEL, AsyncEngine, SamplingParams
from asyncengine.execution.models.vision.tower import TransformersTower

PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
ROWS = COLUMNS = 4
TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>"]
TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, ROWS + 1) for column in range(1, COLUMNS + 1)]
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ 'PLACEHOLDER' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_smolvlm(folder: Path, longest_edge: int) -> None:
    """All files of a checkpoint of SmolVLM-256M's shape but its weights; the tokenizer is the demo model's, with the
    tokens around pictures."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {
        "architectures": ["VLlama3ForCausalLM"], "model_type": "llama", "vocab_size": 49280,
        "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "max_position_embeddings": 8192, "rope_theta": 100000, "rms_norm_eps": 1e-5, "pad_token_id": 2,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    vision = {
        "model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "text_config": text,
        "vision_config": vision, "scale_factor": 4, "image_token_id": tokenizer.token_to_id("<image>"),
        "tie_word_embeddings": False, "pad_token_id": 2,
    }  # fmt: skip
    processor = {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": longest_edge},
        "max_image_size": {"longest_edge": 512}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    _write(folder, config, processor, "<image>")


def write_qwen3_vl(folder: Path, layers: int) -> None:
    """The same in Qwen3-VL-2B's shape, with so many layers of its language model."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": layers or 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
        "patch_size": 16, "out_hidden_size": 2048, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17][: (layers or 28) - 1],
    }  # fmt: skip
    start, end, image, video = map(tokenizer.token_to_id, QWEN_TOKENS)
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
        "vision_config": vision, "image_token_id": image, "video_token_id": video, "vision_start_token_id": start,
        "vision_end_token_id": end, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    _write(folder, config, processor, "<|vision_start|><|image_pad|><|vision_end|>")


def _write(folder: Path, config: dict[str, Any], processor: dict[str, Any], placeholder: str) -> None:
    for name, fields in (("config.json", config), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(fields))
    (folder / "tokenizer_config.json").write_text((DEMO_MODEL / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", placeholder))


def write_shape(folder: Path, options: argparse.Namespace, *, weights: bool = False) -> None:
    """The checkpoint that the options name, with random weights where they are asked for."""
    if options.shape == "smolvlm":
        write_smolvlm(folder, options.longest_edge)
    else:
        write_qwen3_vl(folder, options.layers)
    if weights:
        config = AutoConfig.from_pretrained(folder)
        AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


class Count:
    """A count of the pictures that the tower has encoded."""

    def __init__(self) -> None:
        self.encoded = 0
        inner = TransformersTower.encode

        def encode(tower: TransformersTower, pixels: Any) -> Any:
            self.encoded += 1
            return inner(tower, pixels)

        TransformersTower.encode = encode  # type: ignore[method-assign, assignment]


def about(side: int, seed: int, text: str) -> dict[str, Any]:
    """A question about a picture of random pixels, as any server takes it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "png", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


Messages = list[dict[str, Any]]
Chat = Callable[[Messages], AsyncIterator[str]]
"""The pieces of an answer to a chat."""


def in_process(engine: AsyncEngine) -> Chat:
    async def chat(messages: Messages) -> AsyncIterator[str]:
        async with engine.stream_chat(messages, PARAMS) as stream:
            async for chunk in stream:
                yield chunk.text

    return chat


def over_http(url: str) -> Chat:
    from openai import AsyncOpenAI

    client: Any = AsyncOpenAI(base_url=url, api_key="none", timeout=3600)

    async def chat(messages: Messages) -> AsyncIterator[str]:
        served = (await client.models.list()).data[0].id
        stream = await client.chat.completions.create(
            model=served, messages=messages, stream=True, temperature=0, max_tokens=PARAMS.max_tokens,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content is not None:
                yield chunk.choices[0].delta.content

    return chat


async def ask(chat: Chat, messages: Messages) -> tuple[float, str]:
    """Seconds until the first token, and the answer."""
    began = time.perf_counter()
    seconds, text = 0.0, ""
    async for piece in chat(messages):
        seconds = seconds or (time.perf_counter() - began if piece else 0.0)
        text += piece
    return seconds or time.perf_counter() - began, text


async def measure(chat: Chat, options: argparse.Namespace) -> None:
    """All rounds, and a line for each kind of question."""
    await ask(chat, [about(options.side, 10**6, "Once, to warm up.")])
    times: dict[str, list[float]] = {"first question": [], "second turn": [], "another question": [], "all others": []}
    for each in range(options.rounds):
        first = [about(options.side, each, "What is in the picture?")]
        seconds, text = await ask(chat, first)
        times["first question"].append(seconds)
        turns = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "And what color has it?"}]
        times["second turn"].append((await ask(chat, turns))[0])
        texts = [f"Question {number}: what else is there?" for number in range(options.questions)]
        others = [[about(options.side, each, text)] for text in texts]
        began = time.perf_counter()
        times["another question"] += [found for found, _ in await asyncio.gather(*(ask(chat, o) for o in others))]
        times["all others"].append(time.perf_counter() - began)
    first_token = statistics.median(times["first question"])
    for name, found in times.items():
        middle = statistics.median(found)
        what = "answers after" if name == "all others" else "first token after"
        print(f"{name:>18}: {what} {middle * 1e3:8.1f} ms, {middle / first_token:.3f} of the first's")


async def compare_text(path: str, settings: dict[str, Any], rounds: int) -> None:
    """Text alone, with the tower and without, in turns: the ratio of both times of each round."""
    options = PARAMS.replace(max_tokens=64)
    async with (
        await AsyncEngine.from_pretrained(path, **settings) as seeing,
        await AsyncEngine.from_pretrained(path, **settings, images="off") as blind,
    ):
        ratios = []
        for each in range(-1, rounds):
            prompt = [2 + (7 * place + each) % 1000 for place in range(256)]
            seconds = {}
            for engine in (seeing, blind) if each % 2 else (blind, seeing):
                began = time.process_time()
                await engine.generate(prompt, options)
                seconds[engine] = time.process_time() - began
            ratios.append(seconds[blind] / seconds[seeing])
    found = statistics.median(ratios[1:])
    print(f"text alone, with a tower: {found:.3f} of the speed without ({rounds} pairs, by processor time)")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", choices=("smolvlm", "qwen3-vl"), default="smolvlm")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--longest-edge", type=int, default=512)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.url:
        await measure(over_http(options.url), options)
        return
    if options.write:
        options.write.mkdir()
        write_shape(options.write, options, weights=True)
        return
    with tempfile.TemporaryDirectory() as made:
        settings: dict[str, Any] = {"num_threads": options.threads, "show_progress": False, "speculation": "off"}
        if not options.model:
            write_shape(Path(made), options)
            settings |= {"load_format": "dummy", "kv_cache_memory": "1GiB"}
        if options.text:
            await compare_text(options.model or made, settings, options.rounds)
            return
        async with await AsyncEngine.from_pretrained(options.model or made, **settings) as engine:
            print(f"{engine.info.name}, {engine.info.weight_bytes / 1e6:.0f} MB of {engine.info.dtype}")
            counted = Count()
            await measure(in_process(engine), options)
            print(f"pictures encoded for {options.rounds} rounds and one before: {counted.encoded}")


if __name__ == "__main__":
    asyncio.run(main())

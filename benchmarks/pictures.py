"""First tokens of questions about one picture: of the first question, of more of them, of a conversation's next turn.

    python -m benchmarks.pictures [--model demo-vision] [--side 512] [--questions 16] [--rounds 5] [--threads 1]

Without `--model`: random weights in the shape of SmolVLM-256M (Allal et al. 2025), whose processor is given pictures
of one tile (`--longest-edge 512`, 64 tokens) to seventeen (2048, as published, 1088 tokens). Each round has a picture
of its own, so that nothing of it is cached: a first question, a second turn behind its answer, then `--questions`
others at once. Times are from the call to the first token, in the caller's own loop: decoding and resizing the picture
is in them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from asyncengine import DEMO_MODEL, AsyncEngine, SamplingParams
from asyncengine.models.vision.tower import TransformersTower

PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
ROWS = COLUMNS = 4
TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>"]
TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, ROWS + 1) for column in range(1, COLUMNS + 1)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_smolvlm(folder: Path, longest_edge: int) -> None:
    """All files of a checkpoint of SmolVLM-256M's shape but its weights; the tokenizer is the demo model's, with the
    tokens around pictures."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {
        "model_type": "llama", "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536,
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
    for name, fields in (("config.json", config), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(fields))
    (folder / "tokenizer_config.json").write_text((DEMO_MODEL / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class Count:
    """A count of the pictures that the tower has encoded."""

    def __init__(self) -> None:
        self.encoded = 0
        inner = TransformersTower.encode

        def encode(tower: TransformersTower, pixels: Any) -> Any:
            self.encoded += 1
            return inner(tower, pixels)

        TransformersTower.encode = encode  # type: ignore[method-assign]


def picture(side: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


async def ask(engine: AsyncEngine, messages: list[dict[str, Any]]) -> tuple[float, str]:
    """Seconds until the first token, and the answer."""
    began = time.perf_counter()
    seconds, text = 0.0, ""
    async with engine.stream_chat(messages, PARAMS) as stream:
        async for chunk in stream:
            seconds = seconds or time.perf_counter() - began
            text += chunk.text
    return seconds, text


async def measure(engine: AsyncEngine, options: argparse.Namespace) -> None:
    """All rounds, and a line for each kind of question."""
    counted = Count()
    about = lambda shown, text: {"role": "user", "content": [{"type": "image", "image": shown}, text]}  # noqa: E731
    said = lambda text: {"type": "text", "text": text}  # noqa: E731
    await ask(engine, [about(picture(options.side, 10**6), said("Once, to warm up."))])
    times: dict[str, list[float]] = {"first question": [], "second turn": [], "another question": []}
    encoded = []
    for each in range(options.rounds):
        shown, before = picture(options.side, each), counted.encoded
        first = [about(shown, said("What is in the picture?"))]
        seconds, text = await ask(engine, first)
        times["first question"].append(seconds)
        turns = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "And what color has it?"}]
        times["second turn"].append((await ask(engine, turns))[0])
        others = [
            [about(shown, said(f"Question {number}: what else is there?"))] for number in range(options.questions)
        ]
        times["another question"] += [found for found, _ in await asyncio.gather(*(ask(engine, o) for o in others))]
        encoded.append(counted.encoded - before)
    first_token = statistics.median(times["first question"])
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"{name:>18}: first token after {middle * 1e3:8.1f} ms, {middle / first_token:.3f} of the first's")
    print(f"pictures encoded in a round of {2 + options.questions} requests: {sorted(set(encoded))}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--longest-edge", type=int, default=512)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        settings: dict[str, Any] = {"num_threads": options.threads, "show_progress": False, "speculation": "off"}
        if not options.model:
            write_smolvlm(Path(made), options.longest_edge)
            settings |= {"load_format": "dummy", "kv_cache_memory": "1GiB"}
        async with await AsyncEngine.from_pretrained(options.model or made, **settings) as engine:
            print(f"{engine.info.name}, {engine.info.weight_bytes / 1e6:.0f} MB of {engine.info.dtype}")
            await measure(engine, options)


if __name__ == "__main__":
    asyncio.run(main())

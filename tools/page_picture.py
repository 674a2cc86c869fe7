"""Draws docs/images/page.png and page_engine.png: the app's page in a headless Chromium, with a model behind it.

    python -m tools.page_picture [MODEL]

needs playwright and a Chromium (`apt install chromium`, or `playwright install chromium`). The pictures in the
documentation are of SmolLM2-135M-Instruct, as `tests/real/fetch.py` fetches it.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from pathlib import Path

import uvicorn
from playwright.async_api import Page, async_playwright

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.integrations.http import app

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = {"width": 1320, "height": 760}


async def main(model: str) -> None:
    """Serve, chat, and take the pictures while other requests are running."""
    settings = {"kv_cache_memory": "48MiB", "max_model_len": 2048, "max_num_seqs": 3, "show_progress": False}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with await AsyncEngine.from_pretrained(model, **settings) as engine:  # type: ignore[arg-type]
            server = uvicorn.Server(uvicorn.Config(app({"smollm2": engine}, hosts=["127.0.0.1"]), log_level="warning"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with async_playwright() as playwright:
                found = shutil.which("chromium") or shutil.which("google-chrome")
                browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
                page = await browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
                await page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}")
                await chat(page)
                await page.screenshot(path=FOLDER / "page.png")
                await watch(page, engine)
                await browser.close()
            server.should_exit = True
            await serving


async def chat(page: Page) -> None:
    """Two chats, the second of two questions."""
    await page.wait_for_selector("#model option", state="attached")
    await page.click("#options summary")
    await page.fill("#temperature", "0")
    await page.fill("#max_tokens", "160")
    await page.click("#options summary")
    await ask(page, "Tell me about Oslo in two sentences.", 2)
    await page.click("#fresh")
    await ask(page, "What is a radix tree?", 2)
    await ask(page, "Write a Python function that adds two numbers, as a code block.", 4)
    await asyncio.sleep(1.5)


async def watch(page: Page, engine: AsyncEngine) -> None:
    """The engine's side, opened, while four others ask questions about one long text."""
    text = "A radix tree keeps prompts by what they begin with. " * 12
    chats = [f"{text}\n\nQuestion {number % 3}: what is kept?" for number in range(4)]
    params = [SamplingParams(max_tokens=1500, ignore_eos=True, seed=number) for number in range(4)]
    await engine.generate(text, SamplingParams(max_tokens=1))
    pairs = zip(chats, params, strict=True)
    others = [asyncio.create_task(engine.generate(prompt, each)) for prompt, each in pairs]
    await page.click("#now > summary")
    for panel in ("#running", "#computed", "#prefixes"):
        await page.click(f"{panel} > summary")
    await asyncio.sleep(6)  # the page looks once a second
    await page.locator("aside").evaluate("node => { node.style.width = '24rem'; }")
    await page.set_viewport_size({"width": 1320, "height": 860})
    await asyncio.sleep(1.5)
    await page.locator("aside").screenshot(path=FOLDER / "page_engine.png")
    for other in others:
        other.cancel()
    await asyncio.wait(others)


async def ask(page: Page, text: str, article: int) -> None:
    """Send a message, and wait for the end of its answer."""
    await page.fill("#text", text)
    await page.press("#text", "Enter")
    await page.wait_for_selector(f"article:nth-of-type({article}) .tools")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "demo"))

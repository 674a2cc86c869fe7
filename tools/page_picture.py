"""Draws docs/images/page.png: the app's page in a headless Chromium, with the demo model behind it.

    python -m tools.page_picture

needs playwright and a Chromium (`apt install chromium`, or `playwright install chromium`).
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import uvicorn
from playwright.async_api import Page, async_playwright

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.integrations.http import app

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "page.png"
TOOLS = """[{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]"""
SIZE = {"width": 1080, "height": 640}


async def main() -> None:
    """Serve, chat, and take the picture while other requests are running."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with await AsyncEngine.from_pretrained("demo", kv_cache_memory="16MiB", show_progress=False) as engine:
            server = uvicorn.Server(uvicorn.Config(app(engine), log_level="warning"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            async with async_playwright() as playwright:
                found = shutil.which("chromium") or shutil.which("google-chrome")
                browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
                page = await browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
                await page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}")
                await chat(page, engine)
                await browser.close()
            server.should_exit = True
            await serving


async def chat(page: Page, engine: AsyncEngine) -> None:
    """Two questions, a tool's result, and the picture."""
    await page.wait_for_selector("#model option", state="attached")
    await page.click("#options summary")
    await page.fill("#temperature", "0")
    await page.fill("#tools", TOOLS)
    await page.click("#options summary")
    await ask(page, "Tell me a story about a fox.", 2)
    await ask(page, "What is the weather in Oslo?", 4)
    await ask(page, '{"temperature": 3, "sky": "snow"}', 6)
    others = []
    for number in range(14):
        params = SamplingParams(max_tokens=1200, ignore_eos=True, seed=number)
        others.append(asyncio.create_task(engine.generate(f"Story {number}: once upon a time", params)))
    await asyncio.sleep(6)  # the page looks once a second
    await page.screenshot(path=PICTURE)
    for other in others:
        other.cancel()
    await asyncio.wait(others)


async def ask(page: Page, text: str, article: int) -> None:
    """Send a message, and wait for the end of its answer."""
    await page.fill("#text", text)
    await page.press("#text", "Enter")
    await page.wait_for_selector(f"article:nth-of-type({article}) .note, article:nth-of-type({article}) .error")


if __name__ == "__main__":
    asyncio.run(main())

"""anthropic-sdk-python's own tests of its API, against an app with the demo model.

    python -m benchmarks.suites.anthropic_python [--source FOLDER] [-- PYTEST'S ARGUMENTS]

Every response is checked by the client's types, strictly, by the synchronous client, the asynchronous one, and that on
aiohttp. The tests are made for a mock server that answers anything; what of their requests no server can answer is
listed here, with a reason.
"""

from __future__ import annotations

import os
import shutil
import sys

from benchmarks.suites.served import demo_server, environment, parser, run, source

PROJECT, REFERENCE = "anthropics/anthropic-sdk-python", "main"
NEEDED = (
    "pytest",
    "pytest-asyncio",
    "pytest-xdist",
    "respx",
    "inline-snapshot",
    "http-snapshot[httpx]",
    "dirty-equals",
)
FILES = ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py")
AMENDED = {
    '"location": "bar",': '"location": {"type": "string"},',  # the schema of a property is an object, no text
    '"unit": "bar",': '"unit": {"type": "string"},',
    '"schema": {"foo": "bar"},': '"schema": {"type": "object"},',  # a schema that says nothing and is for nothing
}
"""Texts of the tests that are no JSON schema, and what stands there instead."""
DESELECTED: dict[str, str] = {}
"""Parts of tests' names, and why they are left out."""


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("pytest", nargs="*", help="more arguments for pytest")
    args = flags.parse_args()
    folder = args.work.resolve() / "anthropic-python"
    shutil.copytree(source(args.source, PROJECT, REFERENCE, args.work), folder, dirs_exist_ok=True)
    for file in FILES:
        path = folder / "tests" / "api_resources" / file
        text = path.read_text(encoding="utf-8")
        for given, meant in AMENDED.items():
            text = text.replace(given, meant)
        path.write_text(text, encoding="utf-8")
    python = environment(args.work, "anthropic-python", [f"{folder}[aiohttp]", *NEEDED])
    command = [str(python), "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/api_resources/{file}" for file in FILES]
    if DESELECTED:
        command += ["-k", " and ".join(f"not {name}" for name in DESELECTED)]
    with demo_server() as url:
        return run([*command, *args.pytest], cwd=folder, env={**os.environ, "TEST_API_BASE_URL": url})


if __name__ == "__main__":
    sys.exit(main())

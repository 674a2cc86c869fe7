"""Open Responses' compliance test against the app: python -m benchmarks.suites.open_responses

    [--source FOLDER --work FOLDER] [--reference main]

The project's own script (bin/compliance-test.ts) sends requests over HTTP and WebSockets, and compares responses and
events with the schemas that are generated from its OpenAPI file. It needs npm, which installs bun and zod.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.suites.served import demo_server, parser, source

LEFT_OUT: Mapping[str, str] = {"image-input": "the demo model reads no pictures, and says so by the field's name"}
"""Tests that are not counted, with the reason."""


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--reference", default="main", help="tag or branch of the specification")
    args = flags.parse_args()
    folder = source(args.source, "openresponses/openresponses", args.reference, args.work)
    tools = (args.work / "open-responses-tools").resolve()
    if not (tools / "node_modules").exists():
        install = ["npm", "install", "--silent", "--no-save", "--prefix", str(tools), "bun@1.3", "zod@^3.25.76"]
        subprocess.run(install, check=True)
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(tools / "node_modules")
    with demo_server() as url:
        command = [str(tools / "node_modules/.bin/bun"), "run", "bin/compliance-test.ts", "--json", "--model", "demo"]
        command += ["--base-url", f"{url}/v1", "--api-key", "none"]
        told = subprocess.run(command, cwd=folder, check=False, stdout=subprocess.PIPE, text=True).stdout
    results = json.loads(told)["results"]
    for result in results:
        reason = LEFT_OUT.get(result["id"])
        print(
            "left out" if reason else result["status"],
            result["id"],
            reason or "; ".join(result.get("errors", []))[:500],
        )
    counted = [result for result in results if result["id"] not in LEFT_OUT]
    failed = [result for result in counted if result["status"] != "passed"]
    print(f"{len(counted) - len(failed)} passed, {len(failed)} failed, {len(LEFT_OUT)} left out")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

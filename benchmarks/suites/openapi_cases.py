"""Schemathesis on OpenAI's own OpenAPI file against the app: no answer is a server's error.

    python -m benchmarks.suites.openapi_cases [--source FILE] [--cases 200]

--source: openapi.json or openapi.yaml of openai/openai-openapi, cloned otherwise. --cases: valid and invalid requests
for each operation; 2,000 make more than 10,000. It needs schemathesis: pip install schemathesis. The demo model's
context is short here, so that an answer without a limit takes no time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.suites.served import demo_server, parser, run, source

PATHS = ("/chat/completions", "/completions", "/embeddings", "/models", "/models/{model}", "/responses")
LEFT_OUT = {
    ("/models/{model}", "delete"): "no model is deleted by a client",
    ("/chat/completions", "get"): "chats are not stored",
}
"""Operations that are left out, with the reason."""


def pruned(spec: dict[str, Any]) -> dict[str, Any]:
    """`spec` with the operations that are served, and the schemas that these use."""
    paths = {path: dict(spec["paths"][path]) for path in PATHS}
    for path, method in LEFT_OUT:
        paths[path].pop(method, None)
    kept: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [paths]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            reference = item.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/components/"):
                _, _, kind, name = reference.split("/", 3)
                if name not in kept.setdefault(kind, {}):
                    kept[kind][name] = spec["components"][kind][name]
                    waiting.append(kept[kind][name])
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return {"openapi": spec["openapi"], "info": spec["info"], "paths": paths, "components": kept}


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--cases", type=int, default=200)
    args = flags.parse_args()
    file: Path = source(args.source, "openai/openai-openapi", "master", args.work)
    file = next(each for each in (file, file / "openapi.json", file / "openapi.yaml") if each.is_file())
    if file.suffix == ".json":
        spec = json.loads(file.read_text(encoding="utf-8"))
    else:
        import yaml

        spec = yaml.safe_load(file.read_text(encoding="utf-8"))
    args.work.mkdir(parents=True, exist_ok=True)
    served = args.work / "served.json"
    served.write_text(json.dumps(pruned(spec)), encoding="utf-8")
    command = ["schemathesis", "run", str(served), "--checks", "not_a_server_error", "--phases", "fuzzing"]
    command += ["--mode", "all", "--max-examples", str(args.cases), "--continue-on-failure", "--no-color"]
    command += ["--suppress-health-check", "all", "--request-timeout", "60"]
    with demo_server(model={"max_model_len": 256}) as url:
        return run([command[0], *command[1:], "--url", f"{url}/v1"])


if __name__ == "__main__":
    sys.exit(main())

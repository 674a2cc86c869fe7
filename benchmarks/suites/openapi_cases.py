"""Schemathesis on OpenAI's own OpenAPI file against the app: no answer is a server's error.

    python -m benchmarks.suites.openapi_cases [--source FILE] [--cases 1000] [--only PATH]

--source: openapi.json or openapi.yaml of openai/openai-openapi, cloned otherwise. --cases: valid and invalid requests,
of all operations together. It needs schemathesis: pip install schemathesis. Drawing is what takes the time: a chat or a
response costs some 0.15 s of CPU, a text completion or an embedding 0.02 s, and the more the more cases one run has, as
none is drawn twice; hence `SHARES` and `ROUND`. The demo model's context is short here: an answer without a limit takes
no time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.suites.served import demo_server, parser, run, source

SHARES = {
    "/completions": 0.56, "/embeddings": 0.28, "/models": 0.001, "/models/{model}": 0.009, "/responses": 0.09,
    "/chat/completions": 0.06,
}  # fmt: skip
"""Paths that are asked, and the share of all cases that each has."""
ROUND = 200
"""Most cases of one run."""
LEFT_OUT = {
    ("/models/{model}", "delete"): "no model is deleted by a client",
    ("/chat/completions", "get"): "chats are not stored",
}
"""Operations that are left out, with the reason."""


def pruned(spec: dict[str, Any]) -> dict[str, Any]:
    """`spec` with the operations that are served, and the schemas that these use."""
    paths = {path: dict(spec["paths"][path]) for path in SHARES}
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
    flags.add_argument("--cases", type=int, default=1000)
    flags.add_argument("--only", choices=SHARES, help="the one path to ask")
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
    failed = 0
    with demo_server(model={"max_model_len": 96}) as url:
        for path in [args.only] if args.only else SHARES:
            most = args.cases if args.only else max(1, round(SHARES[path] * args.cases))
            for done in range(0, most, ROUND):
                failed |= run([
                    sys.executable, "-m", "schemathesis.cli", "run", str(served), "--url", f"{url}/v1",
                    "--include-path", path, "--phases", "fuzzing", "--checks", "not_a_server_error", "--mode", "all",
                    "--max-examples", str(min(ROUND, most - done)), "--no-color", "--continue-on-failure",
                    "--suppress-health-check", "all", "--request-timeout", "60",
                ])  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(main())

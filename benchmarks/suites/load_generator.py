"""guidellm, another project's load generator, against the app with the demo model.

    python -m benchmarks.suites.load_generator [--requests 64] [--rate 8]

Synthetic chats of 128 tokens in and 64 out: as fast as they go, then at a rate. It must end without a failed request.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from asyncengine import DEMO_MODEL
from benchmarks.suites.served import demo_server, environment, parser, run


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--requests", type=int, default=64)
    flags.add_argument("--rate", type=float, default=8.0)
    args = flags.parse_args()
    guidellm = environment(args.work, "guidellm", ["guidellm>=0.8,<0.9"]).with_name("guidellm")
    failed = 0
    with demo_server() as url:
        for profile in (f"kind=throughput,max_concurrency={args.requests}", f"kind=constant,rate={args.rate}"):
            report = args.work.resolve() / f"{profile.partition(',')[0].removeprefix('kind=')}.json"
            command = [
                str(guidellm), "run", "--backend", f"kind=openai_http,target={url},model=demo", "--profile", profile,
                "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=64",
                "--tokenizer", f"kind=hf_auto,model={DEMO_MODEL}",
                "--constraint", f"kind=max_requests,count={args.requests}", "--output", f"kind=json,path={report}",
                "--disable-console-interactive",
            ]  # fmt: skip
            failed |= run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}) or not answered(report)
    return int(failed)


def answered(report: Path) -> bool:
    """Whether every request was answered."""
    totals = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]["request_totals"]
    print(report.name, totals)
    return totals["errored"] == 0 and totals["successful"] > 0


if __name__ == "__main__":
    sys.exit(main())

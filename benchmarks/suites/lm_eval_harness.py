"""EleutherAI's evaluation harness against the app, its numbers beside the engine's own:

    python -m benchmarks.suites.lm_eval_harness [--work FOLDER] [--python FILE]

The harness (`local-completions`) tokenizes through /tokenize, sends token ids to /v1/completions with echo and
logprobs, and sums what comes back; for texts it generates. The tasks are made here, since data sets must be fetched:
choices among continuations, and a text to go on with. Each sample's log-likelihoods are compared with those of the
same ids in process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncengine import Engine, SamplingParams
from benchmarks.suites.served import demo_server, environment, parser

ROWS = [
    {"context": "The capital of France is", "choices": [" Paris", " London", " a kind of bread"], "label": 0},
    {"context": "Two and two make", "choices": [" four", " five"], "label": 0},
    {"context": "The opposite of hot is", "choices": [" warm", " cold", " naïve"], "label": 1},
    {"context": "Hello! How", "choices": [" are you?", " many elephants", "ever, the end is near"], "label": 0},
]
COMMON = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0, "metadata": {"version": 1}}
TASKS: dict[str, dict[str, Any]] = {
    "made_choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "label", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    },
    "made_texts": {
        "output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--python", type=Path, help="a Python that has lm_eval, instead of a new environment")
    args = flags.parse_args()
    python = args.python or environment(args.work, "lm-eval", ["lm_eval[api]"])
    folder = (args.work / "lm-eval-tasks").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    for name, task in TASKS.items():
        text = json.dumps({"task": name, **COMMON, "dataset_kwargs": files, **task})  # JSON is YAML
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    with demo_server() as url:
        model = f"model=demo,base_url={url}/v1/completions,num_concurrent=1,tokenized_requests=True"
        command = [str(python), "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
        command += ["--tasks", ",".join(TASKS), "--include_path", str(folder)]
        command += ["--batch_size", "4", "--log_samples", "--output_path", str(folder / "out")]
        subprocess.run(command, check=True)
    return compare(folder / "out")


def compare(folder: Path) -> int:
    """The number of samples whose scores or texts are not the engine's."""
    wrong = 0
    with Engine.from_pretrained("demo", show_progress=False) as engine:
        for name in TASKS:
            latest = max(folder.rglob(f"samples_{name}_*.jsonl"), key=lambda path: path.stat().st_mtime)
            for line in latest.read_text(encoding="utf-8").splitlines():
                sample = json.loads(line)
                found, wanted = sample["resps"], _wanted(engine, sample["doc"], name)
                same = wanted == found
                wrong += not same
                print("same" if same else "WRONG", name, sample["doc"]["context"], found, "" if same else wanted)
    return min(wrong, 1)


def _wanted(engine: Engine, row: dict[str, Any], task: str) -> list[Any]:
    if task == "made_texts":
        params = SamplingParams(
            temperature=0, max_tokens=8, stop=["\n", *engine.token_texts(engine.info.eos_token_ids[:1])]
        )
        ids = engine.tokenize(row["context"], add_special_tokens=False)
        return [[engine.generate(ids, params).text]]
    found = []
    for choice in row["choices"]:
        before = engine.tokenize(row["context"], add_special_tokens=False)
        ids = engine.tokenize(row["context"] + choice, add_special_tokens=False)
        scored = engine.generate(
            ids, SamplingParams(max_tokens=0, prompt_logprobs=True, top_logprobs=1)
        ).prompt_logprobs
        of_choice = [entry for entry in (scored or [])[len(before) :] if entry is not None]
        greedy = all(entry.top[0][0] == entry.token_id for entry in of_choice)
        found.append([[str(sum(entry.logprob for entry in of_choice)), str(greedy)]])  # as the harness writes them
    return found


if __name__ == "__main__":
    sys.exit(main())

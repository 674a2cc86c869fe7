"""Prints the lowest version of each dependency that pyproject.toml allows, one pip requirement a line.

Torch is left out: its releases take gigabytes, and one of them is enough for a run of CI.
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["langchain"], *extras["llama-index"]]:
    name, lowest = re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)", requirement).groups()
    if name != "torch":
        print(f"{name}=={lowest}")

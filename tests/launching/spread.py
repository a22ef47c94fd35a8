"""Measure each script's metric in FP32 over eight seeds; writes ``spread.json``.

python tests/launching/spread.py
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[i]) for i in range(3)]

from launching.test_scripts import NAMES  # noqa: E402
from script_processes import SCRIPTS, ForkServer  # noqa: E402

SEEDS = 8


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        fork_server = ForkServer("lightning", "transformers.trainer")
        for name in NAMES:
            runs = [
                fork_server("python", SCRIPTS / f"{name}.py", seed, cwd=folder)
                for seed in range(SEEDS)
            ]
            if "this script needs" in runs[0].err:
                continue
            found[name] = [run.metric for run in runs]
            print(name, found[name], flush=True)
    Path(__file__).with_name("spread.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Every function of `keras.ops` and layer of `keras.layers`, with every layout of its inputs.

python audit/run.py [--kind ops|layers] [--mode eager|captured] [--only NAME ...]

Prints the rows that are wrong, and the ops that ran replicated. Rows go to `build/audit/`, where an
audit that was stopped goes on (with `--only`, these names are gone through again), and all of them
to docs/ops.md and docs/layers.md. With `AUDIT_DEVICE=gpu` the ranks share the first GPU, by
gloo; rows go to `build/audit_gpu/`, and not to the docs.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from pathlib import Path

from tables import BUILD, KINDS, MODES, ON_GPU, rows_of, verdict, write

WORKER = Path(__file__).parent / "worker.py"
RANKS = 4


def run(kind: str, mode: str, only: list[str]) -> None:
    """Go through all rows that are left.

    Ranks that lose each other are started again, and go on after the row at which they did. Not by
    torchrun: the store that it keeps has the addresses of ranks that are gone.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / f"{kind}_{mode}.jsonl"
    kept = [row for row in rows_of(kind, mode) if row["name"] not in only]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--standalone", str(WORKER), str(path), kind, mode]
    command += ["--only", *only] if only else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = path.with_suffix(".log")
    while True:
        before = len(rows_of(kind, mode))
        with log.open("a") as output:
            code = subprocess.run(command, env=environment, stdout=output, stderr=output).returncode
        if code == 0:
            return
        if len(rows_of(kind, mode)) == before:
            sys.exit(f"The audit could not go on; see {log}.")


def report(rows: list[dict]) -> int:
    """Print what is wrong and what is replicated; how many rows are wrong."""
    for row in rows:
        if row["wrong"]:
            which = f"{row['name']}({row['inputs']}) {row['dtype']} {row['weights']}"
            print(f"WRONG {which} [{row['layout']}]: {row['wrong'][:300]}")
    replicated = collections.Counter(
        op for row in rows if not row["wrong"] for op in row["replicated"]
    )
    print("replicated:", ", ".join(f"{op} {n}" for op, n in replicated.most_common()))
    verdicts = collections.Counter(map(verdict, rows))
    print(dict(verdicts), flush=True)
    return verdicts["wrong"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "torch"
    wrong = 0
    for mode in [arguments.mode] if arguments.mode else MODES:
        for kind in [arguments.kind] if arguments.kind else KINDS:
            run(kind, mode, arguments.only)
            rows = rows_of(kind, mode)
            if arguments.only:
                rows = [row for row in rows if row["name"] in arguments.only]
            print(f"{kind}, {mode}:")
            wrong += report(rows)
            if not ON_GPU:
                write(kind)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

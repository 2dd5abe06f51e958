"""Every function of `keras.ops` with its inputs laid out in every way, against one device.

python audit/run.py [--captured] [--only NAME ...]

Prints the rows that are wrong, and the ops that ran replicated. Rows go to `build/audit/`, where an
audit that was stopped goes on, and all of them to docs/ops.md.
"""

import argparse
import collections
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "audit"
DOCS = HERE.parent / "docs" / "ops.md"
RANKS = 4
INTRODUCTION = """\
# Every function of keras.ops on a mesh

Written by `make audit`: each function with its inputs laid out in every way on a mesh of 2 x 2:
each dim sharded over one axis or both, evenly and unevenly, two dims, pending sums; one input at a
time and all alike. Values and gradients are those of one device, eager and captured. *Replicated*
counts layouts in which an op has no way to work on shards: its inputs are gathered, which is right
and warns. Collectives and bytes are the most that a call with its gradients needs in eager mode,
for inputs of about 20 numbers.
"""


def run(rows: Path, options: list[str]) -> None:
    """Start ranks until they have been through all rows."""
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.touch()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command = [*torchrun, str(HERE / "worker.py"), str(rows), *options]
    environment = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    while True:
        before = len(rows.read_text().splitlines())
        log = rows.with_suffix(".log")
        with log.open("a") as output:
            code = subprocess.run(command, env=environment, stdout=output, stderr=output).returncode
        if code == 0:
            return
        if len(rows.read_text().splitlines()) == before:
            sys.exit(f"The audit could not go on; see {log}.")


def table() -> str:
    """All rows by op, as Markdown."""
    lines = [
        INTRODUCTION,
        "| function | layouts | right | replicated | wrong | collectives | bytes |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    rows = [row for name in ("eager", "captured") for row in _rows(BUILD / f"{name}.jsonl")]
    by_op = collections.defaultdict(list)
    for row in rows:
        by_op[row["op"]].append(row)
    for op, found in sorted(by_op.items()):
        verdicts = collections.Counter(_verdict(row) for row in found)
        most = [max(row[key] for row in found) for key in ("collectives", "bytes")]
        numbers = [len(found), *(verdicts[v] for v in ("right", "replicated", "wrong")), *most]
        lines.append(f"| `{op}` | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines) + "\n"


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _verdict(row: dict) -> str:
    return "wrong" if row["wrong"] else "replicated" if row["replicated"] else "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    rows = BUILD / ("captured.jsonl" if arguments.captured else "eager.jsonl")
    options = ["--captured"] if arguments.captured else []
    if arguments.only:
        rows = rows.with_stem(rows.stem + "_some")
        rows.unlink(missing_ok=True)
        options += ["--only", *arguments.only]
    run(rows, options)
    found = _rows(rows)
    if not arguments.only:
        DOCS.write_text(table())
    for row in found:
        if row["wrong"]:
            print(f"WRONG {row['op']}({row['inputs']}) {row['layout']}: {row['wrong'][:300]}")
    replicated = collections.Counter(
        itertools.chain.from_iterable(r["replicated"] for r in found if not r["wrong"])
    )
    print("replicated:", ", ".join(f"{op} {n}" for op, n in replicated.most_common()))
    verdicts = collections.Counter(map(_verdict, found))
    print(dict(verdicts))
    sys.exit(bool(verdicts["wrong"]))


if __name__ == "__main__":
    main()

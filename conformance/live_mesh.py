"""Keras's own tests under a live mesh of two ranks, against the same tests without one.

python conformance/live_mesh.py [--kind data|model|none] [folders or files of keras/src ...]

Each test's outcome goes to `build/conformance/KIND/FOLDER.jsonl`, where a run that was stopped goes
on, and all of them to docs/conformance.md.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import keras
import torch.distributed as dist

HERE = Path(__file__).parent
KERAS = Path(keras.__file__).parent / "src"
BUILD = HERE.parent / "build" / "conformance"
DOCS = HERE.parent / "docs" / "conformance.md"
START_AGAIN = 75
FOLDERS = ["layers", "ops", "losses", "metrics", "optimizers", "models", "trainers", "random"]
FOLDERS += ["activations", "initializers", "regularizers", "constraints", "callbacks", "utils"]
FOLDERS += ["dtype_policies", "quantizers", "saving", "applications"]
PYTEST = ["-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(KERAS), "-p", "no:cacheprovider"]
PYTEST += ["-p", "mesh_plugin", "-W", "ignore", "--no-header", "--tb=short"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def results_of(kind: str, target: str) -> Path:
    return BUILD / kind / (target.replace("/", ".") + ".jsonl")


def run(kind: str, target: str, limit: float) -> None:
    """All tests of a folder or file, starting ranks again as often as they part."""
    results = results_of(kind, target)
    results.parent.mkdir(parents=True, exist_ok=True)
    world = 1 if kind == "none" else 2
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for launch in itertools.count():
        with tempfile.TemporaryDirectory() as shared:
            code = _launch(kind, target, world, results, port, launch, shared, limit)
        running = results.parent / f"{results.name}.running"
        if code == START_AGAIN:
            continue
        if code in (0, 1, 5):
            running.unlink(missing_ok=True)
            del store
            return
        if not running.exists():
            raise SystemExit(f"{target} could not be run: exit status {code}")
        _write(results, running.read_text(), f"ranks ended with {code}")
        running.unlink()


def _write(results: Path, test: str, why: str) -> None:
    with results.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": "failed", "why": why}) + "\n")


def _launch(
    kind: str,
    target: str,
    world: int,
    results: Path,
    port: int,
    launch: int,
    shared: str,
    limit: float,
) -> int:
    environment = {
        **os.environ,
        "KERAS_BACKEND": "torch",
        "PYTHONPATH": str(HERE),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "CONFORMANCE_KIND": kind,
        "CONFORMANCE_RESULTS": str(results),
        "CONFORMANCE_SHARED": shared,
        "CONFORMANCE_PORT": str(port),
        "CONFORMANCE_LAUNCH": str(launch),
    }
    command = [sys.executable, *PYTEST, str(KERAS / target)]
    logs = [results.with_suffix(f".{rank}.log") for rank in range(world)]
    processes = []
    for rank in range(world):
        with logs[rank].open("a") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=HERE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(limit) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-9]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return next((code for code in codes if code not in (0, 1, 5)), codes[0])


def outcomes(kind: str) -> dict[str, dict]:
    rows = {}
    # What ran last counts, of a folder or of one of its files.
    for path in sorted((BUILD / kind).glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["test"]] = row
    return rows


def failures(kind: str) -> list[dict]:
    """Tests that pass without a mesh and don't pass with it."""
    plain = outcomes("none")
    return [
        row
        for test, row in outcomes(kind).items()
        if plain.get(test, {}).get("outcome") == "passed" and row["outcome"] != "passed"
    ]


def summary(kind: str) -> str:
    plain, here = outcomes("none"), outcomes(kind)
    counted = [t for t in here if plain.get(t, {}).get("outcome") == "passed"]
    passed = sum(here[t]["outcome"] == "passed" for t in counted)
    share = 100 * passed / max(len(counted), 1)
    return f"{kind}: {passed} of {len(counted)} tests that pass without a mesh ({share:.2f}%)"


INTRODUCTION = """\
# Keras's own tests under a live mesh

Written by `make conformance`: the tests that Keras's wheel ships, on two ranks. A test counts if it
passes without a mesh, and passes if it does on both ranks. *Data parallel* splits batches over both
ranks; *sharded* has every variable sharded on its last even dim.
"""
# What is between these in docs/conformance.md is written by hand.
BY_HAND, BY_FILE = "\n## Models\n", "\n## By file\n"
# Tests whose failure says nothing about the mesh, and why.
SILENT = "rank 0 writes, prints and sends for all, but rank 1 expects to have done so, too"
STORES = ("basics", "cross_shard_read", "exception_raised")
EXPLAINED = {
    **dict.fromkeys(
        [
            "test_verbose_logging",
            *(
                f"test_RemoteMonitor{n}"
                for n in ("", "WithJsonPayload", "_np_array", "_np_float32")
            ),
            "test_print_msg_non_interactive",
            *(f"test_print_msg_interactive_{n}_line_break" for n in ("with", "without")),
            *(
                f"test_stateful_stateless_output_{n}_state{m}"
                for n in ("all", "one")
                for m in ("ful", "less")
            ),
        ],
        SILENT,
    ),
    **dict.fromkeys(
        [f"test_save_model_exception_raised_{n}_memory_config" for n in ("low", "high")],
        "Keras leaves half a file where it can't save; here the old one stays, or none",
    ),
    **dict.fromkeys(
        [
            f"test_sharded_h5_io_store_{n}"
            for n in ("basics", "cross_shard_read", "exception_raised")
        ],
        "opens Keras's private store of several files, which rank 0 writes, on both ranks",
    ),
    "test_load_weights_rejects_shape_bomb": "both ranks change one file at the same time",
    **dict.fromkeys(
        ["test_best_case_epoch", "test_backup_corrupted"],
        "who saves comes after the other callbacks, one of which ends the training there",
    ),
    "test_best_case_step": "the fit goes on in the middle of the epoch; Keras repeats its batches",
    "test_checkpoint_with_assets1": "closes Orbax's own object, for which only rank 0 waits",
    **dict.fromkeys(
        [
            "test_vocabulary_from_file",
            "test_vocabulary_file",
            "test_save_and_load_assets_with_multiple_oov_indices",
        ],
        "every rank writes the file that the other one reads",
    ),
    "test_spectrogram_channels_broadcasting": "rounding: compares to 1e-6 what differs by 5e-6",
    "test_spectrogram_channels_first": "rounding: compares to 1e-6 what differs by 5e-6",
}


def report() -> str:
    """All outcomes, as Markdown."""
    lines = [INTRODUCTION, *_table("folder", _folder), ""]
    lines += [*(f"{summary(kind)}." for kind in ("data", "model")), "", "What fails:", ""]
    for kind in ("data", "model"):
        for row in failures(kind):
            name = row["test"].split("::")[-1]
            why = EXPLAINED.get(name) or row["why"].splitlines()[0][:160]
            lines.append(f"- {kind}: `{row['test']}`: {why}")
    return "\n".join(lines) + "\n"


def write_docs() -> None:
    """Write all outcomes to the documentation, around what is written by hand."""
    _, heading, text = DOCS.read_text().partition(BY_HAND)
    by_hand = text.partition(BY_FILE)[0].rstrip("\n") + "\n"
    files = "\n".join(_table("file of keras/src", _file))
    DOCS.write_text(report() + heading + by_hand + BY_FILE + "\n" + files + "\n")


def _table(heading: str, group_of: Callable[[str], str]) -> list[str]:
    """How many tests of each group pass."""
    plain = {test for test, row in outcomes("none").items() if row["outcome"] == "passed"}
    lines = [
        f"| {heading} | without a mesh | data parallel | sharded |",
        "| --- | --: | --: | --: |",
    ]
    found = {kind: outcomes(kind) for kind in ("data", "model")}
    groups: dict[str, set[str]] = {}
    for test in plain:
        groups.setdefault(group_of(test), set()).add(test)
    for group, tests in sorted(groups.items()):
        cells = [
            f"{sum(rows[t]['outcome'] == 'passed' for t in tests & set(rows))} of "
            f"{len(tests & set(rows))}"
            for rows in found.values()
        ]
        lines.append(f"| {group} | {len(tests)} | " + " | ".join(cells) + " |")
    return lines


def _folder(test: str) -> str:
    parts = _file(test).split("/")
    return "/".join(parts[: 2 if parts[0] == "layers" else 1])


def _file(test: str) -> str:
    return test.split("::")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--kind", action="append", choices=["none", "data", "model"])
    parser.add_argument("--again", action="store_true", help="forget what they gave before")
    parser.add_argument("--limit", type=float, default=7200, help="seconds for one start of ranks")
    arguments = parser.parse_args()
    unexplained = 0
    for target in arguments.targets or FOLDERS:
        for kind in arguments.kind or ["none", "data", "model"]:
            results = results_of(kind, target)
            if arguments.again:
                results.unlink(missing_ok=True)
            run(kind, target, arguments.limit)
            rows = [json.loads(line) for line in results.read_text().splitlines()]
            print(f"{target}, {kind}: {dict(Counter(row['outcome'] for row in rows))}", flush=True)
            for row in rows if kind != "none" else []:
                if row["outcome"] == "failed" and _counts(row["test"]):
                    name = row["test"].split("::")[-1]
                    unexplained += name not in EXPLAINED
                    print(f"  {row['test']}: {EXPLAINED.get(name, row['why'][:300])}")
    if not arguments.targets:
        write_docs()
        print(summary("data"), summary("model"), sep="\n")
    sys.exit(bool(unexplained))


def _counts(test: str) -> bool:
    """Whether it passes without a mesh, as far as that is known."""
    return outcomes("none").get(test, {}).get("outcome", "passed") == "passed"


if __name__ == "__main__":
    main()

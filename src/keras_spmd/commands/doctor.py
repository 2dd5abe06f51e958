"""Look at this host and test keras-spmd on its devices: what works, how fast, and what to fix.

The self-test starts a process for each GPU (or two on CPUs), trains small models on them, and
compares the results with those of one device. The exit code is 1 if something is broken.

examples:
  keras-spmd doctor
  keras-spmd doctor -n 4
  keras-spmd doctor --no-self-test
  keras-spmd doctor --json > report.json
"""

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_spmd import _launch
from keras_spmd._progress import progress
from keras_spmd.commands import Mistake, _checks, _self_test
from keras_spmd.commands._checks import BROKEN, OK, WARNING, Check

# Which exercises prove which sentence of the contract.
CONTRACT = {
    "single-device semantics": ("data_parallel", "model_parallel", "captured_step"),
    "data is global": ("all_rows",),
    "any op works": ("unknown_ops",),
    "nothing silent": ("told",),
    "inert without a distribution": ("inert",),
}
MARKS = {OK: "[green]ok[/]", WARNING: "[yellow]warning[/]", BROKEN: "[red]broken[/]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, metavar="N", help="processes of the self-test")
    parser.add_argument("--no-self-test", action="store_true", help="start no processes")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(arguments: argparse.Namespace) -> int:
    report = examine(arguments.n, self_test=not arguments.no_self_test)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0 if report["ok"] else 1


def examine(n: int | None, *, self_test: bool) -> dict[str, Any]:
    """Everything that is found out, as plain data."""
    if n is not None and n < 2:
        raise Mistake(f"-n must be at least 2: the self-test compares with one process, got {n}.")
    found: dict[str, list[Check]] = {"versions": _checks.versions()}
    topology, bandwidth = None, list[dict[str, Any]]()
    if all(check.status == OK for check in found["versions"]):
        found["devices"] = _checks.devices()
        topology = _checks.links()
    found["environment"] = _checks.environment()
    if self_test and not any(c.status == BROKEN for c in found["versions"]):
        with _clean_environment():
            found["contract"], bandwidth = _test(n)
        found["links"] = _compare_with_link(bandwidth, _checks.link_gb_per_s(topology))
    everything = [check for checks in found.values() for check in checks]
    return {
        "ok": not any(check.status == BROKEN for check in everything),
        **{name: _checks.as_dict(checks) for name, checks in found.items()},
        "topology": topology,
        "bandwidth": bandwidth,
    }


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """What is wrong with the variables is reported; the self-test is about the rest."""
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith("KERAS_SPMD_")]:
        del os.environ[name]
    # Compiling is tested by scripts themselves; here the graphs matter, and seconds count.
    os.environ.update(KERAS_BACKEND="torch", KERAS_SPMD_COMPILER="none")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _test(n: int | None) -> tuple[list[Check], list[dict[str, Any]]]:
    from keras_spmd.commands._torchrun import gpu_count

    gpus = gpu_count()
    count = n or gpus or 2
    if gpus and count > gpus:
        raise Mistake(
            f"-n {count} needs as many GPUs, and this host has {gpus}. Set KERAS_TORCH_DEVICE=cpu "
            "to test on CPUs."
        )
    try:
        with progress("Training on one device"):
            (expected,) = _launch.launch(_self_test.exercise, 1, 1)
        if count == 1:
            return [*_verdicts([expected], expected)], []
        with progress(f"Training on {count} devices"):
            found = _launch.launch(_self_test.exercise, count, count)
        with progress("Measuring collectives"):
            bandwidth = _launch.launch(_self_test.measure, count, count)[0]
    except RuntimeError as error:  # a rank could not even start, or died
        return [Check("self-test", BROKEN, str(error), "the traceback says which part")], []
    return list(_verdicts(found, expected)), bandwidth


def _verdicts(found: list[dict[str, Any]], expected: dict[str, Any]) -> Iterator[Check]:
    for sentence, exercises in CONTRACT.items():
        problems = [
            f"{name} on rank {rank}: {problem}"
            for name in exercises
            for rank, results in enumerate(found)
            if (problem := _difference(results[name], expected[name])) is not None
        ]
        if problems:
            fix = "keras-spmd doesn't do here what it should; please report it with this output"
            yield Check(sentence, BROKEN, problems[0], fix)
        else:
            yield Check(sentence, OK, f"{', '.join(exercises)} on {len(found)} ranks")


def _difference(found: Any, expected: Any) -> str | None:
    """What is wrong with the results of an exercise, if anything is."""
    for results in (expected, found):
        if not isinstance(results, dict):
            return f"it failed with {results!r}"
    for name, value in expected.items():
        if isinstance(value, bool) and not (value and found[name]):
            return f"'{name}' is not so"
        if isinstance(value, np.ndarray):
            if found[name].shape != value.shape:
                return f"{name} has shape {found[name].shape}, one device has {value.shape}"
            error = float(np.max(np.abs(found[name] - value), initial=0.0))
            if not error <= 1e-3 * max(1.0, float(np.max(np.abs(value), initial=0.0))):
                return f"{name} differs from one device's by {error:.2g}"
    return None


def _compare_with_link(bandwidth: list[dict[str, Any]], link: float | None) -> list[Check]:
    """Large messages should come near to what the link carries."""
    if not bandwidth:
        return []
    best: dict[str, float] = {}
    for row in bandwidth:
        name = row["collective"]
        best[name] = max(best.get(name, 0.0), row["bus_gb_per_s"])
    checks = []
    for name, speed in best.items():
        found = f"{speed:.2f} GB/s"
        if link is None:
            checks.append(Check(name, OK, found))
        elif speed >= link / 2:
            checks.append(Check(name, OK, f"{found} of {link:g}"))
        else:
            fix = (
                "NCCL_DEBUG=INFO shows which way it takes; is NCCL_P2P_DISABLE set, or a GPU busy?"
            )
            checks.append(Check(name, WARNING, f"{found} of {link:g}", fix))
    return checks


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for section in ("versions", "devices", "environment", "contract", "links"):
        if not report.get(section):
            continue
        table = Table("", "", "", title=section, title_justify="left", box=None, show_header=False)
        for check in report[section]:
            text = escape(check["found"]) + (f"\n-> {escape(check['fix'])}" if check["fix"] else "")
            table.add_row(MARKS[check["status"]], escape(check["name"]), text)
        console.print(table)
    if report["bandwidth"]:
        table = Table("collective", "size", "ms", "bus GB/s", title="bandwidth", box=None)
        for row in report["bandwidth"]:
            size = f"{row['bytes'] / 2**20:g} MiB"
            speed = f"{row['bus_gb_per_s']:.2f}"
            table.add_row(row["collective"], size, f"{row['milliseconds']:.2f}", speed)
        console.print(table)
    if report["topology"]:
        console.print(escape(report["topology"]))
    console.print("[green]All is well.[/]" if report["ok"] else "[red]Something is broken.[/]")

"""Calls with their inputs laid out in every way on a mesh of 2 x 2, against one device.

One of the four ranks that `run.py` starts; they write a line for each row, and end early, to be
started again, once they have lost each other.
"""

import argparse
import collections
import itertools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
# What is compared is the graph; compiling each would take days.
os.environ.setdefault("KERAS_SPMD_COMPILER", "none")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from tables import ON_GPU

if ON_GPU:  # Before Keras.
    import shared_gpu

import keras
import torch
import torch.distributed as dist
from calls import (
    Cost,
    Expected,
    Subject,
    captured,
    eager,
    laid_out_by,
    noting_fallbacks,
    own_numbers,
)
from cases import CASES, Case, first_of_each
from layer_cases import LAYER_CASES
from layouts import ShardEverything, describe, placed, variants

import keras_spmd  # noqa: F401
from keras_spmd.distribution_lib import _to_backend_mesh

# A collective that another rank never joins ends after this time.
PATIENCE = timedelta(seconds=60)
START_AGAIN = 75
RUNS = {"eager": eager, "captured": captured}
OTHER_DTYPES = ("bfloat16", "int32")


def cases_of(kind: str) -> list[Case]:
    """All cases, and the first of each name with other dtypes."""
    cases = {"ops": CASES, "layers": LAYER_CASES}[kind]
    floats = [c for c in first_of_each(cases) if any(text[0] not in "ilbc" for text in c.inputs)]
    return [*cases, *(case.of(dtype) for dtype in OTHER_DTYPES for case in floats)]


def reference(case: Case) -> tuple[Subject, Expected] | None:
    """What one device makes of it, without gradients if it has none; None if it refuses."""
    for has_gradient in (True, False) if case.has_gradient else (False,):
        try:
            subject = Subject(case._replace(has_gradient=has_gradient))
            expected = Expected(alone(subject))
        except Exception:
            # Keras itself has functions that GPUs refuse, such as `histogram`.
            if case.dtype == "float32" and not has_gradient:
                if not ON_GPU:
                    raise
                print(f"A GPU refuses {case.name} of {case.inputs}.", flush=True)
            continue
        if case.dtype == "bfloat16":
            exact = Subject(subject.case.of("rounded"))
            expected = expected._replace(exact=alone(exact))
        return subject, expected
    return None


def alone(subject: Subject) -> list[torch.Tensor]:
    subject.reset()
    with own_numbers():
        # Variables change in place when they are reset.
        return [r.clone() for r in subject.results(subject.case.tensors())]


def can_be_captured(subject: Subject) -> bool:
    """Whether one device could: shapes that depend on values, for instance, run eagerly."""
    subject.reset()
    try:
        captured(subject, subject.case.tensors(), Cost())
    except Exception:
        return False
    return True


def audit(case: Case, device_mesh: Any, mode: str, skip: int = 0) -> Iterator[dict]:
    """A row for each layout of its inputs, and for weights that are replicated and sharded."""
    with laid_out_by(None):
        found = reference(case)
        if found is None:
            return
        plain, expected = found
        is_captured = mode == "captured" and can_be_captured(plain)
    options = {"layout_map": keras.distribution.LayoutMap(device_mesh), "batch_dim_name": "batch"}
    distributions = {"R": keras.distribution.ModelParallel(**options)}
    if plain.layer is not None and any(v.shape for v in plain.layer.trainable_variables):
        distributions["S"] = ShardEverything(**options)
    is_brief = case.dtype != "float32"
    rows = [
        (weights, variant)
        for weights in distributions
        for variant in variants(plain.case.tensors(), is_brief)
    ]
    if plain.layer is None:
        rows = rows[1:]  # Without anything sharded there is nothing to see.
    if is_brief and "S" in distributions:
        rows = [row for row in rows if row[0] == "S"]
    subjects: dict[str, Subject] = {}
    for weights, variant in rows[skip:]:
        with laid_out_by(distributions[weights]):
            if weights not in subjects:
                subjects[weights] = Subject(plain.case, distributions[weights], plain)
            row = compare(subjects[weights], expected, variant, device_mesh, is_captured)
        yield {
            "name": case.name,
            "inputs": " ".join(case.inputs),
            "dtype": case.dtype,
            "weights": weights if plain.layer is not None and plain.layer.variables else "",
            "layout": describe(variant),
            "captured": is_captured,
            **row,
        }


def compare(
    subject: Subject, expected: Expected, variant: list, device_mesh: Any, is_captured: bool
) -> dict:
    mesh, cost = _to_backend_mesh(device_mesh), Cost()
    with noting_fallbacks() as noted:
        try:
            subject.reset()
            inputs = [
                x if layout is None else placed(x, mesh, layout)
                for x, layout in zip(subject.case.tensors(), variant, strict=True)
            ]
            got = (captured if is_captured else eager)(subject, inputs, cost)
            wrong = expected.differs(got)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            wrong = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    replicated = sorted(set(noted))
    return {
        "wrong": wrong,
        "replicated": replicated,
        "collectives": cost.count,
        "bytes": cost.bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("kind", choices=["ops", "layers"])
    parser.add_argument("mode", choices=["eager", "captured"])
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Groups for the axes of a mesh take torch's default, which is half an hour.
    dist.distributed_c10d.default_pg_timeout = PATIENCE
    if ON_GPU:
        shared_gpu.join(timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    device_mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"))
    store = dist.distributed_c10d._get_default_store()
    done = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    finished = collections.Counter(row["case"] for row in done)
    numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    for case in cases_of(arguments.kind):
        key = f"{case.name} {case.dtype} {next(numbers[case.name])}"
        if arguments.only and case.name not in arguments.only:
            continue
        for row in audit(case, device_mesh, arguments.mode, finished[key]):
            place = f"{key}/{row['weights']}/{row['layout']}"
            verdicts = meet(store, place, row["wrong"])
            row |= {"case": key, "wrong": next((v for v in verdicts if v), None)}
            if dist.get_rank() == 0:
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if any(v and ("gloo" in v or "did not come" in v) for v in verdicts):
                os._exit(START_AGAIN)


def meet(store: Any, key: str, mine: str | None) -> list[str | None]:
    """What each rank found."""
    store.set(f"{key}/{dist.get_rank()}", mine or "")
    found: list[str | None] = []
    for rank in range(dist.get_world_size()):
        try:
            store.wait([f"{key}/{rank}"], PATIENCE * 3)
            found.append(store.get(f"{key}/{rank}").decode() or None)
        except dist.DistStoreError:
            found.append(f"rank {rank} did not come")
    return found


if __name__ == "__main__":
    main()

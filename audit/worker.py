"""Every function of `keras.ops` with its inputs laid out in every way, against one device.

For each placement of each input, on a mesh of 2 x 2: the value, and the gradients of its inputs.
One of the four ranks that `run.py` starts; they write a line for each row, and end early, to be
started again, once they have lost each other.
"""

import argparse
import collections
import contextlib
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
sys.path.insert(0, str(Path(__file__).parent))

import keras
import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Case
from keras.src import tree
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import keras_spmd  # noqa: F401
from keras_spmd.graph._scope import CaptureScope
from keras_spmd.rules import decisions, fallback

PATIENCE = timedelta(seconds=20)
START_AGAIN = 75
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
COLLECTIVES += ("broadcast", "all_reduce_coalesced", "all_gather_into_tensor_coalesced")


class Cost(TorchDispatchMode):
    """Counts collectives and the bytes that this rank puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._opname in COLLECTIVES:
            self.count += 1
            self.bytes += sum(
                x.numel() * x.element_size() for x in tree.flatten(args) if torch.is_tensor(x)
            )
        return func(*args, **(kwargs or {}))


def layouts(x: torch.Tensor) -> Iterator[tuple[Placement, Placement]]:
    whole = Replicate()
    for dim in range(x.ndim):
        yield Shard(dim), whole
    for dim in range(x.ndim):
        yield Shard(dim), Shard(dim)
    if x.ndim > 1:
        yield Shard(0), Shard(1)
        yield Shard(x.ndim - 1), Shard(0)
    if x.is_floating_point():
        yield Partial(), whole
        if x.ndim:
            yield Shard(0), Partial()


def placed(x: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
    """With these placements; what is Partial has a part of the value on each rank."""
    replicated = [Replicate() if p.is_partial() else p for p in placements]
    result = DTensor.from_local(x, mesh, [Replicate()] * 2).redistribute(mesh, replicated)
    local = result.to_local()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            local = local * (0.25 if mesh.get_local_rank(axis) == 0 else 0.75)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def variants(tensors: list[torch.Tensor]) -> Iterator[list[tuple | None]]:
    """Which placement each input has: one at a time, and all alike."""
    for i, x in enumerate(tensors):
        for layout in layouts(x):
            yield [layout if i == k else None for k in range(len(tensors))]
    if len(tensors) > 1:
        for dim in (0, -1):
            yield [(Shard(dim % x.ndim), Replicate()) if x.ndim else None for x in tensors]


def leaves(result: Any) -> list[torch.Tensor]:
    return [x for x in tree.flatten(result) if torch.is_tensor(x)]


def weights_like(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, x.numel()).reshape(x.shape)


def evaluate(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, and the gradients of a weighted sum of them."""
    wanted = [x for x in inputs if case.has_gradient and x.is_floating_point()]
    for x in wanted:
        x.requires_grad_()
    results = leaves(case.call(*inputs))
    floats = [r for r in results if r.requires_grad]
    if floats:
        total = sum((r.float() * weights_like(r)).sum() for r in floats)
        grads = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
        results += [g for g in grads if g is not None]
    return [r.detach() for r in results]


def full(x: torch.Tensor) -> np.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).resolve_conj().numpy()


def differs(got: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    # All of them before any is compared: every rank has to take part in gathering.
    pairs = [(full(g), full(e)) for g, e in zip(got, expected, strict=True)]
    for i, (a, b) in enumerate(pairs):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i}: {a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
        if not np.allclose(a, b, 1e-4, 1e-5, equal_nan=True):
            return f"result {i}: {a.ravel()[:4]} instead of {b.ravel()[:4]}"
    return None


@contextlib.contextmanager
def noting_fallbacks() -> Iterator[list[str]]:
    """The ops that were run replicated although an input was sharded."""
    noted: list[str] = []
    original = fallback.run_replicated

    def noting(op: Any, args: tuple, kwargs: dict, *rest: Any) -> Any:
        sharded = [
            x
            for x in tree.flatten((args, kwargs))
            if isinstance(x, DTensor) and not all(p.is_replicate() for p in x.placements)
        ]
        if sharded:
            noted.append(str(op))
        return original(op, args, kwargs, *rest)

    users = [m for m in (fallback, decisions) if hasattr(m, "run_replicated")]
    for module in users:
        module.run_replicated = noting  # type: ignore[attr-defined]
    try:
        yield noted
    finally:
        for module in users:
            module.run_replicated = original  # type: ignore[attr-defined]


def eager(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return evaluate(case, inputs)


def captured(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """As a graph of local tensors, as a captured step is."""
    specs: list[Any] = []

    def step(locals_: list[torch.Tensor]) -> list[torch.Tensor]:
        wrapped = [
            DTensor.from_local(
                local,
                x.device_mesh,
                x.placements,
                run_check=False,
                shape=x.shape,
                stride=x.stride(),
            )
            if isinstance(x, DTensor)
            else local
            for local, x in zip(locals_, inputs, strict=True)
        ]
        results = evaluate(case, [w.detach() for w in wrapped])
        specs[:] = [getattr(r, "_spec", None) for r in results]
        return [getattr(r, "_local_tensor", r) for r in results]

    locals_ = [getattr(x, "_local_tensor", x).detach() for x in inputs]
    with CaptureScope():
        graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(locals_)
    values = [node.meta.get("val") for node in graph.graph.nodes]
    if any(isinstance(n, torch.SymInt) for v in values for n in getattr(v, "shape", ())):
        raise RuntimeError("its shapes depend on values")
    return [
        r if s is None else DTensor(r, s, requires_grad=False)
        for r, s in zip(graph(locals_), specs, strict=True)
    ]


def can_be_captured(case: Case, arrays: list[np.ndarray]) -> bool:
    """Whether one device could: shapes that depend on values, for instance, run eagerly."""
    try:
        captured(case, [torch.tensor(a) for a in arrays])
    except Exception:
        return False
    return True


def describe(variant: list[tuple | None]) -> str:
    def one(layout: tuple | None) -> str:
        if layout is None:
            return "R"
        return "".join(
            f"S{p.dim}" if isinstance(p, Shard) else "P" if p.is_partial() else "R" for p in layout
        )

    return " ".join(one(layout) for layout in variant)


def audit(case: Case, mesh: Any, run: Any, skip: int) -> Iterator[dict]:
    arrays = case.arrays()
    try:
        expected = evaluate(case, [torch.tensor(a) for a in arrays])
    except (RuntimeError, NotImplementedError):  # torch has no derivative of it
        case = case._replace(has_gradient=False)
        expected = evaluate(case, [torch.tensor(a) for a in arrays])
    is_captured = run is captured and can_be_captured(case, arrays)
    if not is_captured:
        run = eager
    every = variants([torch.tensor(a) for a in arrays])
    for variant in itertools.islice(every, skip, None):
        tensors = [torch.tensor(a) for a in arrays]
        inputs: list[torch.Tensor] = [
            x if layout is None else placed(x, mesh, layout)
            for x, layout in zip(tensors, variant, strict=True)
        ]
        cost = Cost()
        with noting_fallbacks() as noted:
            try:
                with cost:
                    got = run(case, inputs)
                wrong = differs(got, expected)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                wrong = (
                    f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
                )
        yield {
            "op": case.name,
            "inputs": " ".join(case.inputs),
            "layout": describe(variant),
            "wrong": wrong,
            "captured": is_captured,
            "replicated": sorted(set(noted)),
            "collectives": cost.count,
            "bytes": cost.bytes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    device_mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"))
    distribution = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(device_mesh), batch_dim_name="batch"
    )
    keras.distribution.set_distribution(distribution)
    from keras_spmd.distribution_lib import _to_backend_mesh

    mesh = _to_backend_mesh(device_mesh)
    store = dist.distributed_c10d._get_default_store()
    done = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    finished = collections.Counter((row["op"], row["inputs"], row["case"]) for row in done)
    for number, case in enumerate(CASES):
        if arguments.only and case.name not in arguments.only:
            continue
        skip = finished[case.name, " ".join(case.inputs), number]
        for row in audit(case, mesh, captured if arguments.captured else eager, skip):
            row["case"] = number
            verdicts = meet(store, f"{number}/{row['layout']}", row["wrong"])
            row["wrong"] = next((v for v in verdicts if v), None)
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

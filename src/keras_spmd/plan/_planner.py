"""From a function that makes a model to a plan."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src import tree

from keras_spmd._progress import progress
from keras_spmd.graph._capture import local_of
from keras_spmd.plan._advice import advice
from keras_spmd.plan._arguments import Leaf
from keras_spmd.plan._dry_run import DryRun, dry_run
from keras_spmd.plan._figures import Device, device_of
from keras_spmd.plan._measure import Measured, measured
from keras_spmd.plan._report import Memory, Plan, Variable


def make_plan(
    model_fn: Callable,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    layouts: Any,
    batch: Any,
    *,
    device: Device | str,
    batch_axis: str | None,
    whole: bool,
) -> Plan:
    figures, start = device_of(device), time.perf_counter()
    with (
        progress("Planning a step"),
        dry_run(
            model_fn,
            mesh_shape,
            axis_names,
            layouts,
            batch,
            batch_axis=batch_axis,
            for_gpu=figures.is_gpu,
        ) as (run, messages),
    ):
        result = measured(run, figures, whole=whole)
        variables = [_variable(v, run.mesh) for v in run.model.variables]
        memory = _memory(run, result)
        leaves = [leaf for leaf in tree.flatten(run.leaves) if isinstance(leaf, Leaf)]
        name, axis = run.model.name, run.distribution.batch_dim_name
    mesh = dict(zip(axis_names, mesh_shape, strict=True))
    limit = figures.memory - figures.reserved
    timing = result.timing
    shapes = [leaf.shape for leaf in leaves]
    return Plan(
        model=name,
        device=figures,
        mesh=mesh,
        batch=[f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves],
        variables=variables,
        memory=memory,
        transfers=result.transfers,
        flops=timing.flops,
        seconds=timing.seconds,
        compute_seconds=timing.compute,
        network_seconds=timing.network,
        exposed_seconds=timing.exposed,
        mfu=timing.full_speed / timing.seconds if timing.seconds else 0.0,
        warnings=[
            *messages,
            *advice(memory, limit, variables, result.transfers, mesh, shapes, axis),
        ],
        repeats={group.layers[0].path: group.count for group in result.groups},
        spans=timing.spans,
        planning_seconds=time.perf_counter() - start,
    )


def _variable(v: Any, mesh: Any) -> Variable:
    local = local_of(v._value)
    axes = tuple(getattr(v._layout, "axes", None) or ())
    return Variable(
        path=v.path,
        shape=tuple(v.shape),
        dtype=keras.backend.standardize_dtype(v.dtype),
        axes=(*axes, *[None] * (len(v.shape) - len(axes))),
        local_shape=tuple(local.shape),
        itemsize=local.element_size(),
        is_trained=bool(v.trainable),
    )


def _memory(run: DryRun, result: Measured) -> Memory:
    """Variables and batch are always there; gradients and activations as at the worst moment."""
    place, (activations, gradients) = max(
        result.memory.items(), key=lambda item: sum(item[1]), default=(("", ""), (0.0, 0.0))
    )
    model = run.model
    parameters = _local_bytes(model.variables)
    known = {id(v) for v in model.variables}
    state = [*model.optimizer.variables, *model.metrics_variables]
    batch = sum(x.nbytes for x in run.batch.locals())
    phase, layer = place
    return Memory(
        parameters=parameters,
        gradients=int(gradients),
        optimizer_state=_local_bytes([v for v in state if id(v) not in known]),
        activations=int(activations) + batch,
        where=f"{phase} of {layer}" if layer else phase,
    )


def _local_bytes(variables: Sequence[Any]) -> int:
    return sum(local_of(v._value).nbytes for v in variables if v._value is not None)

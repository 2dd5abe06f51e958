"""Every optimizer of Keras, on variables of any layout: the weights of one device."""

import inspect

import keras
import numpy as np
import pytest
import torch
from keras import distribution, optimizers
from keras.optimizers import schedules
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import keras_spmd
from bench import on_ranks
from keras_spmd._gradients import lay_out_gradients
from keras_spmd.distribution_lib import num_processes
from meshes import grid, line, model_parallel

# Shapes are all different, so that optimizer state can be told by them. Not every rank gets
# as much of a dim of 7 or 11.
VARIABLES = {
    "whole_kernel": ((3, 2), (None, None)),
    "rows_kernel": ((8, 6), ("model", None)),
    "columns_kernel": ((6, 8), (None, "model")),
    "both_kernel": ((8, 4), ("batch", "model")),
    "uneven_rows_kernel": ((7, 5), ("model", None)),
    "uneven_columns_kernel": ((5, 7), (None, "model")),
    "cube_kernel": ((2, 4, 9), (None, "model", "batch")),
    "bias": ((11,), ("model",)),
    "scale": ((), ()),
}
STEPS = 4


def initial(name, seed):
    shape, _ = VARIABLES[name]
    return np.random.default_rng([seed, *name.encode()]).normal(size=shape).astype("float32")


def distributions():
    """On a line an axis has all ranks; on a grid there are two axes."""
    for mesh in (line(), grid()) if num_processes() == 4 else (line(),):
        layouts = {
            # Also the state that an optimizer names after a variable.
            f"(.*/)?{name}": tuple(a if a in mesh.axis_names else None for a in axes)
            for name, (_, axes) in VARIABLES.items()
        }
        yield f"{mesh.shape}", model_parallel(layouts, mesh)


def make_variables():
    return [keras.Variable(initial(name, 0), name=name) for name in VARIABLES]


def as_pending(array, value, *, everywhere=False):
    """A gradient whose sum over the ranks is pending, on the axes that don't shard its variable
    or on all. Each rank has another share of it."""
    mesh, local = value.device_mesh, torch.tensor(array)
    placements = [
        p if isinstance(p, Shard) and not everywhere else Partial() for p in value.placements
    ]
    sharded = [p if isinstance(p, Shard) else Replicate() for p in placements]
    local = distribute(local, mesh, sharded).to_local()
    for axis, (p, at) in enumerate(zip(placements, mesh.get_coordinate(), strict=True)):
        if isinstance(p, Partial):
            count = mesh.size(axis)
            local = local * (2 * (at + 1) / (count * (count + 1)))
    stride = torch.empty(array.shape).stride()
    return DTensor.from_local(local, mesh, placements, shape=value.shape, stride=stride)


def distribute(tensor, mesh, placements):
    whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)
    return whole.redistribute(placements=placements)


def gradient(variable, step, number):
    """The gradient of a step, as a backward pass may leave it."""
    array = initial(variable.name, 10 + step) * (1 + step)
    value = variable.value
    kind = (number + step) % 4
    if not isinstance(value, DTensor) or kind == 0:
        return torch.tensor(array)
    if kind == 1:
        return distribute(torch.tensor(array), value.device_mesh, value.placements)
    return as_pending(array, value.detach(), everywhere=kind == 2)


def train(make, steps=STEPS, rates=()):
    variables, optimizer = make_variables(), make()
    for step in range(steps):
        if step < len(rates):
            optimizer.learning_rate = rates[step]
        grads = [gradient(v, step, i) for i, v in enumerate(variables)]
        optimizer.apply(grads, variables)
    optimizer.finalize_variable_values(variables)
    return variables, optimizer


def assert_same_as_one_device(make, rtol=1e-5, **options):
    variables, optimizer = train(make, **options)
    expected = {v.name: v.numpy() for v in variables}
    state = [np.asarray(v.numpy(), "float64") for v in optimizer.variables]
    for label, dist in distributions():
        with dist.scope():
            variables, sharded = train(make, **options)
            for v in variables:
                message = f"{label} {v.name}"
                np.testing.assert_allclose(v.numpy(), expected[v.name], rtol, 1e-6, err_msg=message)
            for v, want in zip(sharded.variables, state, strict=True):
                np.testing.assert_allclose(v.numpy(), want, rtol, 1e-6, err_msg=f"{label} {v.path}")


def without_bias(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias", "scale"])
    return optimizer


def several(**options):
    inner = {
        ".*kernel": optimizers.Adam(0.01, **options),
        "bias": optimizers.SGD(0.1, momentum=0.9, **options),
    }
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.RMSprop(0.01), inner))


OPTIMIZERS = {
    "Adadelta": [lambda: optimizers.Adadelta(1.0)],
    "Adafactor": [lambda: optimizers.Adafactor(0.01)],
    "Adagrad": [lambda: optimizers.Adagrad(0.1)],
    "Adam": [lambda: optimizers.Adam(0.01), lambda: optimizers.Adam(0.01, amsgrad=True)],
    "AdamW": [lambda: without_bias(optimizers.AdamW(0.01, weight_decay=0.1))],
    "Adamax": [lambda: optimizers.Adamax(0.01)],
    "Ftrl": [
        lambda: optimizers.Ftrl(
            0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.02, beta=0.1
        )
    ],
    "Lamb": [lambda: optimizers.Lamb(0.01, weight_decay=0.1)],
    "Lion": [lambda: optimizers.Lion(0.01)],
    "LossScaleOptimizer": [
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 2.0, dynamic_growth_steps=2),
        lambda: optimizers.LossScaleOptimizer(
            optimizers.Lamb(0.01, gradient_accumulation_steps=2), 2.0
        ),
    ],
    "MultiOptimizer": [several, lambda: several(gradient_accumulation_steps=2)],
    "Muon": [lambda: optimizers.Muon(0.01, exclude_layers=["rows"])],
    "Nadam": [lambda: optimizers.Nadam(0.01)],
    "RMSprop": [
        lambda: optimizers.RMSprop(0.01),
        lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    ],
    "SGD": [
        lambda: optimizers.SGD(0.1),
        lambda: optimizers.SGD(0.1, momentum=0.9),
        lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    ],
    "ScheduleFreeAdamW": [lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2)],
}


def test_every_optimizer_is_here():
    exported = {
        name
        for name, value in vars(optimizers).items()
        if inspect.isclass(value) and issubclass(value, optimizers.Optimizer)
    }
    assert exported - {"Optimizer"} <= OPTIMIZERS.keys()


@on_ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizers(name):
    for make in OPTIMIZERS[name]:
        assert_same_as_one_device(make)


OPTIONS = {
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.2},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "weight decay": {"weight_decay": 0.1},
    "average": {"use_ema": True, "ema_momentum": 0.8},
    "overwriting average": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
    "loss scale factor": {"loss_scale_factor": 8.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation of three": {"gradient_accumulation_steps": 3, "loss_scale_factor": 4.0},
    "accumulation, clipped": {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5},
}


@on_ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_options(option):
    """With an optimizer that updates all variables at once, and one that goes one by one."""
    for kind in (optimizers.Adam, optimizers.Lamb):
        assert_same_as_one_device(lambda kind=kind: without_bias(kind(0.01, **OPTIONS[option])))


SCHEDULES = {
    "CosineDecay": lambda: schedules.CosineDecay(0.1, 5, 0.1, warmup_target=0.3, warmup_steps=2),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 2, 1.5, 0.8),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.1, 2, 0.5),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.01]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.1, 3, 0.01, power=2.0, cycle=True),
}


def test_every_schedule_is_here():
    exported = {name for name, value in vars(schedules).items() if inspect.isclass(value)}
    assert exported - {"LearningRateSchedule"} <= SCHEDULES.keys()


@on_ranks(1, 2, 4)
def test_schedules():
    for make in SCHEDULES.values():
        assert_same_as_one_device(lambda make=make: optimizers.SGD(make(), momentum=0.9))


@on_ranks(1, 2, 4)
def test_learning_rates_set_between_steps():
    assert_same_as_one_device(lambda: optimizers.Adam(0.1), rates=(0.1, 0.05, 0.2))
    with distribution.DataParallel().scope():
        optimizer = optimizers.Adam(0.1)
        optimizer.learning_rate = 0.25
        assert float(optimizer.learning_rate) == 0.25
        assert optimizer.learning_rate.numpy() == np.float32(0.25)


def local_bytes(variables):
    return sum(keras_spmd.get_dtensor_local(v.value).nbytes for v in variables)


@on_ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_rank_holds_its_share_of_the_state(name):
    """State in the shape of a variable is sharded like it. The rest is whole: counters, and the
    row and column means of Adafactor, which are small."""
    for make in OPTIMIZERS[name]:
        whole_shapes = [tuple(v.shape) for v in train(make, steps=1)[1].variables]
        for _, dist in distributions():
            with dist.scope():
                variables, optimizer = train(make, steps=1)
            share = {tuple(v.shape): local_bytes([v]) for v in variables if v.ndim}
            expected = 0
            for v, shape in zip(optimizer.variables, whole_shapes, strict=True):
                size = torch.empty((), dtype=v.value.dtype).element_size()
                expected += share.get(shape, int(np.prod(shape)) * size)
            assert local_bytes(optimizer.variables) == expected


@on_ranks(2, 4)
def test_accumulated_gradients_are_reduced_once_on_the_step_that_updates():
    for kind in (optimizers.SGD, optimizers.Lamb):
        with distribution.DataParallel().scope():
            variables = make_variables()
            optimizer = kind(0.1, gradient_accumulation_steps=3)
            optimizer.build(variables)
            counts = []
            for step in range(6):
                arrays = [initial(v.name, step) for v in variables]
                values = [v.value.detach() for v in variables]
                grads = [as_pending(a, v) for a, v in zip(arrays, values, strict=True)]
                with CommDebugMode() as communication:
                    optimizer.apply(grads, variables)
                counts.append(communication.get_total_counts())
        assert counts == [0, 0, 1, 0, 0, 1]


@on_ranks(2, 4)
def test_gradients_on_equal_meshes_are_reduced_together():
    """torch's cached decisions may give a gradient an equal mesh that was made earlier."""
    meshes = [init_device_mesh("cpu", (num_processes(),)) for _ in range(2)]
    values = [DTensor.from_local(torch.zeros(3), mesh, [Replicate()]) for mesh in meshes]
    grads = [DTensor.from_local(torch.ones(3), mesh, [Partial()]) for mesh in meshes]
    with CommDebugMode() as communication:
        reduced = lay_out_gradients(grads, values)
    assert communication.get_total_counts() == 1
    for grad in reduced:
        np.testing.assert_array_equal(grad.full_tensor(), np.full(3, num_processes()))


@on_ranks(1, 2, 4)
def test_state_read_and_set_in_the_middle_of_an_accumulation():
    def run():
        variables = make_variables()
        optimizer = optimizers.Adam(0.01, gradient_accumulation_steps=3)
        saved, store = [], {}
        for step in range(7):
            grads = [gradient(v, step, i) for i, v in enumerate(variables)]
            optimizer.apply(grads, variables)
            if step == 1:
                optimizer.save_own_variables(store)
                saved = [v.numpy() for v in optimizer.variables]
            if step == 4:
                # Back to where two of three gradients had been accumulated.
                optimizer.load_own_variables(store)
        optimizer.set_weights(saved)
        optimizer.apply([gradient(v, 2, i) for i, v in enumerate(variables)], variables)
        return [v.numpy() for v in [*variables, *optimizer.variables]] + saved

    expected = run()
    for label, dist in distributions():
        with dist.scope():
            got = run()
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)


@on_ranks(1, 2, 4)
def test_variables_without_a_gradient():
    """Keras warns of some and refuses all; the others are updated as if they were alone."""

    def run():
        variables, optimizer = make_variables(), optimizers.Adam(0.01)
        for step in range(2):
            grads = [gradient(v, step, i) if i % 2 else None for i, v in enumerate(variables)]
            with pytest.warns(UserWarning, match="Gradients do not exist"):
                optimizer.apply(grads, variables)
        with pytest.raises(ValueError, match="No gradients provided"):
            optimizer.apply([None] * len(variables), variables)
        return [v.numpy() for v in variables]

    expected = run()
    for label, dist in distributions():
        with dist.scope():
            got = run()
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)

"""Meshes and comparisons for test bodies. The reference is the same code without a distribution."""

import keras
import numpy as np
import torch
from keras import distribution

import keras_spmd
from keras_spmd.distribution_lib import num_processes


def whole(x):
    """A tensor, variable or array as a global numpy array."""
    return keras.ops.convert_to_numpy(x)


def assert_same(actual, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(whole(actual), whole(expected), rtol=rtol, atol=atol)


def line():
    """A mesh with one axis over all ranks."""
    return distribution.DeviceMesh((num_processes(),), ("model",))


def grid():
    """A mesh with two axes: (1, 1), (1, 2) or (2, 2)."""
    count = num_processes()
    shape = (2, 2) if count == 4 else (1, count)
    return distribution.DeviceMesh(shape, ("batch", "model"))


def model_parallel(layouts, mesh=None):
    layout_map = distribution.LayoutMap(mesh or grid())
    for key, layout in layouts.items():
        layout_map[key] = layout
    return distribution.ModelParallel(layout_map=layout_map)


def distributions():
    """One of each kind, for any number of ranks."""
    yield "data parallel", distribution.DataParallel()
    yield "last dim", model_parallel({".*kernel": (None, "model")})
    yield "both axes", model_parallel({".*kernel": ("model", "batch")})


def placements(x):
    return keras_spmd.get_dtensor_spec(getattr(x, "value", x))


def fully_sharded(value, dim=0):
    """A plain global tensor as a DTensor that is sharded over the first axis of a line."""
    axes = [None] * value.ndim
    if dim is not None:
        axes[dim] = "model"
    return distribution.distribute_tensor(value, distribution.TensorLayout(axes, line()))


def partial(value):
    """A plain global tensor as a DTensor whose sum over the ranks is pending."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = line().backend_mesh
    share = value / num_processes() if value.is_floating_point() else value
    if not value.is_floating_point() and mesh.get_local_rank() > 0:
        share = torch.zeros_like(value)
    return DTensor.from_local(share, mesh, [Partial()])

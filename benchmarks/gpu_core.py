"""Checks of the core that need a GPU: run by hand on a machine with one, by `python gpu_core.py`.

Two ranks are simulated with torch's fake process group, so no second GPU is needed; what crosses
the mesh is then not real, and is not looked at.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
import torch.distributed as dist

import keras_spmd
from keras_spmd import _initial_values, _promotion


def flag_in_backward_thread() -> bool:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch._C._get_dtensor_allow_implicit_replication())
            return grad

    Look.apply(torch.zeros((), device="cuda", requires_grad=True)).backward()
    return seen[0]


def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name(), keras.__version__)
    assert keras.distribution.list_devices() == ["gpu:0"]
    mesh = keras.distribution.DeviceMesh((1,), ("model",))
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*"] = ("model",)
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        one = keras.Variable(keras.initializers.GlorotUniform(seed=3), shape=(3000, 700), name="v")
    assert one.value.is_cuda
    # What any rank of any mesh draws is a part of what a mesh of one draws.
    draw = keras.initializers.GlorotUniform(seed=3)
    for local_shape, offset in (((1500, 700), (1500, 0)), ((3000, 350), (0, 350))):
        recorded = _initial_values.draw_of(draw, (3000, 700), "float32")
        part = _initial_values._draw_part(recorded, (3000, 700), "float32", local_shape, offset)
        rows = slice(offset[0], offset[0] + local_shape[0])
        columns = slice(offset[1], offset[1] + local_shape[1])
        np.testing.assert_array_equal(part.cpu().numpy(), one.numpy()[rows, columns])
    print("initial values on CUDA do not depend on the mesh")

    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert keras.distribution.list_devices() == ["gpu:0", "gpu:1"]
    assert not flag_in_backward_thread()
    mesh = keras.distribution.DeviceMesh((2,), ("model",))
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        assert flag_in_backward_thread()
        layer = keras.layers.Dense(8)
        layer.build((None, 4))
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        y = layer(x) * torch.arange(8.0, device="cuda")
        y.square().sum().backward()
        assert keras_spmd.is_dtensor(layer.kernel.value)
        assert layer.kernel.value.device.type == "cuda"
        conv = keras.layers.Conv2D(8, 3)
        norm = torch.nn.BatchNorm2d(8).cuda()
        z = conv(torch.ones(2, 6, 6, 4, device="cuda"))
        norm(z.permute(0, 3, 1, 2)).sum().backward()
        heads = keras.layers.MultiHeadAttention(4, 8)
        heads(*[torch.ones(2, 6, 16, device="cuda")] * 2).sum().backward()
    assert not flag_in_backward_thread()
    assert not _promotion.is_promoting()
    print("the backward thread promotes exactly while a distribution is active")
    print("1 passed, 0 failed")


if __name__ == "__main__":
    main()

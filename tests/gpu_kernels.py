"""Kernels that only GPUs have, on ranks that share one: values and gradients of one device.

torchrun --nproc-per-node 2 tests/gpu_kernels.py
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import shared_gpu  # isort: skip
import keras
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keras_spmd.distribution_lib import _to_backend_mesh

BATCH, HEADS, LENGTH, SIZE = 4, 4, 24, 16


def attention(kernel, dtype, kind):
    """Queries, keys, values, and for some kinds a mask or a bias that is trained."""
    inputs = [torch.randn(BATCH, HEADS, LENGTH, SIZE, dtype=dtype) for _ in range(3)]
    if kind == "mask":
        inputs.append(torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.3)
        inputs[-1][..., 0] = True
    if kind == "bias":
        inputs.append(torch.randn(1, HEADS, LENGTH, LENGTH, dtype=dtype))

    def call(q, k, v, mask=None):
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal")

    return call, inputs


def recurrent(kind):
    gates = {"lstm": 4, "gru": 3}[kind]
    weights = [torch.randn(gates * 5, n) * 0.3 for n in (6, 5)] + [torch.randn(gates * 5)] * 2
    states = [torch.randn(1, 8, 5) for _ in range(2 if kind == "lstm" else 1)]

    def call(x, *rest):
        weights, states = list(rest[:4]), list(rest[4:])
        # has biases, layers, dropout, train, bidirectional, batch first
        settings = (True, 1, 0.0, True, False, True)
        hx = states if kind == "lstm" else states[0]
        return getattr(torch._VF, kind)(x, hx, weights, *settings)[:2]

    return call, [torch.randn(8, 7, 6), *weights, *states]


def rms_norm(dtype):
    def call(x, weight):
        return F.rms_norm(x, (12,), weight, 1e-6)

    return call, [torch.randn(4, 6, 12, dtype=dtype), torch.randn(12, dtype=dtype)]


def log_sigmoid():
    return F.logsigmoid, [torch.randn(4, 6, 8)]


def cases():
    efficient, cudnn = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for kind in ("plain", "causal", "mask", "bias"):
        yield f"efficient {kind}", *attention(efficient, torch.float32, kind), 1e-4
        if kind != "bias":  # cuDNN has no gradients for it
            yield f"cudnn {kind}", *attention(cudnn, torch.bfloat16, kind), 3e-2
    yield "flash", *attention(SDPBackend.FLASH_ATTENTION, torch.bfloat16, "causal"), 3e-2
    yield "lstm", *recurrent("lstm"), 2e-3
    yield "gru", *recurrent("gru"), 2e-3
    yield "rms_norm", *rms_norm(torch.float32), 1e-4
    yield "rms_norm bfloat16", *rms_norm(torch.bfloat16), 3e-2
    yield "log_sigmoid", *log_sigmoid(), 1e-5


def results_of(call, inputs):
    """What it returns, and the gradients of a weighted sum of that."""
    wanted = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    outputs = call(*inputs)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    total = sum((o.float() * weights_like(o)).sum() for o in outputs)
    return [*outputs, *torch.autograd.grad(total, wanted)]


def weights_like(x):
    return torch.linspace(0.5, 1.5, x.numel(), device=x.device).reshape(x.shape)


def whole(x):
    return getattr(x, "full_tensor", lambda: x)().detach().float()


def layouts(inputs):
    """Every dim of every input by itself, and the same dim of the first three."""
    for i, x in enumerate(inputs):
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                yield {i: Shard(dim)}
    if len(inputs) >= 3:
        for dim in range(3):
            yield {i: Shard(dim) for i in range(3) if dim < inputs[i].ndim}


def main() -> None:
    shared_gpu.join()
    torch.manual_seed(0)
    mesh = _to_backend_mesh(keras.distribution.DeviceMesh((dist.get_world_size(),), ("batch",)))
    bad = 0
    for name, call, inputs, tolerance in cases():
        inputs = [x.cuda().detach() for x in inputs]
        expected = [whole(x) for x in results_of(call, [x.clone() for x in inputs])]
        for layout in layouts(inputs):
            parts = [
                distribute_tensor(x.clone(), mesh, [layout.get(i, Replicate())]).detach()
                for i, x in enumerate(inputs)
            ]
            with keras.distribution.DataParallel(
                device_mesh=keras.distribution.DeviceMesh((dist.get_world_size(),), ("batch",))
            ).scope():
                try:
                    found = [whole(x) for x in results_of(call, parts)]
                    pairs = zip(found, expected, strict=True)
                    differences = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
                    is_right = all(d < tolerance for d in differences)  # which NaN is not
                    problem = None if is_right else f"differs by {differences}"
                except RuntimeError as error:
                    problem = str(error).splitlines()[0]
            if problem:
                bad += 1
                print(f"rank {dist.get_rank()}: {name} {layout}: {problem}", flush=True)
        if dist.get_rank() == 0:
            print(f"{name}: done", flush=True)
    dist.barrier()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

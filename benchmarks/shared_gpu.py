"""Several ranks that share one GPU, by gloo: rules run on CUDA kernels, and NCCL takes no part.

Import it before Keras, and call `join`.
"""

import os
from collections.abc import Callable
from typing import Any

# keras-spmd wants a GPU for each process of a machine.
os.environ["LOCAL_RANK"] = "0"
os.environ["LOCAL_WORLD_SIZE"] = "1"

import torch
import torch.distributed as dist

_library = torch.library.Library("_c10d_functional", "IMPL")


def join(**options: Any) -> None:
    """What `init_process_group` does, for ranks on one GPU that computes as a CPU does."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        _library.impl(name, _by_the_host(name), "CUDA")
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo", **options)


def _by_the_host(name: str) -> Callable:
    """gloo takes what lies on a GPU for the host's memory in most collectives."""
    op = getattr(torch.ops._c10d_functional, name).default

    def call(x: torch.Tensor, *args: Any) -> torch.Tensor:
        wait = torch.ops._c10d_functional.wait_tensor.default
        return wait(op(x.cpu(), *args)).to(x.device)

    return call

"""Which attention kernel a captured step uses on a GPU.

Keras asks for the flash kernel wherever that is possible. torch prefers cuDNN's on newer GPUs,
where it is faster. It can't be asked about traced tensors, so a small real one stands for them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn.attention import SDPBackend

from keras_spmd._capturing import is_capturing


@functools.cache
def _prefers_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        x = torch.empty(1, 1, 128, 64, device=device, dtype=dtype)
        choice = torch._fused_sdp_choice(x, x, x, is_causal=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def can_use_flash_or(original: Callable) -> Callable:
    @functools.wraps(original)
    def _can_use_flash_attention(
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        is_causal: bool = False,
        raise_error: bool = False,
    ) -> bool:
        if is_capturing() and not raise_error and query.is_cuda:
            q, k, v, m = (getattr(x, "_local_tensor", x) for x in (query, key, value, mask))
            params = SDPAParams(q, k, v, m, 0.0, is_causal, False)
            if _prefers_cudnn(q.device, q.dtype) and can_use_cudnn_attention(params):
                return False
        return original(query, key, value, mask, is_causal, raise_error)

    return _can_use_flash_attention

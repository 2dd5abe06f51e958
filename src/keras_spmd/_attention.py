"""Which attention kernel a captured step uses on a GPU.

Keras asks for the flash kernel wherever that is possible. torch prefers cuDNN's on newer GPUs,
where it is faster.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from keras_spmd._capturing import is_capturing


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
            choice = torch._fused_sdp_choice(q, k, v, m, is_causal=is_causal)
            if choice == SDPBackend.CUDNN_ATTENTION.value:
                return False
        return original(query, key, value, mask, is_causal, raise_error)

    return _can_use_flash_attention

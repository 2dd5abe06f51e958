"""Rules for kernels that only GPUs have. Needs a GPU, which two ranks share."""

import pytest
import torch

from jobs import HERE, torchrun


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_of_gpus_on_shards():
    result = torchrun(HERE / "gpu_kernels.py", 2)
    assert result.returncode == 0, result.stdout + result.stderr

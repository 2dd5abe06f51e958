"""Runs tests that Keras ships, on torch and with keras_spmd imported.

Needs an environment with tensorflow and jax, which these tests import.
"""

import os
import subprocess
import sys
from pathlib import Path

import keras

HERE = Path(__file__).parent
KERAS = Path(keras.__file__).parent / "src"
ENVIRONMENT = {
    **os.environ,
    "KERAS_BACKEND": "torch",
    "PYTHONPATH": str(HERE),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
    # That compiled steps are right is for other tests; these would wait for a minute of compiling.
    "KERAS_SPMD_COMPILER": "none",
}
PYTEST = ["-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(KERAS), "-p", "no:cacheprovider"]
PYTEST += ["-p", "spmd_plugin", "-W", "ignore"]


def run(title: str, command: list[str], **environment: str) -> None:
    print(f"--- {title}", flush=True)
    result = subprocess.run(command, env={**ENVIRONMENT, **environment}, cwd=HERE)
    if result.returncode:
        sys.exit(result.returncode)


def main() -> None:
    untouched = ["backend/common/variables_test.py", "layers/core/dense_test.py"]
    untouched += ["trainers/trainer_test.py"]
    run(
        "Keras's tests of Variable, Dense and the trainer, without a distribution",
        [sys.executable, *PYTEST, "-n", "2", *(str(KERAS / name) for name in untouched)],
    )
    distribution_tests = str(KERAS / "distribution/distribution_lib_test.py")
    one_job, four_devices = "not DataShardingIntegrationTest", "DataShardingIntegrationTest"
    run(
        "Keras's tests of keras.distribution, skips lifted",
        [sys.executable, *PYTEST, "-k", one_job, distribution_tests],
        KERAS_SPMD_LIFT_SKIPS="1",
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    run(
        "the one of them that needs four devices, on four ranks",
        [*torchrun, *PYTEST, "-k", four_devices, distribution_tests],
        KERAS_SPMD_LIFT_SKIPS="1",
    )
    for backend in ("jax", "tensorflow"):
        run(
            f"keras_spmd does nothing on {backend}",
            [sys.executable, str(HERE / "other_backend.py")],
            KERAS_BACKEND=backend,
        )


if __name__ == "__main__":
    main()

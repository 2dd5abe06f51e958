import os

import bench

os.environ.setdefault("KERAS_BACKEND", "torch")


def pytest_sessionfinish() -> None:
    bench.stop_all()

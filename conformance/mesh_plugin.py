"""A pytest plugin that runs Keras's tests on several ranks under a live distribution.

Every rank runs the same tests with the same random numbers and temporary folders, and tells the
others how each ended. What a test itself writes or removes is done by rank 0, and the others wait.
Once ranks differ they can't go on together: they all exit, and whoever started them starts them
again for the tests that are left.
"""

import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KIND = os.environ["CONFORMANCE_KIND"]
RESULTS = Path(os.environ["CONFORMANCE_RESULTS"])
SHARED = Path(os.environ["CONFORMANCE_SHARED"])
PRIVATE = "_of_rank_"
START_AGAIN = 75
# A collective that another rank never joins ends after this time.
PATIENCE = timedelta(seconds=10)

if WORLD > 1:
    dist.init_process_group("gloo", timeout=PATIENCE)
    ranks = dist.TCPStore(
        "127.0.0.1", int(os.environ["CONFORMANCE_PORT"]), is_master=False, timeout=PATIENCE
    )

import keras  # noqa: E402
from keras.src.backend.common import global_state  # noqa: E402

import keras_spmd  # noqa: E402


class ShardEverything(keras.distribution.ModelParallel):
    """Shards every variable on its last even dim."""

    def get_variable_layout(self, variable: Any) -> keras.distribution.TensorLayout:
        even = [dim for dim, size in enumerate(variable.shape) if size and size % 2 == 0]
        axes = ["model" if even and dim == even[-1] else None for dim in range(len(variable.shape))]
        return keras.distribution.TensorLayout(axes, self.device_mesh)


def make_distribution() -> Any:
    if KIND == "none":
        return None
    if KIND == "data":
        return keras.distribution.DataParallel(auto_shard_dataset=True)
    mesh = keras.distribution.DeviceMesh((1, WORLD), ("batch", "model"))
    return ShardEverything(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch")


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    assert keras_spmd.activate()
    for mark in ("requires_trainable_backend", "multi_device", "requires_tpu"):
        config.addinivalue_line("markers", mark)
    config.distribution = make_distribution()  # type: ignore[attr-defined]
    keras.distribution.set_distribution(config.distribution)  # type: ignore[attr-defined]
    _set_again_after_clear_session(config)
    _share_temporary_folders()
    seed()


def _set_again_after_clear_session(config: Any) -> None:
    original = global_state.clear_session

    def clear_session(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        keras.distribution.set_distribution(config.distribution)

    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, clear_session)


def _share_temporary_folders() -> None:
    from keras.src import testing

    numbers = itertools.count()

    def get_temp_dir(self: Any) -> str:
        folder = SHARED / str(next(numbers))
        if _writes_its_data(self):
            folder = folder.with_name(f"{folder.name}{PRIVATE}{RANK}")
        folder.mkdir(exist_ok=True)
        return str(folder)

    class TemporaryDirectory(tempfile.TemporaryDirectory):
        """One that all ranks have, until the last test has ended."""

        def __init__(self) -> None:
            self.name = get_temp_dir(None)

        def cleanup(self) -> None:
            pass

    testing.TestCase.get_temp_dir = get_temp_dir
    tempfile.TemporaryDirectory = _in_tests(TemporaryDirectory, tempfile.TemporaryDirectory)
    os.remove = _in_tests(_remove_for_all, os.remove)


def _writes_its_data(test: Any) -> bool:
    """Whether files that a test writes are its data, and no model saves there."""
    module, name = type(test).__module__, getattr(test, "_testMethodName", "")
    is_of_data = ".utils." in module and "torch_utils" not in module
    return is_of_data or name.startswith(
        ("test_rejects_", "test_load_weights_rejects_h5", "test_allows_incompressible")
    )


def _in_tests(theirs: Callable, otherwise: Callable) -> Callable:
    """What Keras's tests call, but neither Keras nor anybody else."""

    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        return (theirs if caller.endswith("_test.py") else otherwise)(*args, **kwargs)

    return call


_shared_actions = itertools.count()


@contextlib.contextmanager
def _one_for_all() -> Iterator[bool]:
    """Whether this rank does it; all ranks come before it and leave after it."""
    number = next(_shared_actions)
    _meet(f"before action {number}", "")
    yield RANK == 0
    _meet(f"after action {number}", "")


def _remove_for_all(path: Any) -> None:
    with _one_for_all() as is_mine:
        if is_mine:
            os.unlink(path)


@contextlib.contextmanager
def _open_for_all(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Iterator[Any]:
    """`open` of a test."""
    is_shared = str(path).startswith(str(SHARED)) and PRIVATE not in str(path)
    if "w" not in mode or not is_shared:
        with open(path, mode, *args, **kwargs) as file:
            yield file
        return
    with (
        _one_for_all() as is_mine,
        open(path if is_mine else os.devnull, mode, *args, **kwargs) as file,
    ):
        yield file


_current = 0


def _done() -> set[str]:
    if not RESULTS.exists():
        return set()
    return {json.loads(line)["test"] for line in RESULTS.read_text().splitlines()}


def pytest_collection_modifyitems(config: Any, items: list[pytest.Item]) -> None:
    done = _done()
    items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        item.module.open = _open_for_all  # type: ignore[attr-defined]
        if "orbax" in item.module.__name__:  # type: ignore[attr-defined]
            # Part of the names of its folders, which have to be the same on all ranks.
            item.module.id = lambda _: 0  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _current
    _current += 1
    _meet("start", "")
    if RANK == 0:
        (RESULTS.parent / f"{RESULTS.name}.running").write_text(item.nodeid)
    keras.distribution.set_distribution(item.config.distribution)  # type: ignore[attr-defined]
    seed()
    item.ended = ("passed", "")  # type: ignore[attr-defined]
    result = yield
    outcomes = _meet("end", json.dumps(item.ended))  # type: ignore[attr-defined]
    answers = [json.loads(text) if text else ("failed", "did not end") for text in outcomes]
    kinds = {kind for kind, _ in answers}
    outcome = kinds.pop() if len(kinds) == 1 else "failed"
    reasons = [text for kind, text in answers if kind == "failed"]
    if RANK == 0:
        line = {"test": item.nodeid, "outcome": outcome, "why": reasons[0] if reasons else ""}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
    if kinds or any("gloo" in text or "did not end" in text for text in reasons):
        _meet("exit", "")
        os._exit(START_AGAIN)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.outcome != "passed" and item.ended[0] != "failed":  # type: ignore[attr-defined]
        crash = getattr(report.longrepr, "reprcrash", None)
        why = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        item.ended = (report.outcome, why[:2000])  # type: ignore[attr-defined]
    return report


def _meet(what: str, mine: str) -> list[str]:
    """What all ranks say; empty for those that don't come."""
    if WORLD == 1:
        return [mine]
    prefix = f"{os.environ['CONFORMANCE_LAUNCH']}/{_current}/{what}"
    ranks.set(f"{prefix}/{RANK}", mine)
    answers = []
    for rank in range(WORLD):
        try:
            ranks.wait([f"{prefix}/{rank}"], PATIENCE * 3)
            answers.append(ranks.get(f"{prefix}/{rank}").decode())
        except dist.DistStoreError:
            answers.append("")
    return answers

"""A pytest plugin for running the tests that Keras ships with keras_spmd imported.

With KERAS_SPMD_LIFT_SKIPS=1 the marks that restrict a test to the JAX backend are taken off.
"""

import os

import pytest

import keras_spmd

# The marks of Keras's own configuration, which its wheel doesn't carry.
MARKS = ("requires_trainable_backend", "multi_device", "requires_tpu")


def pytest_configure(config: pytest.Config) -> None:
    assert keras_spmd.activate()
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("KERAS_SPMD_LIFT_SKIPS") == "1":
        for item in items:
            for node in item.listchain():
                node.own_markers = [m for m in node.own_markers if m.name != "skipif"]

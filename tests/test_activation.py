"""Switching on and off: in any order of imports, from one table, and back to exactly what was."""

import importlib.util
import logging
import os
import subprocess
import sys
import textwrap

import keras
import pytest
import torch
from torch.distributed.tensor import DTensor

import keras_spmd
from keras_spmd import _activate, _backends, _versions


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        env={**os.environ, "KERAS_BACKEND": "torch", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


WORKS = """
mesh = keras.distribution.DeviceMesh((1,), ("batch",))
keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
assert keras.distribution.list_devices() == ["cpu:0"]
layer = keras.layers.Dense(2)
layer.build((None, 3))
assert layer.kernel._layout.axes == (None, None)
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import keras_spmd\nimport keras",
        "import keras\nimport keras_spmd",
        "import keras_spmd\nimport keras\nimport keras_spmd\nkeras_spmd.activate()",
        "import keras\nfrom keras.distribution import *\nimport keras_spmd",
        "import torch\nimport keras_spmd\nimport keras",
    ],
)
def test_any_order_of_imports(imports):
    result = run(imports + WORKS)
    assert result.returncode == 0, result.stderr


def test_names_imported_before_activation_work():
    result = run(
        """
        import keras
        from keras.distribution import DeviceMesh, DataParallel, set_distribution, distribution
        import keras_spmd
        set_distribution(DataParallel(device_mesh=DeviceMesh((1,), ("batch",))))
        assert distribution() is not None
        assert keras.Variable([1.0])._layout is not None
        """
    )
    assert result.returncode == 0, result.stderr


def test_a_warning_names_the_line_of_a_script_without_functions():
    result = run(
        """
        import warnings
        import keras
        import keras_spmd
        layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((1,), ("batch",)))
        layouts["typo"] = ()
        with keras.distribution.ModelParallel(layout_map=layouts).scope():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                keras.optimizers.SGD().build([])
        assert [w.filename for w in caught] == ["<string>"]
        """
    )
    assert result.returncode == 0, result.stderr


def test_the_module_that_scripts_import():
    from keras.src.backend.torch import distribution_lib
    from keras.src.backend.torch.distribution_lib import list_devices

    assert keras.src.backend.distribution_lib is distribution_lib
    assert sys.modules["keras.src.backend.torch.distribution_lib"] is distribution_lib
    assert distribution_lib.list_devices is list_devices
    functions = "list_devices get_device_count initialize num_processes process_id "
    functions += "distribute_tensor distribute_variable distribute_data_input "
    functions += "_to_backend_mesh _to_backend_layout _to_backend_device"
    for name in functions.split():
        assert callable(getattr(distribution_lib, name))


def _snapshot():
    """Everything that the table may touch, and everything that holds what it touches."""
    owners = [keras.Variable, keras.layers.Layer, DTensor, torch.distributed.tensor._dispatch]
    owners += [type(DTensor._op_dispatcher), keras.optimizers.Optimizer]
    for patch in _activate.patches():
        module = sys.modules[patch.module]
        owners.append(module)
        *path, _ = patch.name.split(".")
        for part in path:
            module = getattr(module, part)
        owners.append(module)
    owners += [m for n, m in sys.modules.items() if n.split(".")[0] == "keras"]
    found = {}
    for owner in owners:
        for name, value in vars(owner).items():
            if not name.startswith("__"):
                found[id(owner), name] = value
        for name in ("__call__", "__init__", "__array__", "__getitem__"):
            found[id(owner), name] = vars(owner).get(name)
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = [v for v in vars(propagator).values() if isinstance(v, dict)]
    tables.append(DTensor._op_dispatcher._custom_op_handlers)
    for table in tables:
        found |= {(id(table), key): value for key, value in table.items()}
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]:
        found["log", name] = list(logging.getLogger(name).filters)
    return found


def test_deactivate_restores_exactly_what_was_there():
    keras_spmd.deactivate()
    try:
        before = _snapshot()
        assert keras.src.backend.distribution_lib is None
        assert keras_spmd.activate()
        active = _snapshot()
        assert len([key for key in before if active.get(key) is not before[key]]) > 20
        keras_spmd.deactivate()
        after = _snapshot()
        assert before.keys() == after.keys()
        changed = [key for key in before if before[key] is not after[key]]
        # Bound methods and the like are made anew at each look.
        assert not [key for key in changed if before[key] != after[key]]
        assert "keras.src.backend.torch.distribution_lib" not in sys.modules
        keras_spmd.deactivate()
    finally:
        assert keras_spmd.activate()


def test_every_row_of_the_table_says_why():
    for patch in _activate.patches():
        assert len(patch.why) > 5


def test_versions():
    _versions.check_versions("3.15.1", "2.13.0+cpu")
    _versions.check_versions("3.14.0", "2.11.0")
    _versions.check_versions("3.15.1", "2.15.1")
    with pytest.raises(ImportError) as e:
        _versions.check_versions("3.16.0", "2.10.1")
    for part in ("keras 3.16.0", "torch 2.10.1", "at least 3.14, below 3.16", "below 2.16"):
        assert part in str(e.value)
    with pytest.raises(ImportError, match=r"keras 4\.0\.0\.dev1 "):
        _versions.check_versions("4.0.0.dev1", "2.13.0")
    result = run("import keras\nkeras.__version__ = '3.99.0'\nimport keras_spmd")
    assert result.returncode != 0
    assert "keras 3.99.0 (supported: at least 3.14, below 3.16)" in result.stderr


def test_without_a_distribution_nothing_changes():
    keras.utils.set_random_seed(1)
    with_us = keras.layers.Dense(3)(torch.ones(2, 4)).detach()
    keras_spmd.deactivate()
    try:
        keras.utils.set_random_seed(1)
        without = keras.layers.Dense(3)(torch.ones(2, 4)).detach()
    finally:
        keras_spmd.activate()
    assert torch.equal(with_us, without)
    v = keras.Variable([1.0, 2.0])
    assert v._layout is None
    assert type(v.value) is torch.nn.Parameter
    assert not torch._C._get_dtensor_allow_implicit_replication()
    assert not torch.distributed.is_initialized()


CHOOSE = """
import os, runpy, sys
runpy.run_path(sys.argv[1])["choose_torch_if_there_is_nothing_else"]()
print(os.environ.get("KERAS_BACKEND"))
"""
USE = "import keras_spmd, keras; print(keras.backend.backend())"


@pytest.mark.parametrize(
    ("configured", "given", "code", "backend"),
    [
        (None, {}, USE, "torch"),
        ('{"backend": "tensorflow"}', {}, USE, "torch"),
        ("not JSON", {}, CHOOSE, "torch"),
        ('{"backend": "numpy"}', {}, CHOOSE, "None"),
        (None, {"KERAS_BACKEND": "numpy"}, CHOOSE, "numpy"),
    ],
)
def test_torch_is_taken_where_keras_own_choice_is_not_installed(
    configured, given, code, backend, tmp_path
):
    """TensorFlow is Keras's own, and is no part of this environment."""
    if importlib.util.find_spec("tensorflow"):
        pytest.skip("TensorFlow is installed")
    if configured is not None:
        (tmp_path / "keras.json").write_text(configured)
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    result = subprocess.run(
        [sys.executable, "-c", code, _backends.__file__],
        env={**env, "KERAS_HOME": str(tmp_path), **given},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.strip() == backend, result.stderr

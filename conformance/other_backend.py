"""On a backend other than torch, importing keras_spmd changes nothing."""

import sys

import keras
import numpy as np

distribution_module = dict(vars(keras.src.distribution.distribution_lib))
backend_module = dict(vars(keras.src.backend))

import keras_spmd  # noqa: E402

assert not keras_spmd.activate()
assert dict(vars(keras.src.distribution.distribution_lib)) == distribution_module
assert dict(vars(keras.src.backend)) == backend_module
assert "torch" not in sys.modules
keras_spmd.deactivate()

if keras.config.backend() == "jax":
    mesh = keras.distribution.DeviceMesh((1,), ("batch",))
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
assert keras.ops.convert_to_numpy(model(np.ones((2, 4)))).shape == (2, 2)
assert not keras_spmd.is_dtensor(model.weights[0].value)
print(f"1 passed, 0 failed on {keras.config.backend()}")

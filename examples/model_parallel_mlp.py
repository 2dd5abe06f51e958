"""Model parallelism: the weights of a multi-layer perceptron are divided among all devices.

    python examples/model_parallel_mlp.py
    torchrun --nproc-per-node 2 examples/model_parallel_mlp.py

The first kernel of each block is divided by columns and the second by rows, so that what lies
between them never has to travel: one sum over the devices ends the block. The optimizer's state is
divided like the weights.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import keras_spmd


def make_data(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in eight dims, and a smooth function of them."""
    points = np.random.default_rng(seed).normal(size=(count, 8)).astype("float32")
    values = np.sin(points[:, :4]).sum(axis=1) * np.cos(points[:, 4:]).prod(axis=1)
    return points, values[:, None].astype("float32")


def make_layouts() -> keras.distribution.LayoutMap:
    """Which dim of which variable is divided; keys are regular expressions for whole paths."""
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["block_./up/kernel"] = (None, "model")
    layouts["block_./up/bias"] = ("model",)
    layouts["block_./down/kernel"] = ("model", None)
    return layouts


def make_model() -> keras.Model:
    inputs = x = keras.Input((8,))
    for i in range(2):
        block = [
            keras.layers.Dense(64, activation="gelu", name="up"),
            keras.layers.Dense(8, name="down"),
        ]
        x = x + keras.Sequential(block, name=f"block_{i}")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="value")(x), name="mlp")


def shards(variables: list[keras.Variable]) -> str:
    """A table of what this device holds of each variable."""
    lines = [f"{'variable':45}{'shape':>10}  held here"]
    for v in variables:
        held = tuple(keras_spmd.get_dtensor_local(v.value).shape)
        lines.append(f"{v.path:45}{v.shape!s:>10}  {'all' if held == v.shape else held}")
    return "\n".join(lines)


def main() -> None:
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=make_layouts(), batch_dim_name="batch")
    )

    # No device ever holds more of a variable than its shard, not even while the model is made.
    model = make_model()
    model.compile(optimizer=keras.optimizers.AdamW(0.01), loss="mse")
    model.fit(*make_data(1024, seed=1), batch_size=128, epochs=5, verbose=2)
    loss = model.evaluate(*make_data(256, seed=2), batch_size=128, verbose=0)
    assert loss < 0.5

    if keras_spmd.distribution_lib.process_id() == 0:
        print(shards(model.weights + model.optimizer.variables[2:6]))
        print(f"final loss: {loss:.7f}")


if __name__ == "__main__":
    main()

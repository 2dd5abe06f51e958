"""Several ranks that share one GPU, by gloo: the numbers of one device, eager and compiled.

torchrun --nproc-per-node 2 benchmarks/gpu_ranks.py [name of a model] ...

It says nothing about speed, and NCCL takes no part. It runs the rules on CUDA kernels.
"""

import os
import sys
import warnings

os.environ.setdefault("KERAS_BACKEND", "torch")

import shared_gpu  # isort: skip
import keras
import numpy as np
import torch.distributed as dist
from gpt import MINI, keras_model
from keras import layers

import keras_spmd

ROWS = 8


def gpt(**options):
    return keras_model(MINI, **options)


def compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model


def cnn(**options):
    stack = [
        keras.Input((32, 32, 3)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.BatchNormalization(),
        layers.DepthwiseConv2D(3),
        layers.MaxPooling2D(),
        layers.Conv2DTranspose(8, 3, strides=2),
        layers.GroupNormalization(4),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10),
    ]
    return compiled(keras.Sequential(stack), **options)


def rnn(**options):
    stack = [
        keras.Input((MINI["length"],), dtype="int32"),
        layers.Embedding(MINI["words"], 32, mask_zero=True),
        layers.Bidirectional(layers.LSTM(16, return_sequences=True)),
        layers.GRU(16),
        layers.Dense(10),
    ]
    return compiled(keras.Sequential(stack), **options)


MODELS = {"gpt": gpt, "cnn": cnn, "rnn": rnn}


def data(name):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, MINI["words"], (ROWS, MINI["length"])).astype("int32")
    classes = rng.integers(0, 10, ROWS)
    if name == "gpt":
        return tokens, np.roll(tokens, -1, 1)
    if name == "cnn":
        return rng.normal(size=(ROWS, 32, 32, 3)).astype("float32"), classes
    tokens[:, MINI["length"] // 2 :] *= rng.integers(0, 2, (ROWS, 1)).astype("int32")
    return tokens, classes


def distributions(make):
    count = dist.get_world_size()
    rows = keras.distribution.DeviceMesh((count,), ("batch",))
    yield "data parallel", keras.distribution.DataParallel(device_mesh=rows)
    keras.utils.clear_session()
    yield "FSDP", keras.distribution.ModelParallel(layout_map=keras_spmd.layouts.fsdp(make(), rows))
    mesh = keras.distribution.DeviceMesh((1, count), ("batch", "model"))
    keras.utils.clear_session()
    layout_map = keras_spmd.layouts.tensor_parallel(make(), mesh)
    yield "tensor parallel", keras.distribution.ModelParallel(layout_map=layout_map)


def train(make, batch, distribution=None, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    keras.distribution.set_distribution(distribution)
    model = make(**options)
    losses = [float(model.train_on_batch(*batch)) for _ in range(4)]
    scores = model.predict(batch[0], batch_size=ROWS, verbose=0)
    weights = [keras.ops.convert_to_numpy(w) for w in model.trainable_weights]
    keras.distribution.set_distribution(None)
    return [np.asarray(losses), scores, *weights]


def main() -> None:
    shared_gpu.join()
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    for name in sys.argv[1:] or MODELS:
        make, batch = MODELS[name], data(name)
        expected = train(make, batch)
        for jit in (False, True):
            for label, distribution in distributions(make):
                found = train(make, batch, distribution, jit_compile=jit)
                pairs = list(zip(found, expected, strict=True))
                worst = max(float(np.abs(a - b).max() / max(1, np.abs(b).max())) for a, b in pairs)
                if dist.get_rank() == 0:
                    how = "compiled" if jit else "eager"
                    print(f"{name}, {label}, {how}: largest difference {worst:.1e}", flush=True)
                assert worst < 1e-4


if __name__ == "__main__":
    main()

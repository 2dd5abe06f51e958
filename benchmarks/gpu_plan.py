"""Plans against what really happens on one GPU: peak memory, and the time of a step.

python benchmarks/gpu_plan.py [name of a model] ...
"""

import gc
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))

import keras
import torch
from gpt import SMALL, keras_model

import keras_spmd
from llama import llama

LLAMA = {"blocks": 12, "width": 1024, "heads": 16, "groups": 4, "inner": 2816, "words": 32000}


def gpt():
    return keras_model(SMALL, jit_compile=True)


def llama_like():
    return llama(LLAMA, 1024, "mixed_bfloat16")


def resnet():
    model = keras.applications.ResNet50(weights=None, classes=1000, classifier_activation=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=True)
    return model


TOKENS = [((8, 1024), "int32"), ((8, 1024), "int32")]
IMAGES = [((64, 224, 224, 3), "float32"), ((64,), "int32")]
MODELS = {
    "GPT-2 small": (gpt, TOKENS, 50304),
    "Llama-like": (llama_like, TOKENS, 32000),
    "ResNet50": (resnet, IMAGES, 1000),
}


def random_batch(specs, classes):
    return tuple(
        torch.randint(0, classes, shape, device="cuda", dtype=torch.int32)
        if "int" in dtype
        else torch.rand(shape, device="cuda")
        for shape, dtype in specs
    )


def real(make, specs, classes):
    """The peak of a step that isn't a CUDA graph yet, and the seconds of one that may be."""
    torch.cuda.empty_cache()
    model, batch = make(), random_batch(specs, classes)
    model._symbolic_build(data_batch=batch)
    function = model.make_train_function()
    model.train()
    function([batch])
    torch.cuda.reset_peak_memory_stats()
    function([batch])
    peak = torch.cuda.max_memory_allocated()
    for _ in range(8):
        function([batch])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        function([batch])
    torch.cuda.synchronize()
    return peak, (time.perf_counter() - start) / 20


def main() -> None:
    print(f"torch {torch.__version__}, keras {keras.__version__}, {torch.cuda.get_device_name()}")
    torch.set_float32_matmul_precision("high")
    for name in sys.argv[1:] or MODELS:
        keras.config.set_dtype_policy("mixed_bfloat16")
        make, specs, classes = MODELS[name]
        plan = keras_spmd.plan(make, (1,), ("batch",), None, specs, device="H200")
        peak, seconds = real(make, specs, classes)
        print(
            f"{name}: peak {peak / 2**30:.2f} GiB, planned {plan.memory.peak / 2**30:.2f} "
            f"({plan.memory.peak / peak:.2f}x); a step {seconds * 1e3:.1f} ms, planned "
            f"{plan.seconds * 1e3:.1f} ({plan.seconds / seconds:.2f}x)",
            flush=True,
        )
        print(f"  {plan.memory}")
        keras.utils.clear_session()
        gc.collect()


if __name__ == "__main__":
    main()

"""Plan a training step on a mesh of any size, on this machine and without its devices.

MODULE:FUNCTION makes the compiled model. The batch is the global one: the shapes of x and y, each
with its dtype if it isn't float32.

examples:
  keras-spmd plan my_package.models:make --mesh batch=8 --batch 512x784,512:int32
  keras-spmd plan models:llama --mesh batch=64,model=8 --layouts hybrid \\
      --batch 512x4096:int32,512x4096:int32 --device H200 --html plan.html
"""

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

from keras_spmd.commands import Mistake
from keras_spmd.commands.convert import function_of

RECIPES = ("fsdp", "zero1", "tensor_parallel", "sequence_parallel", "hybrid")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="makes the compiled model")
    parser.add_argument("--mesh", required=True, help="axes and sizes, e.g. batch=64,model=8")
    parser.add_argument("--batch", required=True, help="shapes of x and y, e.g. 512x784,512:int32")
    parser.add_argument(
        "--layouts",
        help=f"a recipe ({', '.join(RECIPES)}), or MODULE:FUNCTION of a model and a mesh; "
        "data parallel by default",
    )
    parser.add_argument("--device", default="H100", help="A100, H100, H200, B200 or CPU")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page that shows the plan")


def run(arguments: argparse.Namespace) -> int:
    import keras_spmd

    shape, names = mesh_of(arguments.mesh)
    try:
        plan = keras_spmd.plan(
            function_of(arguments.model),
            shape,
            names,
            layouts_of(arguments.layouts, names),
            batch_of(arguments.batch),
            device=arguments.device,
        )
    except (ValueError, TypeError) as error:
        raise Mistake(str(error)) from error
    if arguments.html:
        plan.to_html(arguments.html)
    if arguments.json:
        print(plan.to_json())
    else:
        plan.show()
    return 0


def mesh_of(text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """`batch=64,model=8` as a shape and names."""
    axes = [re.fullmatch(r"\s*(\w+)=(\d+)\s*", part) for part in text.split(",")]
    if not all(axes):
        raise Mistake(f"--mesh must be axes and their sizes, as batch=64,model=8, got {text!r}.")
    found = [axis for axis in axes if axis is not None]
    return tuple(int(axis[2]) for axis in found), tuple(axis[1] for axis in found)


def batch_of(text: str) -> tuple[Any, ...]:
    """`512x784,512:int32` as shapes with their dtypes."""
    arrays = [re.fullmatch(r"\s*(\d+(?:x\d+)*)(?::(\w+))?\s*", part) for part in text.split(",")]
    if not all(arrays):
        raise Mistake(f"--batch must be shapes, as 512x784,512:int32, got {text!r}.")
    return tuple(
        (tuple(int(n) for n in array[1].split("x")), array[2] or "float32")
        for array in arrays
        if array is not None
    )


def layouts_of(text: str | None, names: tuple[str, ...]) -> Callable | None:
    """A function of a model and a mesh; None for data parallel."""
    if text is None:
        return None
    if text not in RECIPES:
        if ":" not in text:
            raise Mistake(f"--layouts must be one of {RECIPES} or MODULE:FUNCTION, got {text!r}.")
        return function_of(text)
    from keras_spmd import layouts

    recipe = getattr(layouts, text)
    if text in ("fsdp", "zero1"):
        return functools.partial(recipe, axis=names[0])
    if len(names) == 1:
        raise Mistake(
            f"--layouts {text} needs two axes: batches are divided over the first, {names[0]!r}, "
            "and layers over another. Use e.g. --mesh batch=1,model=8."
        )
    model_axis = "model" if "model" in names[1:] else names[-1]
    if text == "hybrid":
        return functools.partial(recipe, data_axis=names[0], model_axis=model_axis)
    return functools.partial(recipe, axis=model_axis)

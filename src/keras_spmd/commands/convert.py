"""Turn a sharded checkpoint, a .keras or a .weights.h5 file into another of these.

One process does it, without the devices that the model was trained on.

examples:
  keras-spmd convert checkpoints model.keras                 the newest checkpoint of a run
  keras-spmd convert checkpoints/step-00000040 m.weights.h5
  keras-spmd convert model.keras checkpoints --step 0
  keras-spmd convert m.weights.h5 checkpoints --model my_package.models:make
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable

from keras_spmd.commands import Mistake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint, a folder of them, or a file")
    parser.add_argument("target", help="a .keras or .weights.h5 file, or a folder for checkpoints")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="makes the model, where the source doesn't say how",
    )
    parser.add_argument("--step", type=int, help="which checkpoint of a folder; its number")


def run(arguments: argparse.Namespace) -> int:
    from keras_spmd.checkpoints._converting import convert

    make = None if arguments.model is None else function_of(arguments.model)
    try:
        written = convert(arguments.source, arguments.target, make_model=make, step=arguments.step)
    except (ValueError, OSError) as error:
        raise Mistake(str(error)) from error
    print(written)
    return 0


def function_of(text: str) -> Callable:
    """The function that `module:function` names, also of a module of this folder."""
    module, colon, name = text.partition(":")
    if not colon or not name:
        raise Mistake(f"--model must be MODULE:FUNCTION, got {text!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Mistake(f"{text!r} can't be imported: {error}") from error

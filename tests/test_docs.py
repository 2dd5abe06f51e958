"""The examples of all public names run, alone and on two ranks."""

import contextlib
import doctest
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from torch.distributed.tensor import Replicate, Shard

import keras_spmd
from bench import on_ranks
from files import shared_folder
from keras_spmd.distribution_lib import process_id

PUBLIC = sorted(
    name
    for name, value in vars(keras_spmd).items()
    if not name.startswith("_") and callable(value) and value.__module__.startswith("keras_spmd")
)


README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_public_names_are_in_the_readme():
    assert [name for name in PUBLIC if name not in README] == []


@on_ranks(4)
def test_the_first_script_of_the_readme():
    """With half of its devices."""
    (script,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    script = "".join(line[1:] + "\n" for line in script.splitlines())
    assert "(2, 4)" in script

    def make_model():
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((8,)), dense(16, name="dense_in"), dense(2)])

    x, y = np.ones((1024, 8)), np.zeros((1024, 2))
    names = {"make_model": make_model, "x": x, "y": y}
    exec(script.replace("(2, 4)", "(2, 2)"), names)
    kernel = names["model"].layers[0].kernel
    assert kernel.value.placements == (Replicate(), Shard(1))
    assert names["model"].predict(x, verbose=0).shape == (1024, 2)


@pytest.mark.parametrize("name", PUBLIC)
@on_ranks(1, 2, timeout=180)
def test_examples(name):
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    text = getattr(keras_spmd, name).__doc__
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples, f"{name} has no example"
    if process_id() != 0:
        for example in test.examples:
            if "prints" in example.source:
                example.want = ""  # rank 0 does
    failures = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    with shared_folder() as folder, contextlib.chdir(folder):
        runner.run(test, out=failures.append)
    assert not failures, "".join(failures)

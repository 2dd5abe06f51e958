"""The examples of all public names run, alone and on two ranks."""

import contextlib
import doctest
import os

import pytest

import keras_spmd
from bench import on_ranks
from files import shared_folder
from keras_spmd.distribution_lib import process_id

PUBLIC = sorted(
    name
    for name, value in vars(keras_spmd).items()
    if not name.startswith("_") and callable(value) and value.__module__.startswith("keras_spmd")
)


def test_the_public_names_are_in_the_readme():
    with open(os.path.join(os.path.dirname(__file__), "..", "README.md")) as file:
        readme = file.read()
    assert [name for name in PUBLIC if name not in readme] == []


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

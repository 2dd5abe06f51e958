"""Runs the bodies of other tests with `jit_compile=True` under every distribution."""

import contextlib
import os

import keras

from keras_spmd import _layouts
from keras_spmd.graph import _step


@contextlib.contextmanager
def captured(compiler="none", count=None):
    """Every model that is compiled under a distribution gets a graph; without one it stays eager.

    The graph runs as it is, which takes no time to compile. A step that can't be captured is an
    error here. `count` collects the steps that were captured.
    """
    compile_, say_why = keras.Model.compile, _step.Step._say_why
    prepare = _step.Step._prepare

    def with_jit(self, *args, **kwargs):
        if _layouts.active_distribution() is not None:
            kwargs["jit_compile"] = True
        compile_(self, *args, **kwargs)

    def refuse(self, error, is_final):
        raise AssertionError(f"the {self.kind} step was not captured: {error!r}") from error

    def noted(self, *args):
        done = prepare(self, *args)
        if done and count is not None:
            count.append(self.kind)
        return done

    before = os.environ.get("KERAS_SPMD_COMPILER")
    os.environ["KERAS_SPMD_COMPILER"] = compiler
    keras.Model.compile, _step.Step._say_why = with_jit, refuse
    _step.Step._prepare = noted
    try:
        yield
    finally:
        keras.Model.compile, _step.Step._say_why = compile_, say_why
        _step.Step._prepare = prepare
        if before is None:
            del os.environ["KERAS_SPMD_COMPILER"]
        else:
            os.environ["KERAS_SPMD_COMPILER"] = before

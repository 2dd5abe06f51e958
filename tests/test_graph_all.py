"""The equality suite of eager training with `jit_compile=True`, all of it: `make test-all`.

A sample runs with every `make test`, here and in `test_graph.py`.
"""

import pytest

import test_callbacks
import test_data
import test_metrics
import test_optimizers
import test_step
from bench import on_ranks
from jit import captured


def some(names, sample):
    """All names; those that are not in the sample run with `make test-all` only."""
    return [
        name if name in sample else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in sorted(names)
    ]


@on_ranks(1, 2, 4, timeout=300)
@pytest.mark.parametrize("name", some(test_optimizers.OPTIMIZERS, ["Muon"]))
def test_optimizers_(name):
    with captured():
        test_optimizers.test_optimizers.body(name)


@on_ranks(1, 2, 4, timeout=300)
@pytest.mark.parametrize("option", some(test_optimizers.OPTIONS, ["accumulation, clipped"]))
def test_options(option):
    with captured():
        test_optimizers.test_options.body(option)


@pytest.mark.exhaustive
@on_ranks(1, 2, 4, timeout=300)
def test_schedules():
    with captured():
        test_optimizers.test_schedules.body()


@on_ranks(1, 2, 4, timeout=300)
def test_learning_rates_set_between_steps():
    with captured():
        test_optimizers.test_learning_rates_set_between_steps.body()


@on_ranks(1, 2, 4, timeout=300)
@pytest.mark.parametrize("task", some(test_metrics.TASKS, []))
def test_metrics_of_fit_and_evaluate(task):
    with captured():
        test_metrics.test_metrics_of_fit_and_evaluate.body(task)


@on_ranks(1, 2, 4, timeout=300)
@pytest.mark.parametrize("name", some(test_data.DATA, []))
def test_data_of_any_kind(name):
    with captured():
        test_data.test_data.body(name)


@on_ranks(1, 4, timeout=300)
@pytest.mark.parametrize("name", some(test_step.MODELS, []))
def test_whatever_may_be_in_a_step(name):
    with captured():
        test_step.test_steps.body(name)


@on_ranks(1, 4, timeout=300)
@pytest.mark.parametrize("name", some(test_callbacks.CALLBACKS, []))
def test_callbacks_that_change_things(name):
    with captured():
        test_callbacks.test_callbacks.body(name)

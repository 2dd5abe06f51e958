"""Steps as people write them, captured: what they make and clear by themselves is not lost."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import training
from bench import on_ranks
from jit import captured
from meshes import whole

ROWS = training.arrays()


class Steps(keras.Model):
    """Two layers, a loss that is thrown away, and one that counts."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = layers.Dense(4), layers.Dense(5), how
        self.own = keras.optimizers.Adam(0.05)
        self.momentum = keras.optimizers.SGD(0.05, momentum=0.9)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        if self.how in ("layers", "zeros"):
            ops.mean(self(x) ** 2).backward()
            if self.how == "layers":
                self.first.zero_grad()
                self.second.zero_grad()
            else:
                self.zero_grad(set_to_none=False)
        loss = ops.mean((self(x) - y) ** 2)
        loss.backward()
        if self.how == "clip":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        # Optimizers of its own are built here, in the first step.
        parts = ((self.first, self.own), (self.second, self.momentum))
        with torch.no_grad():
            for part, optimizer in parts:
                weights = part.trainable_weights
                optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


def fit(how):
    keras.utils.set_random_seed(5)
    model = Steps(how)
    x, y = ROWS
    model(x[:1])
    model.compile()
    history = model.fit(x, y, batch_size=11, epochs=3, shuffle=False, verbose=0)
    state = [*model.variables, *model.own.variables, *model.momentum.variables]
    return history.history["loss"], [whole(v) for v in state]


@pytest.mark.parametrize("how", ["own optimizers", "layers", "zeros", "clip"])
@on_ranks(1, 2)
def test_what_a_step_makes_and_clears(how):
    losses, state = fit(how)
    assert len({value.tobytes() for value in state if value.ndim == 2}) == 5, "moments are kept"
    for kind in ("data", "rows"):
        with training.of_ranks(kind).scope(), captured():
            got, values = fit(how)
        np.testing.assert_allclose(got, losses, 1e-5)
        for a, b in zip(values, state, strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-6)


class Positives(keras.metrics.Metric):
    """Returns its variable, not a tensor."""

    def __init__(self):
        super().__init__(name="positives")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(ops.sum(ops.cast(y_pred > 0, "float32")))

    def result(self):
        return self.count


class Wrapping(keras.Model):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = layers.TorchModuleWrapper(kind(2, 3, batch_first=True))
        self.head = layers.Dense(5)

    def call(self, x):
        return self.head(self.recurrent(ops.reshape(x, (-1, 3, 2)))[0][:, -1])


def fit_wrapping(kind, **options):
    keras.utils.set_random_seed(5)
    model = Wrapping(kind)
    x, y = ROWS
    model(x[:1])
    model.compile("adam", "mse", metrics=[Positives()], **options)
    return model.fit(x, y, batch_size=11, epochs=2, shuffle=False, verbose=0).history


@on_ranks(1, 2)
def test_a_metric_that_returns_its_variable_and_a_gru_of_torch():
    expected = fit_wrapping(torch.nn.GRU)
    with training.of_ranks("data").scope(), captured():
        got = fit_wrapping(torch.nn.GRU)
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, 1e-5, err_msg=name)


def test_an_lstm_of_torch_runs_eagerly_on_a_cpu():
    expected = fit_wrapping(torch.nn.LSTM)
    with pytest.warns(UserWarning, match="it trains torch.nn.LSTM on a CPU"):
        assert fit_wrapping(torch.nn.LSTM, jit_compile=True) == expected


class OfTorch(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        self.theirs.zero_grad()
        loss = ops.mean((self(x) - y) ** 2)
        loss.backward()
        self.theirs.step()
        return {"loss": loss}


def test_an_optimizer_of_torch_is_not_captured():
    """A graph would leave the weights as they are."""

    def fit(jit_compile):
        keras.utils.set_random_seed(5)
        model, (x, y) = OfTorch(), ROWS
        model(x[:1])
        model.theirs = torch.optim.SGD(model.parameters(), 0.1)
        model.compile(jit_compile=jit_compile)
        return model.fit(x, y, batch_size=11, epochs=2, shuffle=False, verbose=0).history["loss"]

    with pytest.warns(UserWarning, match="torch's SGD, whose state a graph can't know"):
        got = fit(True)
    assert got == fit(False)

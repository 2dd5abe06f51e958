"""What is done to a step so that a GPU's compiler makes less of it: equal numbers, fewer ops."""

import functools
import inspect
import os

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers, optimizers
from torch.fx.experimental.proxy_tensor import make_fx

from bench import on_ranks
from keras_spmd.graph import _compile, _seeds, _step, _updates
from keras_spmd.graph._constants import fold_constants
from keras_spmd.graph._simplify import drop_constant_copies

OPTIMIZERS = {
    name: kind
    for name, kind in vars(optimizers).items()
    if inspect.isclass(kind)
    and issubclass(kind, optimizers.Optimizer)
    and kind not in (optimizers.Optimizer, optimizers.LossScaleOptimizer)
    and name != "MultiOptimizer"
}


def train(make_optimizer, steps=4):
    """The weights and state after some steps of ten layers, eight of which are alike."""
    keras.utils.set_random_seed(0)
    inner = [layers.Dense(6, activation="tanh") for _ in range(8)]
    model = keras.Sequential([keras.Input((5,)), layers.Dense(6), *inner, layers.Dense(2)])
    optimizer = make_optimizer()
    model.compile(optimizer, "mse", jit_compile=True)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(12, n)).astype("float32") for n in (5, 2))
    for i in range(steps):
        model.train_on_batch(x * (1 + i), y)
    return [np.array(v) for v in [*model.variables, *optimizer.variables]]


@pytest.fixture
def parts(monkeypatch):
    """Steps are divided also on CPUs, and run as they are. The parts of each are collected."""
    found = []

    def divided(module):
        found.append(_updates.divided(module))
        if found[-1] is None:
            return _compile._as_it_is(module)
        as_it_is = _compile._as_it_is
        return found[-1].joined(as_it_is(found[-1].module), as_it_is)

    monkeypatch.setattr(_step, "compile_graph", divided)
    monkeypatch.setenv("KERAS_SPMD_COMPILER", "none")
    return found


def whole(monkeypatch):
    """From now on steps are not divided."""
    monkeypatch.setattr(_step, "compile_graph", _compile.compile_graph)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_gives_the_same(name, parts, monkeypatch):
    got = train(OPTIMIZERS[name])
    whole(monkeypatch)
    expected = train(OPTIMIZERS[name])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    # Muon multiplies matrices, and what Adafactor and Lamb do to a variable isn't elementwise.
    if name not in ("Muon", "Adafactor", "Lamb"):
        assert parts[-1] is not None


@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.1},
        {"clipvalue": 0.01, "use_ema": True, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2},
        {"learning_rate": optimizers.schedules.CosineDecay(0.1, 3)},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_of_optimizers(options, parts, monkeypatch):
    got = train(lambda: optimizers.AdamW(**options))
    whole(monkeypatch)
    for a, b in zip(got, train(lambda: optimizers.AdamW(**options)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_variables_of_a_kind_share_a_function(parts):
    train(optimizers.AdamW)
    (divided,) = parts
    # Eight kernels and biases of one shape in calls of four, and four variables by themselves;
    # one bias more has the shape of the eight.
    assert len(divided.calls) == 8
    assert len(divided.graphs) == 6
    assert not any("_foreach" in str(node.target) for node in divided.module.graph.nodes)
    together = next(graph for (_, count), graph in divided.graphs.items() if count == 4)
    assert any("_foreach" in str(node.target) for node in together.nodes)


def test_few_variables_stay_in_the_step(monkeypatch, parts):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("adam", "mse", jit_compile=True)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    assert parts == [None]


def test_a_result_that_shares_memory_with_a_variable():
    def doubled(*variables, view):
        row = view(variables[0])
        for variable in variables:
            variable.copy_(variable * 2)
        return (row,)

    def divided(view):
        variables = [torch.ones(3, 2) for _ in range(10)]
        function = functools.partial(doubled, view=view)
        return _updates.divided(make_fx(function, tracing_mode="fake")(*variables))

    parts = divided(lambda x: x.sum())
    run = parts.joined(lambda args: parts.module(*args), lambda module: lambda args: module(*args))
    variables = [torch.full((3, 2), float(i)) for i in range(10)]
    run(variables)
    torch.testing.assert_close(variables, [torch.full((3, 2), 2.0 * i) for i in range(10)])
    assert divided(lambda x: x.view(-1)) is None


def test_a_number_that_the_step_overwrites():
    """Updates use it as it was."""

    def step(count, *variables):
        for variable in variables:
            variable.copy_(variable * count)
        count.copy_(count + 1)
        return (count * 2,)

    def start():
        return [torch.tensor(3.0), *(torch.full((2,), float(i)) for i in range(10))]

    parts = _updates.divided(make_fx(step, tracing_mode="fake")(*start()))
    run = parts.joined(lambda args: parts.module(*args), lambda module: lambda args: module(*args))
    expected, got = start(), start()
    results = step(*expected)
    torch.testing.assert_close(run(got), results)
    torch.testing.assert_close(got, expected)


def test_a_result_that_is_a_view_of_a_variable(parts, monkeypatch):

    class Shows(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = [layers.Dense(4) for _ in range(10)]

        def call(self, x):
            for layer in self.inner:
                x = layer(x)
            return x

        def train_step(self, data):
            row = self.inner[0].kernel.value[0]
            return super().train_step(data) | {"row": row}

        def build(self, shape):
            for layer in self.inner:
                layer.build(shape)

    def run():
        keras.utils.set_random_seed(0)
        model = Shows()
        model.build((3, 4))
        model.compile("sgd", "mse", jit_compile=True)
        ones = np.ones((3, 4))
        return [np.array(model.train_on_batch(ones, ones)[1]) for _ in range(3)]

    got = run()
    whole(monkeypatch)
    np.testing.assert_array_equal(got, run())


def folded(function, *inputs):
    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    drop_constant_copies(module.graph)
    fold_constants(module)
    module.graph.lint()
    torch.testing.assert_close(module(*inputs), function(*inputs))
    return [str(node.target) for node in module.graph.nodes if node.op != "placeholder"]


def test_numbers_are_computed_once():
    def mean(x):
        count = torch.tensor([3, 4]).prod().float()
        return x.sum() / torch.where(count == 0, torch.ones_like(count), count)

    names = folded(mean, torch.randn(3, 4))
    assert names == ["aten.sum.default", "aten.full.default", "aten.div.Tensor", "output"]


def test_tensors_that_somebody_may_change_are_not_folded():
    scale = torch.tensor(2.0)

    def scaled(x):
        return x * (scale + 1)

    module = make_fx(scaled, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(2))
    drop_constant_copies(module.graph)
    fold_constants(module)
    scale.fill_(4.0)
    torch.testing.assert_close(module(torch.ones(2)), torch.full((2,), 5.0))


@pytest.mark.parametrize("make", [torch.as_tensor, torch.from_numpy, torch.tensor])
def test_arrays_that_somebody_may_change_are_not_folded(make):
    scale = np.array([2.0], "float32")
    function = lambda x: x * make(scale)[0]  # noqa: E731
    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(2))
    drop_constant_copies(module.graph)
    fold_constants(module)
    scale[0] = 5.0
    torch.testing.assert_close(module(torch.ones(2)), torch.full((2,), 5.0))


def test_random_numbers_are_not_folded():
    names = folded(lambda x: x + 0 * torch.bernoulli(torch.tensor(0.5)), torch.ones(2))
    assert "aten.bernoulli.default" in names


@pytest.mark.parametrize("value", [1.5, 0.0, float("nan"), float("inf")])
def test_gradients_begin_after_the_loss_and_are_the_same(value, monkeypatch):
    loss = torch.tensor(value)
    assert _seeds.seed_after(loss) is None  # on a CPU
    torch.testing.assert_close(_seeds._ones_after(loss), torch.ones(()))

    def gradient(x):
        y = x * 1.0
        return torch.autograd.grad(y.sum(), x, _seeds._ones_after(y.sum()))

    graph = make_fx(gradient)(torch.ones(3, requires_grad=True)).graph
    (choice,) = graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    assert choice.all_input_nodes[0].all_input_nodes


@on_ranks(2, timeout=180)
@pytest.mark.parametrize("layout", ["data", "columns and rows", "shards of the data axis"])
def test_on_a_mesh(layout):
    """What is done on GPUs, with the collectives of a mesh."""
    mesh = distribution.DeviceMesh((2, 1) if layout != "columns and rows" else (1, 2), ("b", "m"))
    keys = {
        "data": {},
        "columns and rows": {".*kernel": (None, "m")},
        "shards of the data axis": {".*kernel": ("b", None)},
    }
    layouts = distribution.LayoutMap(mesh)
    for key, axes in keys[layout].items():
        layouts[key] = axes
    dist = distribution.ModelParallel(layout_map=layouts, batch_dim_name="b")
    found, before = [], (_step.compile_graph, _seeds._pays)

    def divided(module):
        found.append(_updates.divided(module))
        assert any(n.target is torch.ops.aten.where.self for n in module.graph.nodes)
        return found[-1].joined(_compile._as_it_is(found[-1].module), _compile._as_it_is)

    os.environ["KERAS_SPMD_COMPILER"] = "none"
    try:
        with dist.scope():
            expected = train(optimizers.AdamW)
            _step.compile_graph, _seeds._pays = divided, lambda loss: True
            got = train(optimizers.AdamW)
    finally:
        _step.compile_graph, _seeds._pays = before
        del os.environ["KERAS_SPMD_COMPILER"]
    assert found
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_updates_are_kept_on_disk(monkeypatch, tmp_path):
    """A program that is started again finds all of its code."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        _compile,
        "_inductor",
        lambda module: (parts := _updates.divided(module)).joined(
            _compile._as_it_is(parts.module), torch.no_grad()(_compile._update)
        ),
    )
    expected = {"fxgraph_cache_miss", "fxgraph_cache_hit"}
    found = []
    for _ in range(2):
        counters.clear()
        train(functools.partial(optimizers.SGD, 0.1), steps=2)
        found.append({k: n for k, n in counters["inductor"].items() if k.startswith("fxgraph_")})
    first, second = found
    assert set(first) | set(second) <= expected
    assert first["fxgraph_cache_miss"] > 0
    assert second == {"fxgraph_cache_hit": sum(first.values())}

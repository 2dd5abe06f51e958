"""Layout recipes: they find what belongs together, and change nothing but who holds what."""

import contextlib
import doctest

import keras
import numpy as np
import pytest
from keras import distribution, layers

from bench import on_ranks
from files import shared_folder
from jit import captured
from keras_spmd import layouts
from keras_spmd.distribution_lib import num_processes
from meshes import placements, whole
from recipe_models import LENGTH, MODELS, Subclassed, cnn, data_of, gpt, grouped, mlp, subclassed


def imagined(*shape, names=("batch", "model")):
    """A mesh of devices that need not exist."""
    devices = [f"cpu:{i}" for i in range(int(np.prod(shape)))]
    return distribution.DeviceMesh(shape, names[: len(shape)], devices)


def axes_of(layout_map):
    """What is sharded, by path."""
    return {path: layout.axes for path, layout in layout_map.items() if any(layout.axes)}


COLUMN, ROW, BY_HEADS = (None, "model"), ("model", None), (None, "model", None)


def test_columns_and_rows_of_dense_layers():
    assert axes_of(layouts.tensor_parallel(mlp, imagined(1, 2))) == {
        "mlp/up/kernel|up/kernel": COLUMN,
        "mlp/up/bias|up/bias": ("model",),
        "mlp/down/kernel|down/kernel": ROW,
    }


def test_columns_and_rows_of_convolutions():
    per_channel = ("gamma", "beta", "moving_mean", "moving_variance")
    expected = {
        "first/kernel": (None, None, None, "model"),
        "first/bias": ("model",),
        **{f"norm/{name}": ("model",) for name in per_channel},
        "second/kernel": (None, None, "model", None),
    }
    found = axes_of(layouts.tensor_parallel(cnn, imagined(1, 2)))
    assert found == {f"cnn/{path}|{path}": axes for path, axes in expected.items()}


def heads_of(path):
    inward = {f"{path}/{name}/kernel": BY_HEADS for name in ("query", "key", "value")}
    biases = {f"{path}/{name}/bias": ROW for name in ("query", "key", "value")}
    return {**inward, **biases, f"{path}/attention_output/kernel": ("model", None, None)}


def test_a_transformer():
    found = axes_of(layouts.tensor_parallel(gpt, imagined(1, 4)))
    expected = {"tokens/embeddings": ROW, "logits/kernel": COLUMN, "logits/bias": ("model",)}
    for i in range(2):
        expected |= heads_of(f"attention_{i}")
        expected |= {f"up_{i}/kernel": COLUMN, f"up_{i}/bias": ("model",), f"down_{i}/kernel": ROW}
    assert found == expected


def test_heads_that_share_keys_and_values():
    assert axes_of(layouts.tensor_parallel(grouped, imagined(1, 2))) == heads_of("attention")
    # Two heads of keys and values are not enough for four.
    assert axes_of(layouts.tensor_parallel(grouped, imagined(1, 4))) == {}


def test_heads_that_do_not_divide_stay_whole():
    found = axes_of(layouts.tensor_parallel(lambda: gpt(width=48, heads=3), imagined(1, 2)))
    assert not [path for path in found if path.startswith("attention")]
    assert found["up_0/kernel"] == COLUMN


def test_layers_without_a_graph():
    """A subclassed model: attention by hand, and two gates in front of one layer."""
    found = axes_of(layouts.tensor_parallel(subclassed, imagined(1, 4)))
    first = ("a/query", "a/key", "a/value", "c", "d")
    assert found == {
        **{f"subclassed/{name}/kernel": COLUMN for name in first},
        **{f"subclassed/{name}/bias": ("model",) for name in first},
        "subclassed/a/out/kernel": ROW,
        "subclassed/e/kernel": ROW,
    }
    # The features of the four heads divide by 8, the heads themselves don't.
    found = axes_of(layouts.tensor_parallel(subclassed, imagined(1, 8)))
    assert [path for path in found if "/a/" in path] == []


def test_what_is_not_understood_stays_whole():
    def make():
        x = keras.Input((16,))
        y = layers.Dense(64, name="up")(x)
        y = layers.Lambda(lambda t: keras.ops.roll(t, 1, axis=-1))(y)
        return keras.Model(x, layers.Dense(16, name="down")(y))

    assert axes_of(layouts.tensor_parallel(make, imagined(1, 2), min_size=10**6)) == {}


def test_a_residual_of_the_same_features_is_not_cut_off():
    """The second layer's input doesn't come from the first alone, but all of it is sharded."""

    def make():
        x = keras.Input((16,))
        y = layers.Dense(64, name="a")(x) + layers.Dense(64, name="b")(x)
        return keras.Model(x, layers.Dense(16, name="c")(y))

    found = axes_of(layouts.tensor_parallel(make, imagined(1, 2)))
    assert [found[f"{name}/kernel"] for name in "abc"] == [COLUMN, COLUMN, ROW]


def test_shares_of_every_weight():
    found = axes_of(layouts.fsdp(gpt, imagined(4)))
    assert found["up_0/kernel"] == (None, "batch")
    assert found["down_0/kernel"] == ("batch", None)
    assert found["attention_0/query/kernel"] == ("batch", None, None)
    assert "up_0/bias" not in found
    assert "up_0/bias" in axes_of(layouts.fsdp(gpt, imagined(4), min_size=64))


def test_both_axes_and_a_third():
    mesh = imagined(2, 2, 2, names=("batch", "extra", "model"))
    found = axes_of(layouts.hybrid(gpt, mesh))
    assert found["up_0/kernel"] == ("batch", "model")
    assert found["down_0/kernel"] == ("model", "batch")
    assert found["attention_0/query/kernel"] == ("batch", "model", None)
    assert axes_of(layouts.hybrid(gpt, mesh, fsdp=False)) == axes_of(
        layouts.tensor_parallel(gpt, mesh)
    )


def test_overrides_win():
    overrides = {"mlp/up/.*": (), "mlp/down/kernel": (None, "batch")}
    found = layouts.tensor_parallel(mlp, imagined(2, 2), overrides=overrides)
    assert found["mlp/up/kernel"].axes == ()
    assert found["mlp/down/kernel"].axes == (None, "batch")


def test_a_key_matches_its_path_only():
    def make():
        x = keras.Input((64,))
        return keras.Model(x, layers.Dense(64, name="a|b")(layers.Dense(64, name="a+b")(x)))

    found = layouts.fsdp(make, imagined(2))
    assert found["a|b/kernel"].axes == found["a+b/kernel"].axes == ("batch", None)
    assert found["aab/kernel"] is found["b/kernel"] is None


def test_nothing_is_left_behind():
    """The next model has the names and the numbers that it would have had."""

    def make():
        return keras.Sequential([keras.Input((64,)), layers.Dense(64), layers.Dropout(0.5)])

    def names_and_numbers():
        model = make()
        return [v.path for v in model.variables], whole(model.weights[0])

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    expected = names_and_numbers()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layouts.fsdp(make, imagined(2))
    found = layouts.tensor_parallel(make, imagined(1, 2))
    paths, numbers = names_and_numbers()
    assert paths == expected[0]
    np.testing.assert_array_equal(numbers, expected[1])
    assert found[paths[0]].axes == COLUMN


def test_models_that_are_built_or_not():
    built = axes_of(layouts.tensor_parallel(mlp(), imagined(1, 2)))
    unbuilt = keras.Sequential([layer.from_config(layer.get_config()) for layer in mlp().layers])
    unbuilt.name = "mlp"
    assert not unbuilt.built
    inputs = np.zeros((2, 16), "float32")
    assert axes_of(layouts.tensor_parallel(unbuilt, imagined(1, 2), inputs=inputs)) == built
    assert not unbuilt.built
    inputs = keras.Input((LENGTH, 16))
    given = axes_of(layouts.tensor_parallel(Subclassed, imagined(1, 2), inputs=inputs))
    assert given == axes_of(layouts.tensor_parallel(subclassed(), imagined(1, 2)))


def test_mistakes():
    with pytest.raises(ValueError, match="axis='model' is no axis of the mesh"):
        layouts.tensor_parallel(mlp, imagined(2))
    with pytest.raises(ValueError, match="Pass inputs="):
        layouts.fsdp(Subclassed, imagined(2))
    with pytest.raises(TypeError, match="should return the model"):
        layouts.fsdp(lambda: None, imagined(2))
    with pytest.raises(TypeError, match="takes a model or a function"):
        layouts.fsdp("gpt", imagined(2))
    with pytest.raises(ValueError, match="names the axis 'rows'"):
        layouts.fsdp(mlp, imagined(2), overrides={".*": ("rows",)})
    with pytest.raises(ValueError, match="Pass the function that makes it"):
        layouts.fsdp(Subclassed(), imagined(2))


def meshes():
    count = num_processes()
    both = (2, 2) if count == 4 else (1, count)
    shapes = {"fsdp": (count, 1), "zero1": (count, 1), "tensor_parallel": (1, count)}
    return {**shapes, "sequence_parallel": both, "hybrid": both}


def under(recipe, make):
    """The distribution of a recipe, small variables included."""
    mesh = distribution.DeviceMesh(meshes()[recipe], ("batch", "model"))
    layout_map = getattr(layouts, recipe)(make, mesh, min_size=2)
    return distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def train(name, optimizer=None):
    """Losses of three steps, and weights."""
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    x, y = data_of(name)
    model.compile(optimizer or keras.optimizers.AdamW(1e-2, epsilon=1e-3), "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=len(x), epochs=3, shuffle=False, verbose=0).history
    return model, [*history.items(), *((v.path, whole(v)) for v in model.weights)]


def compare(got, expected, where):
    for (path, value), (_, same) in zip(expected, got, strict=True):
        np.testing.assert_allclose(same, value, 1e-5, 1e-6, err_msg=f"{where}: {path}")


# What runs with `make test`.
SAMPLE = [("gpt", "captured"), *((name, "eager") for name in sorted(MODELS))]


@on_ranks(2, timeout=300, exhaustive=(4,))
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) in SAMPLE else [pytest.mark.exhaustive])
        for name in sorted(MODELS)
        for mode in ("captured", "eager")
    ],
)
def test_training_gives_the_numbers_of_one_device(name, mode):
    _, expected = train(name)
    for recipe in meshes():
        keras.utils.clear_session()
        wrapper = captured if mode == "captured" else contextlib.nullcontext
        with under(recipe, MODELS[name]).scope(), wrapper():
            _, got = train(name)
        compare(got, expected, f"{name}, {recipe}")


@on_ranks(2)
def test_a_model_that_is_loaded_is_laid_out_as_it_was():
    """Also a `Sequential`, whose name Keras leaves out of paths then."""
    for recipe in ("fsdp", "zero1", "tensor_parallel"):
        keras.utils.clear_session()
        with shared_folder() as folder, under(recipe, mlp).scope():
            model, _ = train("mlp")
            model.save(folder / "mlp.keras")
            loaded = keras.saving.load_model(folder / "mlp.keras")
        assert [v.path for v in loaded.weights] != [v.path for v in model.weights]
        made, same = ([*m.weights, *m.optimizer.variables] for m in (model, loaded))
        found = [placements(v) for v in same]
        assert any(p.is_shard() for spec in found if spec for p in spec[1])
        for a, b, spec in zip(made, same, found, strict=True):
            assert spec == placements(a), (recipe, b.path)


def test_paths_that_are_one_when_loaded():
    """The layouts of the model as it was made stay what they are."""

    def one(width, name):
        dense = layers.Dense(width, name="dense")
        return keras.Sequential([keras.Input((64,)), dense], name=name)

    def same():
        x = keras.Input((64,))
        return keras.Model(x, one(64, "b")(one(64, "a")(x)))

    found = layouts.zero1(same, imagined(2), min_size=2)
    for name in ("a_dense", "b_dense", "dense"):
        assert found[f"adam/{name}_bias_momentum"].axes == ("batch",)
        assert found[f"{name.replace('_', '/')}/bias"].axes == (None,)

    def twins():
        x = keras.Input((64,))
        return keras.Model(x, layers.Dense(64, name="dense")(one(63, "first")(x)))

    found = layouts.fsdp(twins, imagined(2), min_size=2)
    assert found["first/dense/bias"].axes == (None,)
    assert found["dense/bias"].axes == ("batch",)
    found = layouts.zero1(twins, imagined(2), min_size=2)
    assert found["adam/first_dense_bias_momentum"] is None
    assert found["adam/dense_bias_momentum"].axes == ("batch",)


def local_bytes(variables):
    values = [v.value for v in variables]
    return sum(x.to_local().nbytes if placements(x) else x.nbytes for x in values)


@on_ranks(2, timeout=300, exhaustive=(4,))
def test_bytes_on_each_device():
    """What each recipe promises, of weights and of the optimizer's state."""
    count, sizes = num_processes(), {}
    for recipe in ("none", "fsdp", "zero1", "tensor_parallel", "hybrid"):
        keras.utils.clear_session()
        scope = under(recipe, gpt).scope() if recipe != "none" else contextlib.nullcontext()
        with scope:
            model, _ = train("gpt")
        sizes[recipe] = local_bytes(model.weights), local_bytes(model.optimizer.variables[2:])
    weights, state = sizes["none"]
    assert sizes["fsdp"] == (weights / count, state / count)
    assert sizes["zero1"] == (weights, state / count)
    # All but norms and the biases of rows, of which there are few.
    for recipe in ("tensor_parallel", "hybrid"):
        assert weights / count < sizes[recipe][0] < 1.2 * weights / count
        assert sizes[recipe][1] == 2 * sizes[recipe][0]


RECIPES = ("apply", "fsdp", "hybrid", "sequence_parallel", "tensor_parallel", "zero1")


@pytest.mark.parametrize("name", RECIPES)
def test_examples(name):
    keras.utils.clear_session()
    text = getattr(layouts, name).__doc__
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    failures = []
    try:
        doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    finally:
        keras.distribution.set_distribution(None)
    assert example.examples
    assert not failures, "".join(failures)

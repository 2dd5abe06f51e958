"""Dry runs: what they foretell is what a real run does, and they leave no trace."""

import html.parser
import io
import json
import logging
import os
import sys
import time
import warnings

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from keras import distribution, layers

import keras_spmd
from bench import on_ranks
from keras_spmd import cli
from keras_spmd.distribution_lib import num_processes
from keras_spmd.plan._auto import auto
from keras_spmd.plan._dry_run import dry_run
from llama import LAYOUTS, SIZE_70B, TINY, llama

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "benchmarks"))
from gpt import TENSOR_PARALLEL

WORDS, LENGTH, WIDTH = 512, 64, 128


def mlp():
    model = keras.Sequential(
        [
            keras.Input((256,)),
            layers.Dense(1024, activation="relu", name="first"),
            layers.Dense(1024, activation="gelu", name="second"),
            layers.Dense(256, name="third"),
        ]
    )
    model.compile("adam", "mse", jit_compile=True)
    return model


def cnn():
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adamw", loss, jit_compile=True)
    return model


def gpt():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    for i in range(2):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(4, WIDTH // 4, name=f"block{i}_attention")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation=keras.activations.gelu, name=f"block{i}_up")(y)
        x = x + layers.Dense(WIDTH, name=f"block{i}_down")(y)
    x = layers.Dense(WORDS, use_bias=False, name="logits")(layers.LayerNormalization()(x))
    model = keras.Model(tokens, x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss, jit_compile=True)
    return model


COLUMNS_AND_ROWS = {
    ".*first/kernel": (None, "model"),
    ".*first/bias": ("model",),
    ".*second/kernel": ("model", "batch"),
    ".*third/kernel": (None, "model"),
}
MODELS = {
    "mlp": (mlp, COLUMNS_AND_ROWS, (((512, 256), "float32"), ((512, 256), "float32"))),
    "cnn": (cnn, None, (((64, 32, 32, 3), "float32"), ((64,), "int32"))),
    "gpt": (gpt, TENSOR_PARALLEL, (((16, LENGTH), "int32"), ((16, LENGTH), "int32"))),
}


def mesh_of(layouts, count):
    return ((count,), ("batch",)) if layouts is None else ((count // 2, 2), ("batch", "model"))


def real_distribution(layouts):
    shape, names = mesh_of(layouts, num_processes())
    mesh = distribution.DeviceMesh(shape, names)
    if layouts is None:
        return distribution.DataParallel(device_mesh=mesh)
    layout_map = distribution.LayoutMap(mesh)
    for key, axes in layouts.items():
        layout_map[key] = axes
    return distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def arrays(specs):
    rng = np.random.default_rng(0)
    return [
        (rng.integers(0, 10, shape) if "int" in dtype else rng.normal(size=shape)).astype(dtype)
        for shape, dtype in specs
    ]


def peak_of(profile):
    """The most that was allocated at once, beyond what was there before."""
    events = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        now += nbytes
        peak = max(peak, now)
    return peak


def foretold(name, count, **options):
    """In a process of its own: this one is part of a real job."""
    make, layouts, batch = MODELS[name]
    return keras_spmd.plan(make, *mesh_of(layouts, count), layouts, batch, device="CPU", **options)


def real_step(name, compiler):
    os.environ["KERAS_SPMD_COMPILER"] = compiler
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    make, layouts, batch = MODELS[name]
    with real_distribution(layouts).scope():
        model = make()
        data = keras_spmd.distribute_batch(tuple(arrays(batch)))
        model._symbolic_build(data_batch=tuple(arrays(batch)))
        model.make_train_function()
        for _ in range(2):
            model.train_function([data])
        with (
            warnings.catch_warnings(),
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile,
        ):
            warnings.simplefilter("ignore")
            model.train_function([data])
        (report,) = keras_spmd.explain(model)
    (graph,) = report.graphs
    collectives = sorted((c.kind, c.nbytes, c.axis, c.phase) for c in graph.collectives)
    held = graph.parameter_bytes + graph.state_bytes
    given = sum(keras_spmd.get_dtensor_local(x).nbytes for x in data)
    return {"collectives": collectives, "peak": held + given + peak_of(profile)}


def run_on_ranks(count, name, compiler):
    from bench import bench_of

    return bench_of(count).run(real_step, {"name": name, "compiler": compiler}, 300)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", list(MODELS))
def test_memory_and_collectives_are_those_of_a_real_run(name, count):
    """The peak within a tenth of what a compiled step allocates; each collective with its bytes."""
    real = run_on_ranks(count, name, "inductor")[0]
    plan = foretold(name, count)
    assert plan.memory.peak == pytest.approx(real["peak"], rel=0.1)
    planned = sorted((t.kind, t.nbytes, t.axis, t.phase) for t in plan.transfers)
    assert planned == real["collectives"]


def scores():
    model = keras.Sequential([keras.Input((16,)), layers.Dense(4096)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def test_the_gradient_of_a_loss_is_written_over_the_scores():
    """As Inductor does it: the place of each row's class is compared, not written."""
    batch = [((512, 16), "float32"), ((512,), "int32")]
    plan = keras_spmd.plan(scores, (1,), ("batch",), None, batch, device="H200")
    assert plan.memory.activations < 1.1 * 512 * 4096 * 4


def test_mixed_precision_is_planned_without_a_word(caplog):
    """Keras asks torch for shapes in a way that fails with mixed precision, and asks again."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        keras_spmd.plan(gpt, (2,), ("batch",), None, MODELS["gpt"][2], device="H200")
    finally:
        keras.config.set_dtype_policy("float32")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_operations_of_a_known_model():
    """A product of (b, m) and (m, n) has 2 b m n, and twice that backward, but for the input."""
    plan = foretold("mlp", 1 * 2)
    rows = 512
    products = [256 * 1024, 1024 * 1024, 1024 * 256]
    forward = 2 * rows * sum(products)
    whole = 3 * forward - 2 * rows * products[0]
    # Two devices share the model's columns and rows, and do half of it each.
    assert plan.flops == whole / 2
    device = plan.device
    assert plan.compute_seconds >= plan.flops / device.flops_32
    assert 0 < plan.mfu < 1
    assert plan.seconds >= plan.compute_seconds


def test_heads_stay_on_their_devices_however_many_there_are():
    """Four heads on two devices of an axis, and sixteen rows on eight of the other."""
    make, layouts, batch = MODELS["gpt"]
    plan = keras_spmd.plan(make, (8, 2), ("batch", "model"), layouts, batch)
    assert {t.kind for t in plan.transfers} == {"all_reduce"}


def small():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, name="first"), layers.Dropout(0.5), layers.Dense(3)]
    )
    model.compile("adam", "mse")
    return model


BATCH = ((8, 6), (8, 3))


def test_nothing_is_left_behind():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    expected = [small().get_weights(), layers.Dense(1).name, np.random.rand(), torch.rand(1)]
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    keras_spmd.plan(small, (4, 2), ("batch", "model"), {".*kernel": (None, "model")}, BATCH)
    with keras_spmd.plan.meta():
        meta_names = [v.path for v in small().variables]
    assert not dist.is_initialized()
    assert distribution.distribution() is None
    model = small()
    assert [v.path for v in model.variables] == meta_names
    found = [model.get_weights(), layers.Dense(1).name, np.random.rand(), torch.rand(1)]
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[1] == expected[1]
    assert (found[2], found[3]) == (expected[2], expected[3])
    history = model.fit(np.ones(BATCH[0]), np.ones(BATCH[1]), verbose=0)
    assert np.isfinite(history.history["loss"][0])


@on_ranks(1)
def test_a_group_of_one_process_stays():
    from meshes import line

    mesh = line()
    group = mesh.backend_mesh.get_group()
    keras_spmd.plan(small, (4,), ("batch",), None, BATCH)
    assert dist.get_world_size() == 1
    assert line().backend_mesh.get_group() is group
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1.0, 1.0]
    # torch still knows the group well enough to make others from it.
    assert dist.get_backend() == "gloo"
    grid = distribution.DeviceMesh((1, 1), ("batch", "model"), ["cpu:0"])
    assert tuple(grid.backend_mesh.shape) == (1, 1)


@on_ranks(2, 4)
def test_a_rank_of_a_job_can_plan():
    """Also only one of them; afterwards it is the rank that it was, in the same groups."""
    import sys

    from meshes import grid

    mesh = grid()
    groups = mesh.backend_mesh.get_all_groups()
    rank, size, hook = dist.get_rank(), dist.get_world_size(), sys.excepthook
    last = rank == size - 1
    if last:
        plan = keras_spmd.plan(small, (64,), ("batch",), None, ((128, 6), (128, 3)))
        assert plan.mesh == {"batch": 64}
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert sys.excepthook is hook, "tracebacks are those of this rank"
    assert grid().backend_mesh.get_all_groups() == groups
    x = torch.full((2,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 2
    # New groups are numbered alike on all ranks.
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [float(size * (size + 1))] * 2


def test_models_larger_than_memory_are_built_without_values():
    started = time.process_time()
    with keras_spmd.plan.meta():
        model = llama(SIZE_70B | {"blocks": 20}, 4096)
    nbytes = sum(2 * np.prod(v.shape) for v in model.variables)
    assert nbytes > 2**35
    kernel = next(v for v in model.variables if v.path.endswith("block_19/down/kernel"))
    assert (tuple(kernel.shape), kernel.dtype) == ((28672, 8192), "bfloat16")
    assert time.process_time() - started < 60


def test_alike_blocks_are_planned_once():
    """Three captured blocks of eight say what all eight say."""
    batch = (((8, 16), "int32"), ((8, 16), "int32"))
    layouts = {".*(query|gate|up)/kernel": (None, "model"), ".*(out|down)/kernel": ("model", None)}
    plans = [
        keras_spmd.plan(
            lambda: llama(TINY, 16, "float32"),
            (2, 2),
            ("batch", "model"),
            layouts,
            batch,
            whole=whole,
        )
        for whole in (False, True)
    ]
    part, whole = plans
    assert list(part.repeats.values()) == [8]
    assert whole.repeats == {}
    assert part.flops == whole.flops
    assert part.memory.parameters == whole.memory.parameters
    assert part.memory.peak == pytest.approx(whole.memory.peak, rel=0.1)
    assert part.transferred_bytes == pytest.approx(whole.transferred_bytes, rel=0.02)
    assert part.compute_seconds == pytest.approx(whole.compute_seconds, rel=0.1)


@pytest.mark.parametrize(("rows", "length"), [(512, 4096), (64, 2048)])
def test_a_large_mesh_does_what_megatron_does(rows, length):
    """Four sums of activations for each block, weights gathered, and nothing computed twice."""
    blocks, tokens = 2, rows * length / 512
    batch = (((rows, length), "int32"), ((rows, length), "int32"))
    plan = keras_spmd.plan(
        lambda: llama(SIZE_70B | {"blocks": blocks}, length),
        (64, 8),
        ("batch", "model"),
        LAYOUTS,
        batch,
        whole=True,
    )
    count = sum(np.prod(v.shape) for v in plan.variables)
    assert plan.flops < 6 * count * tokens
    sums = [t for t in plan.transfers if t.axis == "model" and t.nbytes > 2**20]
    assert {t.kind for t in sums} == {"all_reduce"}
    assert 4 * blocks <= sum(t.count for t in sums) <= 4 * blocks + 4
    assert {t.nbytes for t in sums} == {rows // 64 * length * 8192 * 2}
    others = [t for t in plan.transfers if t.axis == "batch" and t.nbytes > 2**20]
    assert {t.of for t in others} <= {"weights", "gradients"}


@pytest.mark.exhaustive
def test_llama_70b_on_512_devices():
    """In three minutes of one core, and far less than 8 GiB."""
    import resource

    started = time.process_time()
    batch = (((512, 4096), "int32"), ((512, 4096), "int32"))
    plan = keras_spmd.plan(
        lambda: llama(SIZE_70B, 4096), (64, 8), ("batch", "model"), LAYOUTS, batch
    )
    assert time.process_time() - started < 180
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20
    count = sum(np.prod(v.shape) for v in plan.variables)
    assert 70e9 < count < 71e9
    assert plan.memory.parameters == pytest.approx(2 * count / 512, rel=0.01)
    tokens = 512 * 4096 / 512
    assert plan.flops > 6 * count * tokens * 0.95, "six operations for each weight and token"
    assert plan.flops < 8 * count * tokens, "and those of attention"


class Checker(html.parser.HTMLParser):
    VOID = ("meta", "input", "br", "line", "rect")

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            assert name != "src", "needs the network"
            assert name != "href" or value.startswith("#"), "needs the network"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_tables_json_and_a_page(tmp_path):
    plan = keras_spmd.plan(
        small, (4, 2), ("batch", "model"), {".*first/kernel": (None, "model")}, BATCH
    )
    text = str(plan)
    assert "Memory of a device" in text
    assert "sequential" in text
    assert "collectives" in text
    found = json.loads(plan.to_json(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text()) == found
    assert found["memory"]["peak"] == plan.memory.peak
    assert found["mesh"] == {"batch": 4, "model": 2}
    assert [v["path"] for v in found["variables"]] == [v.path for v in plan.variables]
    assert found["variables"][0]["local_nbytes"] * 2 == found["variables"][0]["nbytes"]
    plan.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.tags.count("table") == 3
    assert checker.tags.count("svg") >= 3 + len(plan.variables)
    assert "prefers-color-scheme: dark" in page
    for v in plan.variables:
        assert v.path in page


def test_what_a_user_should_know():
    def wide():
        model = keras.Sequential(
            [keras.Input((10,)), layers.Dense(2**20, name="big"), layers.Dense(3, name="last")]
        )
        model.compile("sgd", "mse")
        return model

    device = keras_spmd.plan.Device(
        "small", 64 * 2**20, 1e12, 1e12, 1e12, keras_spmd.plan.H100.network, reserved=0
    )
    layouts = {".*last/kernel": (None, "model"), ".*last/bias": ("model",)}
    plan = keras_spmd.plan(
        wide, (2, 2), ("batch", "model"), layouts, ((7, 10), (7, 3)), device=device
    )
    text = "\n".join(plan.warnings)
    assert not plan.fits
    assert "It does not fit" in text
    assert "Every device holds all of 'sequential" in text
    assert "has 3 elements for 2 devices of 'model'" in text
    assert "7 rows doesn't divide evenly" in text


def test_moved_activations_are_told_of_unless_weights_would_be_more():
    def wide():
        dense = [layers.Dense(1024, name=f"dense_{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((1024,)), *dense], name="wide")
        model.compile("sgd", "mse")
        return model

    batch = ((256, 1024), (256, 1024))
    plan = keras_spmd.plan(wide, (8,), ("batch",), keras_spmd.layouts.fsdp, batch)
    moved = [t for t in plan.transfers if t.of == "activations" and t.nbytes >= 2**20]
    assert moved, "256 rows are fewer bytes than the weights"
    assert not plan.warnings
    # From shards of one dim to those of another: each device sends its eighth.
    exchanges = {(t.of, t.nbytes) for t in plan.transfers if t.kind == "all_to_all"}
    assert exchanges == {("gradients", 4 * 1024**2 // 8), ("activations", 4 * 256 * 1024 // 8)}

    alone = {"wide/dense_1/output": (None, None)}
    plan = keras_spmd.plan(wide, (8,), ("batch",), {".*/kernel": (), **alone}, ((2**15, 1024),) * 2)
    assert "128.0 MiB of activations go through an all_gather over 'batch'" in plan.warnings[0]
    assert "compare with a recipe" in plan.warnings[-1]


def test_layouts_as_a_function_a_map_and_specs():
    seen = []

    def recipe(model, mesh):
        seen.extend(v.path for v in model.variables)
        layout_map = distribution.LayoutMap(mesh)
        layout_map[seen[0]] = (None, "model")
        return layout_map

    inputs = keras.Input((6,), batch_size=8), np.ones((8, 3), "float32")
    plan = keras_spmd.plan(small, (2, 2), ("batch", "model"), recipe, inputs)
    assert plan.variables[0].local_shape == (6, 8)
    assert plan.variables[0].path == seen[0], "the function sees the names of the plan"
    assert plan.batch == ["float32[8, 6]", "float32[8, 3]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4,), ("batch", "model"), None, BATCH), "different axis names"),
        (((0,), ("batch",), None, BATCH), "numbers from 1 on"),
        (((4,), ("batch",), {".*kernel": (None, "model")}, BATCH), "names the axis 'model'"),
        (((4,), ("batch",), None, ((None, 6), (8, 3))), "A batch is a structure"),
        (((4,), ("batch",), None, None), "needs to know the batch"),
        (((4,), ("batch",), 3, BATCH), "Layouts are None"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        keras_spmd.plan(small, *arguments)


def test_more_mistakes_are_named():
    with pytest.raises(TypeError, match="a function that makes and compiles"):
        keras_spmd.plan(3, (4,), ("batch",), None, BATCH)
    with pytest.raises(ValueError, match="return a compiled model"):
        keras_spmd.plan(lambda: layers.Dense(1), (4,), ("batch",), None, BATCH)
    with pytest.raises(ValueError, match="There are figures for A100"):
        keras_spmd.plan(small, (4,), ("batch",), None, BATCH, device="abacus")
    with pytest.raises(ValueError, match="of unknown size"):
        keras_spmd.plan(small, (4,), ("batch",), None, (keras.Input((6,)), (8, 3)))
    refused = r"a batch of shapes \(\(8, 7\), \(8, 3\)\): .* Its inputs are \(None, 6\)"
    with pytest.raises(ValueError, match=refused):
        keras_spmd.plan(small, (4,), ("batch",), None, ((8, 7), (8, 3)))

    def classifier():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile("sgd", "categorical_crossentropy")
        return model

    with pytest.raises(ValueError, match=r"shapes \(\(8, 6\), \(8,\)\): .*same (rank|shape)"):
        keras_spmd.plan(classifier, (4,), ("batch",), None, ((8, 6), (8,)))
    assert not dist.is_initialized()


def test_the_fastest_layouts_that_fit_are_chosen():
    candidates = {
        "data parallel": None,
        "sharded": {".*kernel": ("batch", None)},
        "impossible": {".*kernel": ("nowhere",)},
    }
    make, _, batch = MODELS["mlp"]
    choice = auto(make, (4,), ("batch",), batch, candidates=candidates)
    assert choice.name == min(choice.plans, key=lambda name: choice.plans[name].seconds)
    assert "nowhere" in choice.failures["impossible"]
    assert all(name in str(choice) for name in candidates)
    peaks = {name: plan.memory.peak for name, plan in choice.plans.items()}
    assert peaks["sharded"] < peaks["data parallel"]
    tight = auto(
        make, (4,), ("batch",), batch, candidates=candidates, device_memory=peaks["sharded"]
    )
    assert tight.name == "sharded"
    assert "does not fit into" in tight.why
    with pytest.raises(ValueError, match="fits into"):
        auto(make, (4,), ("batch",), batch, candidates=candidates, device_memory=1000)


@on_ranks(1, 2)
def test_shards_are_shown():
    from meshes import model_parallel

    with model_parallel({".*first/kernel": (None, "model")}).scope():
        model = small()
        shards = keras_spmd.show(model)
    ranks = num_processes()
    kernel = shards.rows[0]
    assert (kernel.nbytes, kernel.local_nbytes) == (6 * 16 * 4, 6 * 16 * 4 // ranks)
    page = shards._repr_html_()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert page.count('<svg class="parts"') == len(model.variables)
    assert f"{kernel.local_nbytes} B" in page
    text = str(shards)
    assert "-, model" in text if ranks > 1 else "whole" in text
    assert repr(shards) == f"<shards of '{model.name}': {len(shards.rows)} variables on " + (
        "batch=1, model=2>" if ranks > 1 else "one device>"
    )


def shown(width, colours=False):
    """A table of shards on a mesh of eight, in a terminal of that width."""
    from rich.console import Console

    from keras_spmd.plan._show import Row, Shards

    rows = [
        Row("block/embedding[red]/embeddings", (512, 128), ("model", "batch"), 2**18, 2**15),
        Row("block/norm/scale", (128,), (None,), 512, 512),
        Row("block/wide/kernel", (4, 4096), (None, "batch"), 2**16, 2**14),
    ]
    shards = Shards("a [b]", {"batch": 4, "model": 2}, rows)
    file = io.StringIO()
    options = {"force_terminal": colours, "color_system": "truecolor" if colours else None}
    console = Console(file=file, width=width, legacy_windows=False, **options)
    console.print(shards.view(console.width))
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_shards_in_a_terminal(width):
    """Every part has its number, so colours aren't needed; nothing is wider than the window."""
    text = shown(width)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert "0  1  2  3" in text
    assert "4  5  6  7" in text
    assert "32.0 KiB" in text
    assert "'a [b]' on batch=4, model=2" in text, "names are no markup"
    assert "[red]" in text.replace("\n", "")
    assert "\x1b" not in text
    coloured = shown(width, colours=True)
    assert coloured.count("48;2;0;114;178") == 3, "the first part of each is blue"
    assert coloured.count("48;2;153;153;153") == 1, "eight parts have eight colours"


def test_a_dry_run_allocates_nothing():
    """Every variable is a tensor without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    with dry_run(small, (4,), ("batch",), None, BATCH) as (run, _):
        assert all(isinstance(v._value._local_tensor, FakeTensor) for v in run.model.variables)
        optimizer = run.model.optimizer.variables
        assert all(isinstance(v._value._local_tensor, FakeTensor) for v in optimizer)


def planned_by_the_command(*words):
    return cli.main(["plan", "plan_model:make", *words])


def test_the_command_plans(tmp_path, monkeypatch, capsys):
    (tmp_path / "plan_model.py").write_text(
        "import keras\n"
        "def make():\n"
        "    dense = [keras.layers.Dense(256), keras.layers.Dense(64)]\n"
        "    model = keras.Sequential([keras.Input((64,)), *dense])\n"
        "    model.compile('adam', 'mse')\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--mesh", "batch=4,model=2", "--batch", "512x64,512x64"]
    assert planned_by_the_command(*words, "--layouts", "hybrid", "--json", "--html", "p.html") == 0
    plan = json.loads(capsys.readouterr().out)
    kernels = [v["axes"] for v in plan["variables"] if v["path"].endswith("/kernel")]
    assert kernels == [["batch", "model"], ["model", "batch"]]
    assert (tmp_path / "p.html").read_text().startswith("<!")
    assert planned_by_the_command(*words) == 0
    assert "all_reduce" in capsys.readouterr().out
    for bad, message in [
        (["--mesh", "4x2", "--batch", "512x64,512x64"], "--mesh must be"),
        (["--mesh", "batch=4", "--batch", "512*64"], "--batch must be"),
        ([*words, "--layouts", "best"], "--layouts must be"),
        (["--mesh", "batch=4", *words[2:], "--layouts", "hybrid"], "hybrid needs two axes"),
        ([*words, "--device", "abacus"], "abacus"),
    ]:
        assert planned_by_the_command(*bad) == 2
        assert message in capsys.readouterr().err

"""The collectives of a captured step: how many there are, and the pass that makes them few."""

import math
import os
import warnings
from collections import Counter

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

import keras_spmd
from bench import on_ranks
from keras_spmd._gradients import BUCKET_BYTES
from keras_spmd.distribution_lib import num_processes
from keras_spmd.graph import _collectives as passes
from keras_spmd.graph._buckets import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    Caller,
    merge_into_buckets,
)
from meshes import model_parallel

aten = torch.ops.aten


class Small:
    """A small graph, made by hand."""

    def __init__(self):
        self.graph, self.mode = Graph(), FakeTensorMode()

    def input(self, *shape):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target, *args):
        with self.mode:
            return Caller(self.graph, args[0])(target, *args)

    def all_reduce(self, node, group="0"):
        return self.call(WAIT, self.call(ALL_REDUCE, node, "sum", group))

    def all_gather(self, node, group="0"):
        return self.call(WAIT, self.call(ALL_GATHER, node, 2, group))

    def reduce_scatter(self, node, group="0"):
        return self.call(WAIT, self.call(REDUCE_SCATTER, node, "sum", 2, group))

    def finish(self, *outputs):
        self.graph.output(outputs)
        self.graph.lint()
        return self

    def names(self):
        return [str(n.target).split(".")[-2] for n in self.graph.nodes if n.op == "call_function"]

    def run(self, *inputs):
        """What rank 0 of two gets when the other has all that it has, and 100 more in gathers."""
        alone = {
            ALL_REDUCE: lambda x, op, group: 2 * x,
            ALL_GATHER: lambda x, size, group: torch.cat([x, x + 100]),
            REDUCE_SCATTER: lambda x, op, size, group: 2 * x.chunk(size)[0],
            WAIT: lambda x: x,
        }
        module = GraphModule({}, self.graph)
        for node in module.graph.nodes:
            node.target = alone.get(node.target, node.target)
        module.recompile()
        return module(*inputs)


def merged(small, limit):
    with small.mode:
        merge_into_buckets(small.graph, limit)
    passes.sort(small.graph)
    small.graph.eliminate_dead_code()
    small.graph.lint()


def test_duplicates_are_merged():
    small = Small()
    x = small.input(4)
    a, b = small.all_reduce(x), small.all_reduce(x)
    small.finish(small.call(aten.add.Tensor, a, b))
    passes.merge_duplicates(small.graph)
    small.graph.lint()
    assert small.names() == ["all_reduce", "wait_tensor", "add"]


def test_duplicates_of_a_padded_shard_are_merged():
    """A rank with a longer shard doesn't pad, and merges them too."""
    small = Small()
    x = small.input(3)
    gathers = [small.all_gather(small.call(aten.constant_pad_nd.default, x, [0, 1])) for _ in "ab"]
    small.finish(small.call(aten.add.Tensor, *gathers))
    passes.merge_duplicates(small.graph)
    assert Counter(small.names())["all_gather_into_tensor"] == 1


def test_independent_sums_travel_together():
    inputs = [torch.randn(3, 2), torch.randn(5), torch.randn(())]
    small = Small()
    nodes = [small.input(*x.shape) for x in inputs]
    sums = [small.all_reduce(small.call(aten.neg.default, node)) for node in nodes]
    small.finish(*sums)
    merged(small, limit=1000)
    assert Counter(small.names())["all_reduce"] == 1
    for got, x in zip(small.run(*inputs), inputs, strict=True):
        torch.testing.assert_close(got, -2 * x)


def test_a_bucket_has_a_limit():
    small = Small()
    sums = [small.all_reduce(small.input(10)) for _ in range(5)]
    small.finish(*sums)
    merged(small, limit=80)
    assert Counter(small.names())["all_reduce"] == math.ceil(5 * 40 / 80)


TOGETHER = {
    "all_gather": lambda x: torch.cat([x, x + 100]),
    "reduce_scatter": lambda x: 2 * x.chunk(2)[0],
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_weights_and_their_gradients_travel_together(kind):
    inputs = [torch.randn(4, 2), torch.randn(6), torch.randn(2, 1, 4)]
    small = Small()
    small.finish(*[getattr(small, kind)(small.input(*x.shape)) for x in inputs])
    merged(small, limit=1000)
    assert sum(name.startswith(kind) for name in small.names()) == 1
    for got, x in zip(small.run(*inputs), inputs, strict=True):
        torch.testing.assert_close(got, TOGETHER[kind](x))


def test_weights_are_gathered_by_the_block():
    """Not all at once: a bucket is about as large as the layers of a block together."""
    small = Small()
    small.finish(*[small.all_gather(small.input(100, 10)) for _ in range(10)])
    merged(small, limit=1)
    assert Counter(small.names())["all_gather_into_tensor"] == math.ceil(10 / 4)


def test_the_next_weights_are_gathered_while_others_are_used():
    small = Small()
    a, b = small.input(2), small.input(2)
    used = small.call(aten.neg.default, small.all_gather(a))
    small.finish(used, small.call(aten.exp.default, small.all_gather(b)))
    passes.prefetch_weights(small.graph)
    passes.sort(small.graph)
    small.graph.lint()
    gather, wait = "all_gather_into_tensor", "wait_tensor"
    assert small.names() == [gather, gather, wait, "neg", wait, "exp"]


def test_groups_are_kept_apart():
    small = Small()
    small.finish(*[small.all_reduce(small.input(4), group) for group in "010101"])
    merged(small, limit=1000)
    assert Counter(small.names())["all_reduce"] == 2


def test_a_sum_that_waits_for_another_is_not_merged_with_it():
    x = torch.randn(4)
    small = Small()
    node = small.input(4)
    first = small.all_reduce(node)
    second = small.all_reduce(small.call(aten.neg.default, first))
    other = small.all_reduce(small.call(aten.exp.default, node))
    small.finish(first, second, other)
    merged(small, limit=1000)
    assert Counter(small.names())["all_reduce"] == 2
    got = small.run(x)
    for a, b in zip(got, (2 * x, -4 * x, 2 * x.exp()), strict=True):
        torch.testing.assert_close(a, b)


def test_waits_come_late():
    small = Small()
    x = small.input(4)
    done = small.all_reduce(x)
    used = small.call(aten.neg.default, done)
    work = small.call(aten.exp.default, small.call(aten.sin.default, x))
    small.finish(used, work)
    passes.sort(small.graph)
    small.graph.lint()
    assert small.names() == ["all_reduce", "sin", "exp", "wait_tensor", "neg"]


def transformer(blocks, width=32, length=16, vocabulary=64):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="tokens")(tokens)
    for i in range(blocks):
        y = layers.LayerNormalization(name=f"first_norm_{i}")(x)
        attention = layers.MultiHeadAttention(4, width // 4, name=f"attention_{i}")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"second_norm_{i}")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(y)
        x = x + layers.Dense(width, name=f"down_{i}")(y)
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model(tokens, layers.Dense(vocabulary, name="logits")(x))


def collectives_and_sizes(blocks):
    """The collectives of a training step, and the bytes of weights that are sharded, and not."""
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    model = transformer(blocks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, metrics=["accuracy"], jit_compile=True)
    x = np.random.default_rng(0).integers(0, 64, (8, 16))
    model.train_on_batch(x, x)
    (entry,) = model.train_function.entries.values()
    sizes = Counter()
    for v in model.trainable_variables:
        is_sharded = any(p.is_shard() for p in getattr(v.value, "placements", ()))
        sizes["sharded" if is_sharded else "whole"] += v.numpy().nbytes
        sizes["embeddings"] += v.numpy().nbytes if "embeddings" in v.path else 0
    return passes.collectives_of(entry.captured.module), sizes


def kinds(nodes):
    return Counter(str(node.target).split(".")[1] for node in nodes)


def _nbytes(node):
    value = node.meta["val"]
    return value.numel() * value.element_size()


@on_ranks(2, 4, timeout=240)
def test_data_parallel_needs_one_collective_for_each_bucket():
    with distribution.DataParallel().scope():
        for blocks in (1, 3):
            nodes, sizes = collectives_and_sizes(blocks)
            assert set(kinds(nodes)) == {"all_reduce"}
            assert len(nodes) <= math.ceil(sizes["whole"] / BUCKET_BYTES) + 1
            moved = sum(_nbytes(node) for node in nodes)
            assert sizes["whole"] <= moved <= sizes["whole"] + 64, "the gradients, and the metrics"


@on_ranks(2, 4, timeout=240)
def test_tensor_parallel_needs_four_sums_for_each_block():
    """Two forward and two backward: what Megatron's scheme needs."""
    columns = {
        ".*(query|key|value)/kernel": (None, "model", None),
        ".*(query|key|value)/bias": ("model", None),
        ".*attention_output/kernel": ("model", None, None),
        ".*up_.*/kernel": (None, "model"),
        ".*up_.*/bias": ("model",),
        ".*down_.*/kernel": ("model", None),
    }
    mesh = distribution.DeviceMesh((1, num_processes()), ("batch", "model"))
    with model_parallel(columns, mesh).scope():
        moved = {}
        for blocks in (1, 3):
            nodes, _ = collectives_and_sizes(blocks)
            assert set(kinds(nodes)) == {"all_reduce"}
            assert len(nodes) <= 4 * blocks + 4
            moved[blocks] = sum(_nbytes(node) for node in nodes)
        activations = 8 * 16 * 32 * 4
        assert moved[3] - moved[1] == 2 * 4 * activations


@on_ranks(2, 4, timeout=240)
def test_weights_sharded_on_the_data_axis():
    """By block: gathered for the forward pass, again for the backward pass, and one scattered sum.

    And not a byte more than that: each weight is gathered twice, each gradient scattered once.
    """
    mesh = distribution.DeviceMesh((num_processes(), 1), ("batch", "model"))
    with model_parallel({".*(kernel|embeddings)": ("batch",)}, mesh).scope():
        for blocks in (2, 6):
            nodes, sizes = collectives_and_sizes(blocks)
            counts = kinds(nodes)
            assert counts["all_gather_into_tensor"] <= 2 * blocks + 2
            assert counts["reduce_scatter_tensor"] <= blocks + 1
            assert counts["all_reduce"] <= 2
            moved = dict.fromkeys(counts, 0)
            for node in nodes:
                whole = max(_nbytes(node), _nbytes(node.args[0]))
                moved[str(node.target).split(".")[1]] += whole
            # The backward pass of an embedding needs no weights.
            assert moved["all_gather_into_tensor"] == 2 * sizes["sharded"] - sizes["embeddings"]
            assert moved["reduce_scatter_tensor"] == sizes["sharded"]
            assert moved["all_reduce"] <= sizes["whole"] + 64


@on_ranks(1, 2)
def test_a_step_never_reads_a_value_on_the_host():
    """SGD asks for its learning rate as a number, for instance."""
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    with distribution.DataParallel().scope():
        for optimizer in ("sgd", keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), "adamw"):
            model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.1), layers.Dense(2)])
            model.compile(optimizer, "mse", jit_compile=True)
            model.train_on_batch(np.ones((8, 4)), np.ones((8, 2)))
            (entry,) = model.train_function.entries.values()
            targets = {str(node.target) for node in entry.captured.module.graph.nodes}
            assert "aten._local_scalar_dense.default" not in targets

"""How many collectives a step has under the layout recipes, and how many bytes they move."""

import os
from collections import Counter

import keras
import numpy as np
from keras import distribution

from bench import on_ranks
from keras_spmd import layouts
from keras_spmd.distribution_lib import num_processes
from keras_spmd.graph import _collectives as passes
from recipe_models import BATCH, LENGTH, WORDS, gpt

WIDTH = 32
ACTIVATIONS = BATCH * LENGTH * WIDTH * 4


def collectives(recipe, blocks, **options):
    """The collectives of a training step by kind: how many, and bytes of whole tensors."""
    os.environ["KERAS_SPMD_COMPILER"] = "none"
    keras.utils.clear_session()
    count = num_processes()
    shape = (count, 1) if recipe in ("fsdp", "zero1") else (1, count)
    mesh = distribution.DeviceMesh(shape, ("batch", "model"))
    layout_map = getattr(layouts, recipe)(lambda: gpt(blocks, WIDTH), mesh, **options)
    with distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope():
        model = gpt(blocks, WIDTH)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-3), loss, metrics=["accuracy"], jit_compile=True)
        x = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH))
        model.train_on_batch(x, x)
        (entry,) = model.train_function.entries.values()
    counts, moved = Counter(), Counter()
    for node in passes.collectives_of(entry.captured.module):
        kind = str(node.target).split(".")[1].removesuffix("_tensor").removesuffix("_into")
        counts[kind] += 1
        moved[kind] += max(_nbytes(node), _nbytes(node.args[0]))
    return counts, moved, model


def _nbytes(node):
    value = node.meta["val"]
    return value.numel() * value.element_size()


@on_ranks(2, timeout=300, exhaustive=(4,))
def test_tensor_parallel_needs_four_sums_for_each_block():
    """And a constant number more, for the vocabulary: what Megatron's scheme needs."""
    few, few_bytes, _ = collectives("tensor_parallel", 1)
    many, many_bytes, _ = collectives("tensor_parallel", 3)
    assert many["all_reduce"] - few["all_reduce"] == 2 * 4
    # The accuracy: each rank's best word of its part, a score and an index.
    assert few["all_gather"] == many["all_gather"] <= 2
    best = BATCH * LENGTH * num_processes() * (4 + 8)
    assert few_bytes["all_gather"] == many_bytes["all_gather"] == best
    assert set(many) == {"all_reduce", "all_gather"}
    assert few["all_reduce"] <= 4 + 8
    assert many_bytes["all_reduce"] - few_bytes["all_reduce"] == 2 * 4 * ACTIVATIONS


@on_ranks(2, timeout=300, exhaustive=(4,))
def test_fsdp_needs_two_gathers_and_a_scattered_sum_for_each_block():
    for blocks in (2, 6):
        counts, moved, model = collectives("fsdp", blocks)
        assert counts["all_gather"] <= 2 * blocks + 2
        assert counts["reduce_scatter"] <= blocks + 1
        assert counts["all_reduce"] <= 2
        sharded = [v for v in model.weights if any(p.is_shard() for p in v.value.placements)]
        size = sum(v.numpy().nbytes for v in sharded)
        assert moved["reduce_scatter"] == size
        assert moved["all_gather"] == 2 * size - model.get_layer("tokens").embeddings.numpy().nbytes


@on_ranks(2, timeout=300, exhaustive=(4,))
def test_zero1_scatters_gradients_and_gathers_weights():
    """Once each, whatever the model's size: as many bytes as data parallelism moves."""
    for blocks in (1, 3):
        counts, moved, model = collectives("zero1", blocks, min_size=2)
        size = sum(v.numpy().nbytes for v in model.trainable_variables)
        assert counts["reduce_scatter"] <= blocks + 1
        assert counts["all_gather"] <= blocks + 1
        assert moved["reduce_scatter"] == moved["all_gather"] == size
        assert moved["all_reduce"] <= 64


@on_ranks(2, timeout=300, exhaustive=(4,))
def test_sequence_parallel_moves_the_bytes_of_tensor_parallel():
    """A sum is a scattered sum and a gather; only gradients of norms are summed besides."""
    few, few_bytes, _ = collectives("sequence_parallel", 1)
    many, many_bytes, _ = collectives("sequence_parallel", 3)
    for kind in ("all_gather", "reduce_scatter"):
        assert many[kind] - few[kind] == 2 * 4
        assert many_bytes[kind] - few_bytes[kind] == 2 * 4 * ACTIVATIONS
    assert many["all_reduce"] == few["all_reduce"]

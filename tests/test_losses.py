"""Every loss of Keras: value and gradient of one device, however its inputs are sharded."""

import inspect
import warnings
from functools import partial

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers, losses
from torch.distributed.tensor.debug import CommDebugMode

import keras_spmd
from bench import on_ranks
from meshes import fully_sharded, grid, model_parallel, whole

ROWS, CLASSES, STEPS = 7, 5, 6
REDUCTIONS = ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight", "none")

_rng = np.random.default_rng(0)
_scores = _rng.normal(size=(ROWS, CLASSES)).astype("float32")
_labels = _rng.integers(0, CLASSES, ROWS)
_softmax = np.exp(_scores) / np.exp(_scores).sum(-1, keepdims=True)
_weights = _rng.uniform(0.2, 2, ROWS).astype("float32")
_mask = np.array([True, True, False, True, False, True, True])

# Labels and predictions, by what a loss wants to see.
ONE_HOT = (np.eye(CLASSES, dtype="float32")[_labels], _softmax)
LOGITS = (ONE_HOT[0], _scores)
SPARSE = (_labels, _softmax)
SPARSE_LOGITS = (_labels, _scores)
REAL = (_rng.uniform(0.1, 2, (ROWS, CLASSES)).astype("float32"), np.abs(_scores) + 0.1)
SIGNS = (np.where(REAL[0] > 1, 1.0, -1.0).astype("float32"), _scores)
EMBEDDED = (_labels % 3, _scores / np.linalg.norm(_scores, axis=-1, keepdims=True))
SEQUENCES = (
    np.array([[1, 2, 0], [3, 3, 4], [1, 0, 0], [2, 1, 3], [4, 0, 0], [1, 3, 0], [2, 2, 2]]),
    _rng.normal(size=(ROWS, STEPS + 2, CLASSES)).astype("float32"),
)
IMAGES = (
    _rng.integers(0, 2, (ROWS, 4, 3)).astype("float32"),
    _rng.uniform(0.05, 0.95, (ROWS, 4, 3)).astype("float32"),
)

# For each class what to make, and its data.
LOSSES = {
    "BinaryCrossentropy": [
        (losses.BinaryCrossentropy, ONE_HOT),
        (partial(losses.BinaryCrossentropy, from_logits=True, label_smoothing=0.1), LOGITS),
    ],
    "BinaryFocalCrossentropy": [
        (losses.BinaryFocalCrossentropy, ONE_HOT),
        (
            partial(losses.BinaryFocalCrossentropy, from_logits=True, apply_class_balancing=True),
            LOGITS,
        ),
    ],
    "CTC": [(losses.CTC, SEQUENCES)],
    "CategoricalCrossentropy": [
        (losses.CategoricalCrossentropy, ONE_HOT),
        (partial(losses.CategoricalCrossentropy, from_logits=True, label_smoothing=0.1), LOGITS),
    ],
    "CategoricalFocalCrossentropy": [
        (losses.CategoricalFocalCrossentropy, ONE_HOT),
        (partial(losses.CategoricalFocalCrossentropy, from_logits=True), LOGITS),
    ],
    "CategoricalGeneralizedCrossEntropy": [(losses.CategoricalGeneralizedCrossEntropy, SPARSE)],
    "CategoricalHinge": [(losses.CategoricalHinge, ONE_HOT)],
    "Circle": [(losses.Circle, EMBEDDED)],
    "CosineSimilarity": [
        (losses.CosineSimilarity, REAL),
        (partial(losses.CosineSimilarity, axis=0), REAL),
    ],
    "Dice": [(losses.Dice, IMAGES), (partial(losses.Dice, axis=(1, 2)), IMAGES)],
    "Hinge": [(losses.Hinge, SIGNS)],
    "Huber": [(partial(losses.Huber, delta=0.5), REAL)],
    "KLDivergence": [(losses.KLDivergence, REAL)],
    "LogCosh": [(losses.LogCosh, REAL)],
    "MeanAbsoluteError": [(losses.MeanAbsoluteError, REAL)],
    "MeanAbsolutePercentageError": [(losses.MeanAbsolutePercentageError, REAL)],
    "MeanSquaredError": [(losses.MeanSquaredError, REAL), (losses.MeanSquaredError, IMAGES)],
    "MeanSquaredLogarithmicError": [(losses.MeanSquaredLogarithmicError, REAL)],
    "Poisson": [(losses.Poisson, REAL)],
    "SparseCategoricalCrossentropy": [
        (losses.SparseCategoricalCrossentropy, SPARSE),
        (partial(losses.SparseCategoricalCrossentropy, from_logits=True), SPARSE_LOGITS),
        (
            partial(losses.SparseCategoricalCrossentropy, from_logits=True, ignore_class=1),
            SPARSE_LOGITS,
        ),
    ],
    "SquaredHinge": [(losses.SquaredHinge, SIGNS)],
    "Tversky": [(losses.Tversky, IMAGES), (partial(losses.Tversky, axis=(1, 2)), IMAGES)],
}


def test_every_loss_is_here():
    exported = {
        name
        for name, value in vars(losses).items()
        if inspect.isclass(value) and issubclass(value, losses.Loss)
    }
    assert exported - {"Loss"} <= LOSSES.keys()


def placed(array, axes):
    """An array over the mesh: the axes for its first dim and its last, or None for a plain one."""
    tensor = torch.tensor(array)
    if axes is None:
        return tensor
    first, last = axes
    layout = [first, *[None] * (array.ndim - 2), last][: array.ndim]
    return distribution.distribute_tensor(tensor, distribution.TensorLayout(layout, grid()))


# Axes of the labels and of the predictions.
PLACEMENTS = [
    (("batch", None), ("batch", None)),
    (("batch", None), ("batch", "model")),
    (None, ("batch", "model")),
    (("batch", "model"), ("model", None)),
    ((None, "model"), (None, "model")),
]


def value_and_gradient(make, data, reduction, weight, mask, axes=(None, None)):
    y_true = placed(data[0], axes[0])
    y_pred = placed(data[1], axes[1]).detach().requires_grad_()
    rows = axes[0] and (axes[0][0], None)
    if mask is not None:
        y_pred._keras_mask = placed(mask, rows)
    weight = None if weight is None else placed(weight, rows)
    loss = make(reduction=reduction)(y_true, y_pred, sample_weight=weight)
    # With no reduction every row counts by itself.
    ramp = torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)
    (loss * ramp).sum().backward()
    return whole(loss), whole(y_pred.grad)


def lengths_of(batch):
    return torch.full((batch,), STEPS), torch.tensor([3, 3, 1, 3, 1, 2, 3])[:batch]


@on_ranks(2, 4)
def test_the_alignments_of_a_sharded_batch_stay_where_they_are():
    """With lengths as tensors and as lists; the longest target is on one rank only."""
    lengths = {"tensors": lengths_of, "lists": lambda n: [x.tolist() for x in lengths_of(n)]}
    targets = torch.tensor(SEQUENCES[0])

    def run(scores, targets, make_lengths):
        loss = torch.nn.functional.ctc_loss(
            scores.log_softmax(-1), targets, *make_lengths(ROWS), reduction="none"
        )
        (loss * torch.linspace(0.5, 1.5, ROWS)).sum().backward()
        return whole(loss), whole(scores.grad)

    for make_lengths in lengths.values():
        scores = torch.tensor(SEQUENCES[1]).transpose(0, 1).contiguous()
        expected = run(scores.clone().requires_grad_(), targets, make_lengths)
        with distribution.DataParallel().scope():
            rows = keras_spmd.distribute_batch((SEQUENCES[1], SEQUENCES[0]))
            sharded = rows[0].transpose(0, 1).detach().requires_grad_()
            with CommDebugMode() as communication:
                torch.nn.functional.ctc_loss(
                    sharded.log_softmax(-1), rows[1], *make_lengths(ROWS), reduction="none"
                )
            assert communication.get_total_counts() == 0
            got = run(sharded, rows[1], make_lengths)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(2, 4)
def test_a_sharded_vocabulary_is_never_gathered(dtype):
    """Softmax and cross-entropy of scores whose classes are sharded, also unevenly."""
    rng = np.random.default_rng(5)
    classes, dtype = 11, getattr(torch, dtype)
    for shape in ((6, classes), (4, classes, 3)):
        scores = torch.tensor(rng.normal(size=shape), dtype=dtype) * 4
        target = torch.tensor(rng.integers(0, classes, (shape[0], *shape[2:])))
        target[0] = -100
        weight = torch.tensor(rng.uniform(0.5, 1.5, classes), dtype=dtype)

        def run(x, reduction, weight, target=target):
            loss = torch.nn.functional.cross_entropy(x, target, weight, reduction=reduction)
            probabilities = x.softmax(1)
            (loss.sum() + (probabilities * probabilities).sum()).backward()
            return loss, probabilities, x.grad

        for reduction in ("none", "mean", "sum"):
            for w in (None, weight):
                expected = run(scores.clone().requires_grad_(), reduction, w)
                with model_parallel({}, grid()).scope():
                    sharded = fully_sharded(scores, 1).detach().requires_grad_()
                    with CommDebugMode() as communication:
                        got = run(sharded, reduction, w)
                counts = communication.get_comm_counts()
                assert {str(op).split(".")[-1] for op in counts} == {"all_reduce"}
                for a, b in zip(got, expected, strict=True):
                    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                    torch.testing.assert_close(
                        a.full_tensor(), b, rtol=tolerance, atol=tolerance / 10
                    )


@pytest.mark.parametrize("from_logits", [True, False])
@on_ranks(1, 2, 4)
def test_classes_of_sequences_stay_where_they_are(from_logits):
    """Also for a batch that doesn't divide evenly, and for classes that are not last."""
    rng = np.random.default_rng(6)
    loss = partial(keras.ops.sparse_categorical_crossentropy, from_logits=from_logits)
    for rows in (8, 7):
        scores = rng.uniform(0.1, 1.0, size=(rows, 3, 5)).astype("float32")
        target = rng.integers(0, 5, (rows, 3))
        for axis in (-1, 1):
            given = np.moveaxis(scores, -1, axis)
            expected = whole(loss(torch.tensor(target), torch.tensor(given), axis=axis))
            with distribution.DataParallel().scope():
                y, x = keras_spmd.distribute_batch((target, given))
                got = loss(y, x, axis=axis)
                assert tuple(got.shape) == (rows, 3)
                np.testing.assert_allclose(whole(got), expected, 1e-5, 1e-6)


def cases(make, data):
    """Every reduction with and without weights and a mask, each with other placements."""
    whole_loss = make(reduction="none")(torch.tensor(data[0]), torch.tensor(data[1]))
    has_rows = tuple(whole_loss.shape) == (ROWS,)
    for i, reduction in enumerate(REDUCTIONS):
        for j, weight in enumerate((None, _weights) if has_rows else (None,)):
            for k, mask in enumerate((None, _mask) if has_rows else (None,)):
                yield (reduction, weight, mask), PLACEMENTS[(i + 2 * j + k) % len(PLACEMENTS)]


@on_ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses(name):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    for number, (make, data) in enumerate(LOSSES[name]):
        for (reduction, weight, mask), axes in cases(make, data):
            label = f"{name} {number} {reduction} {weight is None} {mask is None} {axes}"
            expected = value_and_gradient(make, data, reduction, weight, mask)
            with model_parallel({}, grid()).scope():
                got = value_and_gradient(make, data, reduction, weight, mask, axes)
            np.testing.assert_allclose(got[0], expected[0], 1e-5, 1e-6, err_msg=label)
            np.testing.assert_allclose(got[1], expected[1], 1e-5, 1e-6, err_msg=label)


def train(make_model, x, y, make_loss, **options):
    keras.utils.set_random_seed(3)
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), make_loss(), weighted_metrics=["accuracy"])
    history = model.fit(x, y, batch_size=5, epochs=2, verbose=0, **options)
    return history.history, [v.numpy() for v in model.variables]


def reader():
    """Tokens, where 0 is padding that the loss leaves out."""
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            layers.Embedding(9, 8, mask_zero=True),
            layers.LSTM(8, return_sequences=True),
            layers.Dense(CLASSES),
        ]
    )


def masker():
    return keras.Sequential(
        [
            keras.Input((STEPS, 3)),
            layers.Masking(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(CLASSES),
        ]
    )


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["reader", "masker"])
def test_masks_of_layers_reach_the_loss(name):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    tokens = np.random.default_rng(5).integers(1, 9, (ROWS, STEPS))
    for row in range(ROWS):
        tokens[row, 2 + row % 4 :] = 0
    features = (tokens[..., None] * np.array([0.1, -0.2, 0.3])).astype("float32")
    make_model, x = {"reader": (reader, tokens), "masker": (masker, features)}[name]
    make_loss = partial(losses.SparseCategoricalCrossentropy, from_logits=True)

    y, weights = (tokens * 3) % CLASSES, np.repeat(_weights[:, None], STEPS, 1)

    def run():
        return train(make_model, x, y, make_loss, sample_weight=weights)

    expected = run()
    columns = {".*kernel": (None, "model"), ".*embeddings": ("model", None)}
    for dist in (distribution.DataParallel(), model_parallel(columns, grid())):
        with dist.scope():
            got = run()
        for key, values in expected[0].items():
            np.testing.assert_allclose(got[0][key], values, 1e-5, 1e-6, err_msg=key)
        for a, b in zip(got[1], expected[1], strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-5)

"""Every metric of Keras: the result of one device, on every rank, whatever the mesh."""

import inspect
import warnings

import keras
import numpy as np
import pytest
from keras import distribution, layers, metrics

import keras_spmd
from bench import on_ranks
from meshes import grid, model_parallel

ROWS, CLASSES = 11, 5
# An uneven batch, one that some ranks have no row of, and one of a single row.
BATCHES = (slice(0, 7), slice(7, 10), slice(10, 11))

_rng = np.random.default_rng(0)
_scores = _rng.normal(size=(ROWS, CLASSES)).astype("float32")
_labels = _rng.integers(0, CLASSES, ROWS)
_weights = _rng.uniform(0.2, 2, ROWS).astype("float32")
_softmax = np.exp(_scores) / np.exp(_scores).sum(-1, keepdims=True)

# Labels and predictions, by what a metric wants to see.
BINARY = (_rng.integers(0, 2, (ROWS, 1)), _rng.uniform(0.01, 0.99, (ROWS, 1)).astype("float32"))
ONE_HOT = (np.eye(CLASSES, dtype="float32")[_labels], _softmax)
SPARSE = (_labels, _softmax)
SPARSE_LOGITS = (_labels, _scores)
LABELS = (_labels, _rng.integers(0, CLASSES, ROWS))
REAL = (_rng.uniform(0.1, 2, (ROWS, CLASSES)).astype("float32"), np.abs(_scores) + 0.1)
LOGITS = (ONE_HOT[0], _scores)
SIGNS = (np.where(REAL[0] > 1, 1.0, -1.0).astype("float32"), _scores)

# For each class what to make, and its data.
METRICS = {
    "AUC": [
        (lambda: metrics.AUC(num_thresholds=20), BINARY),
        (lambda: metrics.AUC(num_thresholds=20, curve="PR", summation_method="majoring"), BINARY),
        (lambda: metrics.AUC(20, multi_label=True, num_labels=CLASSES), ONE_HOT),
        (lambda: metrics.AUC(20, multi_label=True, num_labels=CLASSES, from_logits=True), LOGITS),
    ],
    "Accuracy": [(metrics.Accuracy, LABELS)],
    "BinaryAccuracy": [(lambda: metrics.BinaryAccuracy(threshold=0.4), BINARY)],
    "BinaryCrossentropy": [
        (metrics.BinaryCrossentropy, BINARY),
        (lambda: metrics.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), BINARY),
    ],
    "BinaryIoU": [(lambda: metrics.BinaryIoU([0, 1], threshold=0.3, dtype="float32"), BINARY)],
    "CategoricalAccuracy": [(metrics.CategoricalAccuracy, ONE_HOT)],
    "CategoricalCrossentropy": [
        (metrics.CategoricalCrossentropy, ONE_HOT),
        (lambda: metrics.CategoricalCrossentropy(from_logits=True), ONE_HOT),
    ],
    "CategoricalHinge": [(metrics.CategoricalHinge, ONE_HOT)],
    "ConcordanceCorrelation": [(metrics.ConcordanceCorrelation, REAL)],
    "CosineSimilarity": [(metrics.CosineSimilarity, REAL)],
    "F1Score": [
        (metrics.F1Score, ONE_HOT),
        (lambda: metrics.F1Score(average="weighted", threshold=0.3), ONE_HOT),
    ],
    "FBetaScore": [(lambda: metrics.FBetaScore(average="micro", beta=2.0), ONE_HOT)],
    "FalseNegatives": [(lambda: metrics.FalseNegatives(thresholds=[0.2, 0.7]), BINARY)],
    "FalsePositives": [(metrics.FalsePositives, BINARY)],
    "Hinge": [(metrics.Hinge, SIGNS)],
    "IoU": [
        (lambda: metrics.IoU(CLASSES, [0, 3], dtype="float32"), LABELS),
        (
            lambda: metrics.IoU(CLASSES, [1], ignore_class=2, sparse_y_pred=False, dtype="float32"),
            SPARSE,
        ),
    ],
    "KLDivergence": [(metrics.KLDivergence, REAL)],
    "LogCoshError": [(metrics.LogCoshError, REAL)],
    "Mean": [(metrics.Mean, (REAL[0],))],
    "MeanAbsoluteError": [(metrics.MeanAbsoluteError, REAL)],
    "MeanAbsolutePercentageError": [(metrics.MeanAbsolutePercentageError, REAL)],
    "MeanIoU": [(lambda: metrics.MeanIoU(CLASSES, dtype="float32"), LABELS)],
    "MeanMetricWrapper": [
        (lambda: metrics.MeanMetricWrapper(keras.losses.mean_squared_error), REAL)
    ],
    "MeanSquaredError": [(metrics.MeanSquaredError, REAL)],
    "MeanSquaredLogarithmicError": [(metrics.MeanSquaredLogarithmicError, REAL)],
    "OneHotIoU": [(lambda: metrics.OneHotIoU(CLASSES, [0, 2], dtype="float32"), ONE_HOT)],
    "OneHotMeanIoU": [(lambda: metrics.OneHotMeanIoU(CLASSES, dtype="float32"), ONE_HOT)],
    "PearsonCorrelation": [(metrics.PearsonCorrelation, REAL)],
    "Poisson": [(metrics.Poisson, REAL)],
    "Precision": [
        (lambda: metrics.Precision(thresholds=[0.3, 0.6]), BINARY),
        (lambda: metrics.Precision(top_k=2, class_id=1), ONE_HOT),
    ],
    "PrecisionAtRecall": [(lambda: metrics.PrecisionAtRecall(0.5, num_thresholds=20), BINARY)],
    "R2Score": [
        (metrics.R2Score, REAL),
        (lambda: metrics.R2Score(class_aggregation=None, num_regressors=2), REAL),
    ],
    "Recall": [(metrics.Recall, BINARY), (lambda: metrics.Recall(top_k=2), ONE_HOT)],
    "RecallAtPrecision": [(lambda: metrics.RecallAtPrecision(0.5, num_thresholds=20), BINARY)],
    "RootMeanSquaredError": [(metrics.RootMeanSquaredError, REAL)],
    "SensitivityAtSpecificity": [(lambda: metrics.SensitivityAtSpecificity(0.5, 20), BINARY)],
    "SparseCategoricalAccuracy": [(metrics.SparseCategoricalAccuracy, SPARSE)],
    "SparseCategoricalCrossentropy": [
        (metrics.SparseCategoricalCrossentropy, SPARSE),
        (lambda: metrics.SparseCategoricalCrossentropy(from_logits=True), SPARSE_LOGITS),
    ],
    "SparseTopKCategoricalAccuracy": [(lambda: metrics.SparseTopKCategoricalAccuracy(2), SPARSE)],
    "SpecificityAtSensitivity": [(lambda: metrics.SpecificityAtSensitivity(0.5, 20), BINARY)],
    "SquaredHinge": [(metrics.SquaredHinge, SIGNS)],
    "Sum": [(metrics.Sum, (REAL[0],))],
    "TopKCategoricalAccuracy": [(lambda: metrics.TopKCategoricalAccuracy(2), ONE_HOT)],
    "TrueNegatives": [(metrics.TrueNegatives, BINARY)],
    "TruePositives": [(lambda: metrics.TruePositives(thresholds=[0.2, 0.7]), BINARY)],
}


def test_every_metric_is_here():
    exported = {
        name
        for name, value in vars(metrics).items()
        if inspect.isclass(value) and issubclass(value, metrics.Metric)
    }
    assert exported - {"Metric"} <= METRICS.keys()


def meshes():
    yield "data parallel", distribution.DataParallel()
    yield "grid", model_parallel({}, grid())


def results(make, data, weighted, lay_out):
    """The result after each batch, and of one batch after a reset."""
    metric, found = make(), []
    for rows in BATCHES:
        arguments = lay_out([x[rows] for x in data])
        weight = lay_out([_weights[rows]])[0] if weighted else None
        metric.update_state(*arguments, sample_weight=weight)
        found.append(metric.result())
    metric.reset_state()
    metric.update_state(*lay_out([x[BATCHES[0]] for x in data]))
    return [*found, metric.result()], [v.numpy() for v in metric.variables]


def assert_equal_results(got, expected, label):
    for a, b in zip(got[0], expected[0], strict=True):
        a_host, b_host = np.asarray(a), b.detach().cpu().numpy()
        np.testing.assert_allclose(a_host, b_host, 1e-5, 1e-6, err_msg=label)
        if b_host.ndim == 0:
            assert float(a) == a_host
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), a_host)
    for a, b in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=label)


def by_classes(arrays):
    """Batches whose last dim is sharded too, as the outputs of a sharded layer are."""
    axes = ["batch", "model"]
    return [
        distribution.distribute_tensor(
            keras.ops.convert_to_tensor(x), distribution.TensorLayout(axes[: x.ndim], grid())
        )
        for x in arrays
    ]


@on_ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("name", sorted(METRICS))
def test_metrics(name):
    # Flattening unevenly sharded rows moves them to other ranks.
    warnings.filterwarnings("ignore", message="The op aten.(_unsafe_)?view")
    for number, (make, data) in enumerate(METRICS[name]):
        for weighted in (False, True):
            expected = results(make, data, weighted, lambda x: x)
            for label, dist in meshes():
                with dist.scope():
                    got = results(make, data, weighted, keras_spmd.distribute_batch)
                    assert_equal_results(got, expected, f"{name} {number} {label}")
            with model_parallel({}, grid()).scope():
                got = results(make, data, weighted, by_classes)
                assert_equal_results(got, expected, f"{name} {number} by classes")


def classifier_metrics():
    return [
        "accuracy",
        metrics.SparseTopKCategoricalAccuracy(2, name="top"),
        metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy"),
        metrics.MeanIoU(CLASSES, sparse_y_pred=False, dtype="float32", name="iou"),
    ]


def one_hot_metrics():
    return [
        "accuracy",
        metrics.CategoricalCrossentropy(from_logits=True, name="entropy"),
        metrics.AUC(20, multi_label=True, num_labels=CLASSES, from_logits=True, name="auc"),
        metrics.Precision(thresholds=0.2, name="precision"),
        metrics.Recall(class_id=1, name="recall"),
        metrics.F1Score("macro", name="f1"),
        metrics.TopKCategoricalAccuracy(2, name="top"),
        metrics.OneHotIoU(CLASSES, [0, 2], dtype="float32", name="iou"),
        metrics.TruePositives(name="positives"),
        metrics.SensitivityAtSpecificity(0.5, 20, name="sensitivity"),
    ]


def regression_metrics():
    return [
        *["mse", "mae", "mape", "msle", "poisson", "cosine_similarity", "kl_divergence"],
        metrics.RootMeanSquaredError(name="rmse"),
        metrics.LogCoshError(name="logcosh"),
        metrics.R2Score(name="r2"),
        metrics.PearsonCorrelation(name="pearson"),
        metrics.Hinge(name="hinge"),
    ]


TASKS = {
    "labels": (
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        classifier_metrics,
        _labels,
    ),
    "one-hot": (
        lambda: keras.losses.CategoricalCrossentropy(from_logits=True),
        one_hot_metrics,
        ONE_HOT[0],
    ),
    "regression": (lambda: "mse", regression_metrics, REAL[0]),
}


def train(task):
    make_loss, make_metrics, y = TASKS[task]
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((CLASSES,)), layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        make_loss(),
        metrics=make_metrics(),
        weighted_metrics=make_metrics(),
    )
    history = model.fit(
        _scores,
        y,
        sample_weight=_weights,
        batch_size=6,
        verbose=0,
        validation_data=(_scores[:6], y[:6], _weights[:6]),
    )
    scores = model.evaluate(_scores, y, batch_size=6, verbose=0, return_dict=True)
    return {**history.history, **{f"final {name}": [value] for name, value in scores.items()}}


@on_ranks(2, exhaustive=(1, 4))
@pytest.mark.parametrize("task", sorted(TASKS))
def test_metrics_of_fit_and_evaluate(task):
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    expected = train(task)
    columns = {".*kernel": (None, "model"), ".*bias": ("model",)}
    for label, dist in (
        ("data parallel", distribution.DataParallel()),
        ("columns", model_parallel(columns, grid())),
    ):
        with dist.scope():
            got = train(task)
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            assert all(type(value) is float for value in got[name]), name
            np.testing.assert_allclose(
                got[name], values, 1e-5, 2e-6, err_msg=f"{task} {label} {name}"
            )

"""How each function of `keras.ops` is called by the audit.

An input is written as its kind and its shape: `f4,5` is an array of floats of shape (4, 5). Sizes
are even and odd, so that every case is sharded evenly on one dim and unevenly on another.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from keras import ops
from keras.src.backend.torch.core import get_device

KINDS: dict[str, Callable[[np.random.Generator, tuple], np.ndarray]] = {
    "f": lambda rng, shape: rng.normal(size=shape).astype("float32"),
    "p": lambda rng, shape: rng.uniform(0.2, 2.0, shape).astype("float32"),
    "u": lambda rng, shape: rng.uniform(0.05, 0.95, shape).astype("float32"),
    "g": lambda rng, shape: rng.uniform(1.1, 3.0, shape).astype("float32"),
    "n": lambda rng, shape: np.where(
        rng.random(shape) < 0.2, np.nan, rng.normal(size=shape)
    ).astype("float32"),
    "i": lambda rng, shape: rng.integers(0, 4, shape).astype("int32"),
    "l": lambda rng, shape: rng.integers(1, 5, shape).astype("int32"),
    "b": lambda rng, shape: rng.random(shape) < 0.5,
    "c": lambda rng, shape: (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(
        "complex64"
    ),
    "o": lambda rng, shape: np.eye(shape[-1], dtype="float32")[
        rng.integers(0, shape[-1], shape[:-1])
    ],
    # Symmetric and positive definite.
    "s": lambda rng, shape: _positive_definite(rng, shape),
    # Sorted along the last dim.
    "a": lambda rng, shape: np.sort(rng.normal(size=shape)).astype("float32"),
    # A distribution along the last dim.
    "d": lambda rng, shape: _normalized(rng.uniform(0.1, 1.0, shape)).astype("float32"),
}


def _positive_definite(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    x = rng.normal(size=shape)
    return (x @ np.swapaxes(x, -1, -2) + 3 * np.eye(shape[-1])).astype("float32")


def _normalized(x: np.ndarray) -> np.ndarray:
    return x / x.sum(-1, keepdims=True)


class Case(NamedTuple):
    """One call: a function of tensors, or of a layer and tensors, and what they are."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[str, ...]
    has_gradient: bool = True
    make: Callable[[], Any] | None = None
    dtype: str = "float32"

    def tensors(self) -> list[torch.Tensor]:
        """Its inputs; what would be floats has the dtype of the case."""
        rng = np.random.default_rng(len(self.name))
        arrays = [
            KINDS[text[0]](rng, tuple(int(size) for size in text[1:].split(",") if size))
            for text in self.inputs
        ]
        return [self._with_dtype(torch.tensor(array, device=get_device())) for array in arrays]

    def _with_dtype(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        if self.dtype == "int32":
            x = (x * 3).nan_to_num().round()
        if self.dtype == "rounded":
            return x.bfloat16().float()
        return x.to(getattr(torch, self.dtype))

    def of(self, dtype: str) -> "Case":
        """The same with inputs of another dtype; a layer computes with it."""
        return self._replace(dtype=dtype)


def first_of_each(cases: list[Case]) -> list[Case]:
    return list({case.name: case for case in reversed(cases)}.values())[::-1]


CASES: list[Case] = []
# What takes no tensor, or gives no number that a layout could change.
WITHOUT_TENSORS = [
    "arange",
    "bartlett",
    "blackman",
    "empty",
    "empty_like",
    "eye",
    "full",
    "geomspace",
    "hamming",
    "hanning",
    "identity",
    "kaiser",
    "linspace",
    "logspace",
    "ones",
    "tri",
    "zeros",
    "array",
    "convert_to_tensor",
    "convert_to_numpy",
    "dtype",
    "is_tensor",
    "ndim",
    "shape",
    "size",
    "custom_gradient",
    "jvp",
]


def names(text: str) -> list[str]:
    return text.split()


def case(name: str, *inputs: str, has_gradient: bool = True, **options: Any) -> None:
    function = operator.attrgetter(name)(ops)
    CASES.append(Case(name, lambda *x: function(*x, **options), inputs, has_gradient))


def call(name: str, function: Callable, *inputs: str, has_gradient: bool = True) -> None:
    CASES.append(Case(name, function, inputs, has_gradient))


for _name in [
    "abs",
    "absolute",
    "angle",
    "arctan",
    "arcsinh",
    "cbrt",
    "ceil",
    "celu",
    "conj",
    "conjugate",
    "copy",
    "cos",
    "cosh",
    "deg2rad",
    "elu",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "fabs",
    "floor",
    "gelu",
    "glu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "i0",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "isreal",
    "leaky_relu",
    "log_sigmoid",
    "logical_not",
    "nan_to_num",
    "negative",
    "ones_like",
    "rad2deg",
    "real",
    "relu",
    "relu6",
    "round",
    "selu",
    "sigmoid",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sinh",
    "soft_shrink",
    "softplus",
    "softsign",
    "sparse_plus",
    "sparse_sigmoid",
    "square",
    "squareplus",
    "stop_gradient",
    "swish",
    "tan",
    "tanh",
    "tanh_shrink",
    "trunc",
    "zeros_like",
]:
    case(_name, "f4,6")
for _name in ["log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sinc", "sqrt"]:
    case(_name, "p4,5")
for _name in ["arccos", "arcsin", "arctanh", "erfinv"]:
    case(_name, "u4,5")
case("arccosh", "g4,5")
case("imag", "c4,5", has_gradient=False)
case("threshold", "f4,5", threshold=0.1, default_value=0.0)
case("clip", "f4,5", x_min=-0.5, x_max=0.5)
case("cast", "f4,5", dtype="float16")
case("cast", "f4,5", dtype="int32")
case("saturate_cast", "f4,5", dtype="int8")
case("view", "f4,6", dtype="int32", has_gradient=False)
case("view_as_complex", "f4,5,2", has_gradient=False)
case("view_as_real", "c4,5", has_gradient=False)
for _name in ["bitwise_invert", "bitwise_not"]:
    case(_name, "i4,5")

for _name in [
    "add",
    "subtract",
    "multiply",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "arctan2",
    "logaddexp",
    "logaddexp2",
    "hypot",
    "equal",
    "not_equal",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "nextafter",
    "heaviside",
    "isclose",
    "allclose",
]:
    case(_name, "f4,5", "f4,5")
    case(_name, "f4,5", "f5")
for _name in ["divide", "true_divide", "divide_no_nan", "floor_divide", "fmod", "mod", "power"]:
    case(_name, "p4,5", "p4,5")
    case(_name, "p4,1", "p1,5")
for _name in ["logical_and", "logical_or", "logical_xor"]:
    case(_name, "b4,5", "b4,5")
for _name in [
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "left_shift",
    "right_shift",
]:
    case(_name, "i4,5", "i4,5")
for _name in ["gcd", "lcm"]:
    case(_name, "l4,5", "l4,5")
case("ldexp", "f4,5", "i4,5")
case("polar", "p4,5", "f4,5", has_gradient=False)

for _name in [
    "all",
    "any",
    "amax",
    "amin",
    "max",
    "min",
    "mean",
    "prod",
    "sum",
    "std",
    "var",
    "ptp",
    "median",
    "logsumexp",
    "count_nonzero",
    "argmax",
    "argmin",
    "nanargmax",
    "nanargmin",
]:
    case(_name, "f4,5")
    case(_name, "f4,5", axis=0)
    case(_name, "f4,5", axis=1)
for _name in names("""nanmax nanmin nanmean nanmedian nanprod nanstd nansum nanvar"""):
    case(_name, "n4,5", has_gradient=False)
    case(_name, "n4,5", axis=0, has_gradient=False)
    case(_name, "n4,5", axis=1, has_gradient=False)
for _name in ["nancumsum", "nancumprod"]:
    case(_name, "n4,5", axis=0, has_gradient=False)
    case(_name, "n4,5", axis=1, has_gradient=False)
for _name in ["cumsum", "cumprod"]:
    case(_name, "f4,5", axis=0)
    case(_name, "f4,5", axis=1)
    case(_name, "f4,5")
for _name, _q in (("quantile", 0.3), ("percentile", 30.0)):
    for _axis in (None, 0, 1):
        case(_name, "f4,5", q=_q, axis=_axis)
        case(f"nan{_name}", "n4,5", q=_q, axis=_axis, has_gradient=False)
case("average", "f4,5", axis=0)
call("average", lambda x, w: ops.average(x, axis=1, weights=w), "f4,5", "p4,5")
for _axes in ([0], [1], [0, 1]):
    case("moments", "f4,5", axes=_axes)
for _ord in (None, 1, 2, np.inf):
    case("norm", "f4,5", ord=_ord, axis=1)
    case("norm", "f4,5", ord=_ord, axis=0)
case("norm", "f4,5")
case("normalize", "f4,5", axis=-1)
case("normalize", "f4,5", axis=0)
case("trapezoid", "f4,5", axis=0)
case("trapezoid", "f4,5", axis=1)
case("diff", "f4,5", axis=0)
case("diff", "f4,5", axis=1)
call("logdet", ops.logdet, "s3,4,4")
case("softmax", "f4,5")
case("softmax", "f4,5", axis=0)
case("log_softmax", "f4,5")
case("log_softmax", "f4,5", axis=0)
case("sparsemax", "f4,5")
case("corrcoef", "f4,5")
case("psnr", "u4,5", "u4,5", max_val=1.0)

case("sort", "f4,5", axis=0)
case("sort", "f4,5", axis=1)
case("argsort", "f4,5", axis=0)
case("argsort", "f4,5", axis=1)
call("argpartition", lambda x: ops.sort(ops.argpartition(x, 2, axis=-1)[..., :2]), "f4,5")
case("top_k", "f4,5", k=2)
call("in_top_k", lambda t, p: ops.in_top_k(t, p, k=2), "i5", "f5,4")
case("searchsorted", "a6", "f5", has_gradient=False)
call("digitize", lambda x: ops.digitize(x, np.array([-1.0, 0.0, 1.0], "float32")), "f4,5")
case("unique", "i4,5", has_gradient=False)
case("nonzero", "i4,5", has_gradient=False)
case("isin", "i4,5", "i3")
case("bincount", "i6", minlength=5)
call("bincount", lambda x, w: ops.bincount(x, weights=w, minlength=5), "i6", "f6")
case("histogram", "f6", bins=4, range=(-2.0, 2.0), has_gradient=False)
case("unravel_index", "i6", shape=(2, 3))

case("append", "f4,5", "f4,5", axis=0)
case("append", "f4,5", "f4,5", axis=1)
case("append", "f4,5", "f4,5")
for _axis in (0, 1):
    call("concatenate", lambda a, b, axis=_axis: ops.concatenate([a, b], axis), "f4,5", "f4,5")
    call("stack", lambda a, b, axis=_axis: ops.stack([a, b], axis), "f4,5", "f4,5")
    case("array_split", "f4,5", indices_or_sections=3, axis=_axis)
    case("expand_dims", "f4,5", axis=_axis)
    case("flip", "f4,5", axis=_axis)
    case("repeat", "f4,5", repeats=2, axis=_axis)
    case("roll", "f4,5", shift=2, axis=_axis)
    case("unstack", "f4,5", axis=_axis)
    case("split", "f4,6", indices_or_sections=2, axis=_axis)
    call("take", lambda x, axis=_axis: ops.take(x, [0, 3, 1], axis=axis), "f4,5")
    call("take", lambda x, i, axis=_axis: ops.take(x, i, axis=axis), "f4,5", "i6")
    call("take_along_axis", lambda x, i, a=_axis: ops.take_along_axis(x, i, a), "f4,5", "i4,5")
case("split", "f4,6", indices_or_sections=[1, 2], axis=1)
for _name in ["dstack", "hstack", "vstack"]:
    call(_name, lambda a, b, name=_name: getattr(ops, name)([a, b]), "f4,6", "f4,6")
case("hsplit", "f4,6", indices_or_sections=2)
case("vsplit", "f4,6", indices_or_sections=2)
case("dsplit", "f3,4,6", indices_or_sections=2)
case("broadcast_to", "f4,1", shape=(3, 4, 5))
case("broadcast_to", "f5", shape=(4, 5))
for _name in [
    "fliplr",
    "flipud",
    "ravel",
    "transpose",
    "tril",
    "triu",
    "diag",
    "diagonal",
    "trace",
    "rot90",
]:
    case(_name, "f4,6")
case("diag", "f6")
case("diagflat", "f6")
case("diagonal", "f3,4,5", axis1=1, axis2=2)
case("trace", "f3,4,5", axis1=1, axis2=2)
case("tril", "f3,4,5", k=1)
case("full_like", "f4,5", fill_value=2.0)
case("get_item", "f4,5", key=2)
case("get_item", "f4,5", key=(slice(None), 3))
case("get_item", "f4,6", key=(slice(1, 4, 2), slice(None, 3)))
case("get_item", "f4,5", key=(..., None, slice(2, None)))
call("get_item", lambda x, i: x[i], "f4,5", "i3")
call("get_item", lambda x, m: x[m], "f4,5", "b4,5")
call("meshgrid", lambda a, b: ops.meshgrid(a, b), "f4", "f5")
case("moveaxis", "f3,4,5", source=0, destination=2)
case("swapaxes", "f3,4,5", axis1=0, axis2=2)
case("transpose", "f3,4,5", axes=(1, 2, 0))
case("pad", "f4,5", pad_width=((1, 2), (0, 1)))
case("pad", "f4,5", pad_width=((1, 1), (2, 2)), mode="reflect")
case("pad", "f4,5", pad_width=((1, 1), (2, 2)), mode="symmetric")
case("pad", "f4,5", pad_width=((1, 1), (0, 0)), mode="constant", constant_values=2.0)
case("repeat", "f4,5", repeats=2)
case("reshape", "f4,6", newshape=(24,))
case("reshape", "f4,6", newshape=(2, 2, 6))
case("reshape", "f4,6", newshape=(8, 3))
case("reshape", "f4,6", newshape=(6, 4))
case("roll", "f4,5", shift=3)
call("rearrange", lambda x: ops.rearrange(x, "a (b c) -> b a c", b=2), "f4,6")
case("squeeze", "f4,1,5")
case("tile", "f4,5", repeats=(2, 3))
case("slice", "f4,5", start_indices=(1, 2), shape=(2, 3))
call("slice_update", lambda x, u: ops.slice_update(x, (1, 2), u), "f4,5", "f2,3")
call("scatter", lambda i, v: ops.scatter(i, v, (4, 5)), "i6,1", "f6,5")
call("scatter_update", lambda x, i, u: ops.scatter_update(x, i, u), "f4,5", "i1,2", "f1")
call("switch", lambda i, x: ops.switch(i, [ops.sin, ops.cos], x), "i", "f4,5")
call("where", lambda c, a, b: ops.where(c, a, b), "b4,5", "f4,5", "f5")
call("select", lambda c, d, a, b: ops.select([c, d], [a, b]), "b4,5", "b4,5", "f4,5", "f4,5")
case("one_hot", "i4,5", num_classes=4)
case("multi_hot", "i4,5", num_classes=4)
case("vander", "f5", N=3)
case("extract_sequences", "f4,8", sequence_length=3, sequence_stride=2)
call("vectorize", lambda x: ops.vectorize(ops.sum, signature="(n)->()")(x), "f4,5")
call("vectorized_map", lambda x: ops.vectorized_map(ops.sum, x), "f4,5")
call("map", lambda x: ops.map(lambda row: row * 2, x), "f4,5")
call("scan", lambda x: ops.scan(lambda c, r: (c + r, c * r), ops.zeros(5), x), "f4,5")
call("associative_scan", lambda x: ops.associative_scan(ops.add, x), "f4,5")
call("cond", lambda p, x: ops.cond(p, lambda: x * 2, lambda: x - 1), "b", "f4,5")
call("fori_loop", lambda x: ops.fori_loop(0, 3, lambda i, s: s * 2, x), "f4,5")
call(
    "while_loop",
    lambda x: ops.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * 2), (0, x))[1],
    "f4,5",
)

for _name, *_shapes in (
    ("matmul", "f4,6", "f6,5"),
    ("matmul", "f3,4,6", "f3,6,5"),
    ("matmul", "f3,4,6", "f6,5"),
    ("matmul", "f4,6", "f6"),
    ("dot", "f4,6", "f6,5"),
    ("inner", "f4,6", "f5,6"),
    ("outer", "f4", "f5"),
    ("vdot", "f6", "f6"),
    ("kron", "f2,3", "f4,5"),
    ("cross", "f4,3", "f4,3"),
    ("cdist", "f4,6", "f5,6"),
    ("correlate", "f6", "f3"),
):
    case(_name, *_shapes)
case("tensordot", "f4,6", "f6,5", axes=1)
case("tensordot", "f3,4,6", "f4,6,5", axes=2)
for _subscripts, _shapes in (
    ("ij,jk->ik", ("f4,6", "f6,5")),
    ("bij,bjk->bik", ("f2,4,6", "f2,6,5")),
    ("abc,cd->abd", ("f2,4,6", "f6,5")),
    ("bthd,bshd->bhts", ("f2,4,2,3", "f2,5,2,3")),
    ("ij,ij->", ("f4,6", "f4,6")),
    ("ij->ji", ("f4,6",)),
    ("abc,abd->cd", ("f2,4,6", "f2,4,5")),
):
    call("einsum", lambda *x, s=_subscripts: ops.einsum(s, *x), *_shapes)
for _name in ["cholesky", "det", "inv", "slogdet"]:
    case(_name, "s3,4,4")
case("cholesky_inverse", "s3,4,4")
call("eigh", lambda x: ops.eigh(x)[0], "s3,4,4")
call("eig", lambda x: ops.sort(ops.real(ops.eig(x)[0])), "s3,4,4", has_gradient=False)
call("svd", lambda x: ops.svd(x, compute_uv=False), "f3,4,5")
call("qr", lambda x: ops.abs(ops.qr(x)[1]), "f3,5,4")
case("lu_factor", "s3,4,4", has_gradient=False)
case("solve", "s3,4,4", "f3,4,2")
call("solve_triangular", lambda a, b: ops.solve_triangular(a, b, lower=True), "s3,4,4", "f3,4,2")
case("lstsq", "f6,4", "f6,2")
case("pinv", "f3,4,6")
case("matrix_rank", "f3,4,5", has_gradient=False)
call("fft", lambda a, b: ops.fft((a, b)), "f4,6", "f4,6")
call("fft2", lambda a, b: ops.fft2((a, b)), "f3,4,6", "f3,4,6")
call("ifft2", lambda a, b: ops.ifft2((a, b)), "f3,4,6", "f3,4,6")
case("rfft", "f4,6")
call("irfft", lambda a, b: ops.irfft((a, b)), "f4,4", "f4,4")
case("stft", "f4,32", sequence_length=8, sequence_stride=4, fft_length=8)
call(
    "istft",
    lambda x: ops.istft(ops.stft(x, 8, 4, 8), 8, 4, 8),
    "f4,32",
)
for _name in ["segment_sum", "segment_max", "segment_min", "segment_prod"]:
    call(_name, lambda x, i, name=_name: getattr(ops, name)(x, i, num_segments=4), "f6,5", "i6")

case("average_pool", "f4,6,6,3", pool_size=2)
case("max_pool", "f4,6,6,3", pool_size=2)
case("average_pool", "f4,6,3", pool_size=2, strides=1, padding="same")
case("max_pool", "f2,4,4,4,3", pool_size=2)
case("adaptive_average_pool", "f4,6,6,3", output_size=2)
case("adaptive_max_pool", "f4,6,6,3", output_size=2)
case("conv", "f4,6,3", "f3,3,5", padding="same")
case("conv", "f4,6,6,4", "f3,3,4,6")
case("conv", "f4,6,6,4", "f3,3,4,6", strides=2, padding="same")
case("conv", "f4,6,6,4", "f3,3,2,6")
case("conv", "f2,4,4,4,2", "f2,2,2,2,4")
case("conv_transpose", "f4,6,3", "f3,5,3")
case("conv_transpose", "f4,6,6,4", "f3,3,6,4", strides=2, padding="same")
case("conv_transpose", "f2,4,4,4,2", "f2,2,2,4,2")
case("depthwise_conv", "f4,6,6,4", "f3,3,4,2")
case("depthwise_conv", "f4,6,4", "f3,4,1")
case("separable_conv", "f4,6,6,4", "f3,3,4,2", "f1,1,8,6")
case("depth_to_space", "f2,3,4,8", block_size=2)
case("space_to_depth", "f2,4,4,3", block_size=2)
case("unfold", "f2,3,6,6", kernel_size=2)
case("fold", "f2,12,9", output_size=(4, 4), kernel_size=2)
call(
    "batch_normalization",
    lambda x, m, v: ops.batch_normalization(x, m, v, axis=-1),
    "f4,5",
    "f5",
    "p5",
)
call("layer_normalization", lambda x, g, b: ops.layer_normalization(x, g, b), "f4,6", "f6", "f6")
call("rms_normalization", lambda x, g: ops.rms_normalization(x, g), "f4,6", "f6")
case("dot_product_attention", "f4,6,2,4", "f4,6,2,4", "f4,6,2,4")
case("dot_product_attention", "f4,6,2,4", "f4,6,2,4", "f4,6,2,4", is_causal=True)
call(
    "dot_product_attention",
    lambda q, k, v, m: ops.dot_product_attention(q, k, v, mask=m),
    *("f4,6,2,4",) * 3,
    "b4,1,6,6",
)
case("binary_crossentropy", "u4,5", "u4,5")
case("categorical_crossentropy", "o4,5", "d4,5")
call(
    "categorical_crossentropy",
    lambda t, p: ops.categorical_crossentropy(t, p, from_logits=True),
    "o4,6",
    "f4,6",
)
case("sparse_categorical_crossentropy", "i5", "d5,4")
call(
    "sparse_categorical_crossentropy",
    lambda t, p: ops.sparse_categorical_crossentropy(t, p, from_logits=True),
    "i4,5",
    "f4,5,6",
)
call(
    "ctc_loss",
    lambda o: ops.ctc_loss(
        np.array([[1, 2], [2, 3], [1, 1], [3, 2]], "int32"), o, np.full(4, 2), np.full(4, 6)
    ),
    "f4,6,5",
)
call(
    "ctc_decode",
    lambda o: ops.ctc_decode(o, np.full(4, 6), strategy="greedy"),
    "f4,6,5",
    has_gradient=False,
)

for _name in ["gaussian_blur", "hsv_to_rgb", "rgb_to_grayscale", "rgb_to_hsv", "sobel_edges"]:
    case(f"image.{_name}", "u4,6,5,3")
for _interpolation in ("bilinear", "nearest", "bicubic"):
    case("image.resize", "u4,6,5,3", size=(3, 8), interpolation=_interpolation)
case("image.resize", "u4,6,5,3", size=(3, 3), antialias=True)
case(
    "image.crop_images",
    "u4,6,5,3",
    top_cropping=1,
    left_cropping=2,
    target_height=3,
    target_width=2,
)
case("image.pad_images", "u4,6,5,3", top_padding=1, left_padding=2, target_height=9, target_width=8)
case("image.extract_patches", "u4,6,6,3", size=2)
case("image.extract_patches_3d", "u2,4,4,4,3", size=2)
case("image.map_coordinates", "f5,6", "p2,4", order=1)
case("image.affine_transform", "u4,6,5,3", "u4,8")
call(
    "image.perspective_transform",
    lambda x: ops.image.perspective_transform(
        x,
        np.tile(np.array([[0, 0], [5, 0], [0, 4], [5, 4]], "float32"), (4, 1, 1)),
        np.tile(np.array([[1, 0], [4, 0], [0, 4], [5, 3]], "float32"), (4, 1, 1)),
    ),
    "u4,6,5,3",
)
call(
    "image.scale_and_translate",
    lambda x: ops.image.scale_and_translate(
        x, (4, 3, 8, 3), np.array([0.5, 1.6], "float32"), np.zeros(2, "float32"), (1, 2), "linear"
    ),
    "u4,6,5,3",
)
case("image.elastic_transform", "u4,6,5,3", alpha=2.0, sigma=1.0, seed=3)
case("image.ssim", "u2,12,12,3", "u2,12,12,3")

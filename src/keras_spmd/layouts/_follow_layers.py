"""Dims through the ops that layers are made of: products, convolutions, lookups, normalization."""

from keras_spmd.layouts._dims import Dim, Sum
from keras_spmd.layouts._follow import Call, broadcast, rule


@rule("mm", "bmm", "addmm", "baddbmm")
def product(call: Call) -> None:
    *added, a, b = call.inputs
    dims_a, dims_b = call.dims(a), call.dims(b)
    call.contract(a, dims_a[-1], b, dims_b[-2])
    if call.tensors.is_data(a) and call.tensors.is_data(b):
        # Attention: heads may be sharded, but not what is inside of each.
        call.keep_whole(dims_b[-1])
    dims = [*dims_a[:-1], dims_b[-1]]
    if a.ndim == 3:
        dims_a[0].join(dims_b[0])
    for x in added:
        for dim, other in zip(dims, broadcast(call, call.results[0].shape, [x]), strict=True):
            dim.join(other)
    call.result(dims)


@rule("mv")
def matrix_vector(call: Call) -> None:
    a, b = call.inputs
    call.contract(a, call.dims(a)[-1], b, call.dims(b)[0])
    call.result(call.dims(a)[:1])


@rule("convolution")
def convolution(call: Call) -> None:
    x, kernel = call.inputs[:2]
    data, weights = call.dims(x), call.dims(kernel)
    call.keep_whole(*data[2:], *weights[2:])
    rows, columns = (0, 1) if call.arg("transposed") else (1, 0)
    if call.arg("groups") != 1:
        # keras-spmd runs these on all channels of this rank's rows.
        call.keep_whole(data[1], weights[0], weights[1])
    else:
        call.contract(x, data[1], kernel, weights[rows])
    channels = weights[columns] if call.arg("groups") == 1 else call.whole(call.results[0])[1]
    for bias in call.inputs[2:]:
        channels.join(call.dims(bias)[0])
    call.result([data[0], channels, *call.whole(call.results[0])[2:]])


@rule("embedding")
def embedding(call: Call) -> None:
    table, indices = call.inputs
    words, features = call.dims(table)
    words.note_sum(Sum(call.layer, is_lookup=True))
    call.result([*call.dims(indices), features])


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> None:
    x = call.inputs[0]
    dims = call.dims(x)
    count = len(call.arg("normalized_shape"))
    call.keep_whole(*dims[len(dims) - count :])
    call.result(broadcast(call, x.shape, call.inputs))


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def batch_norm(call: Call) -> None:
    """Channels don't know of each other."""
    x, *others = call.inputs
    dims = call.dims(x)
    for y in others:
        dims[1].join(call.dims(y)[0])
    call.keep_whole(*dims[2:])
    call.result(dims)


@rule(
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
)
def pool(call: Call) -> None:
    """Channels of images don't know of each other; their places do."""
    x = call.inputs[0]
    count = 3 if "3d" in call.name else 2
    dims = call.dims(x)
    call.keep_whole(*dims[-count:])
    call.every_result(lambda y: [*dims[:-count], *call.whole(y)[-count:]])


@rule("constant_pad_nd")
def pad(call: Call) -> None:
    (x,), y = call.inputs, call.results[0]
    dims: list[Dim] = []
    for i, dim in enumerate(call.dims(x)):
        if x.shape[i] == y.shape[i]:
            dims.append(dim)
        else:
            call.keep_whole(dim)
            dims.append(call.whole(y)[i])
    call.result(dims)


@rule(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
def attention(call: Call) -> None:
    """Rows and heads don't know of each other; what stands behind them does."""
    query, key, value = (call.dims(x) for x in call.inputs[:3])
    call.keep_whole(*query[2:], *key[2:], *value[2:])
    for others in (key, value, *map(call.dims, call.inputs[3:])):
        for mine, dim in zip(query[:2], others[: len(others) - 2], strict=False):
            if mine.size == dim.size > 1:
                mine.join(dim)
    call.result([*query[:3], value[3]])

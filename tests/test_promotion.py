"""Plain tensors meet DTensors: any op, any order, any placement, right values and gradients."""

import os

import keras
import numpy as np
import pytest
import torch
from keras import distribution, ops

import keras_spmd
from bench import on_ranks
from keras_spmd import _promotion
from keras_spmd.distribution_lib import num_processes, process_id
from meshes import assert_same, fully_sharded, line, model_parallel, partial, whole

BINARY = {
    "add": torch.add,
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "divide": torch.divide,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "matmul": torch.matmul,
    "power": lambda a, b: torch.pow(a.abs() + 1, b),
    "atan2": torch.atan2,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "where mask": lambda a, b: torch.where(b > 0, a, 1.0),
    "concatenate": lambda a, b: torch.cat([a, b], dim=0),
    "concatenate 1": lambda a, b: torch.cat([a, b], dim=1),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "einsum sum": lambda a, b: torch.einsum("ij,ij->", a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "linear": torch.nn.functional.linear,
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "cdist": torch.cdist,
    "outer": lambda a, b: torch.outer(a[0], b[:, 0]),
    "hypot": torch.hypot,
    "mse": torch.nn.functional.mse_loss,
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.5),
    "broadcast": lambda a, b: a * b[0],
    "broadcast column": lambda a, b: a - b[:, :1],
    "column of 1": lambda a, b: a + b[:1, :1].reshape(1),
}
COMPARISONS = {
    "equal": torch.eq,
    "greater": torch.gt,
    "less equal": torch.le,
    "not equal": torch.ne,
    "isclose": torch.isclose,
    "logical and": lambda a, b: torch.logical_and(a > 0, b > 0),
}
# The ways a 6x6 matrix can be given; over 4 ranks its dims are sharded unevenly.
KINDS = {
    "plain": lambda v: v,
    "replicated": lambda v: fully_sharded(v, None),
    "rows": lambda v: fully_sharded(v, 0),
    "columns": lambda v: fully_sharded(v, 1),
    "partial": partial,
}


def activate_on_line():
    distribution.set_distribution(model_parallel({}, line()))


def matrices(count=2):
    generator = np.random.default_rng(0)
    return [torch.tensor(generator.normal(size=(6, 6)).astype("float32")) for _ in range(count)]


def leaf(value, kind):
    """A leaf of this kind that requires a gradient."""
    return KINDS[kind](value).detach().requires_grad_()


@on_ranks(2, 4, timeout=300)
@pytest.mark.parametrize("name", sorted(BINARY))
def test_every_pair_of_kinds_has_the_values_and_gradients_of_plain_tensors(name):
    import warnings

    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    op = BINARY[name]
    a, b = matrices()
    pa, pb = a.clone().requires_grad_(), b.clone().requires_grad_()
    expected = op(pa, pb)
    seed = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape)
    (expected * seed).sum().backward()
    activate_on_line()
    for kind_a in KINDS:
        for kind_b in KINDS:
            la, lb = leaf(a, kind_a), leaf(b, kind_b)
            result = op(la, lb)
            message = f"{name}({kind_a}, {kind_b})"
            np.testing.assert_allclose(whole(result), whole(expected), 1e-4, 1e-5, err_msg=message)
            (result * seed).sum().backward()
            for got, want in ((la.grad, pa.grad), (lb.grad, pb.grad)):
                if want is not None:
                    np.testing.assert_allclose(whole(got), whole(want), 1e-4, 1e-5, err_msg=message)


@on_ranks(2, 4, timeout=200)
@pytest.mark.parametrize("name", sorted(COMPARISONS))
def test_comparisons(name):
    import warnings

    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    op = COMPARISONS[name]
    a, b = matrices()
    b[0] = a[0]
    expected = op(a, b)
    activate_on_line()
    for kind_a in KINDS:
        for kind_b in KINDS:
            # A pending sum may differ in the last bit from the number it stands for.
            if "partial" not in (kind_a, kind_b) or name in ("greater", "logical and"):
                result = op(KINDS[kind_a](a), KINDS[kind_b](b))
                if name == "greater" and "partial" in (kind_a, kind_b):
                    assert (whole(result) != whole(expected))[1:].sum() == 0
                else:
                    np.testing.assert_array_equal(whole(result), whole(expected))


@on_ranks(2, 4)
def test_python_scalars_0d_tensors_and_arrays():
    (a,) = matrices(1)
    activate_on_line()
    for kind in KINDS:
        x = KINDS[kind](a)
        for other in (2.5, 3, torch.tensor(2.5), np.float32(2.5)):
            assert_same(x * other, a * float(other))
            assert_same(
                other - x if not isinstance(other, np.generic) else -(x - other), float(other) - a
            )
        array = np.arange(6, dtype="float32")
        assert_same(ops.add(x, array), a + torch.tensor(array))
        assert_same(ops.subtract(array, x), torch.tensor(array) - a)
        assert_same(ops.multiply(keras.Variable(a.numpy()), x), a * a)
        assert_same(ops.add(x, torch.ones(1)), a + 1)


@on_ranks(2, 4)
def test_in_place_ops():
    import warnings

    # Older torch has no rule for some of them.
    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    a, b = matrices()
    activate_on_line()
    for kind_a in ("plain", "replicated", "rows", "columns"):
        for kind_b in KINDS:
            for name in ("add_", "mul_", "copy_", "sub_", "clamp_min_"):
                other = KINDS[kind_b](b)
                target = KINDS[kind_a](a.clone())
                result = getattr(target, name)(other)
                assert_same(target, getattr(a.clone(), name)(b))
                assert keras_spmd.is_dtensor(target) == (kind_a != "plain")
                assert result is target


@on_ranks(2, 4)
def test_foreach_ops():
    values = matrices(4)
    activate_on_line()
    for kind in KINDS:
        left = [KINDS[kind](values[0]), fully_sharded(values[1], 0)]
        right = [fully_sharded(values[2], 1), values[3]]
        for got, want in (
            (torch._foreach_add(left, right), torch._foreach_add(values[:2], values[2:])),
            (torch._foreach_mul(left, right), torch._foreach_mul(values[:2], values[2:])),
            (
                torch._foreach_addcmul(left, right, right, value=0.5),
                torch._foreach_addcmul(values[:2], values[2:], values[2:], value=0.5),
            ),
            (torch._foreach_sqrt([x.abs() for x in left]), [v.abs().sqrt() for v in values[:2]]),
        ):
            for x, y in zip(got, want, strict=True):
                assert_same(x, y)
    # A laid-out tensor may share memory with the plain one it was made of.
    copies = [v.clone() for v in values]
    targets = [fully_sharded(copies[0], 0), copies[1], fully_sharded(copies[2], None)]
    torch._foreach_add_(
        targets, [values[1], fully_sharded(values[1], 1), fully_sharded(values[1], 0)]
    )
    torch._foreach_mul_(targets, 0.5)
    torch._foreach_lerp_(targets, [values[3]] * 3, 0.25)
    expected = [v.clone() for v in values[:3]]
    torch._foreach_add_(expected, [values[1]] * 3)
    torch._foreach_mul_(expected, 0.5)
    torch._foreach_lerp_(expected, [values[3]] * 3, 0.25)
    for x, y in zip(targets, expected, strict=True):
        assert_same(x, y)


@on_ranks(2, 4)
def test_indexing():
    import warnings

    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    (a,) = matrices(1)
    index = torch.tensor([4, 0, 1])
    mask = a > 0
    activate_on_line()
    for kind in KINDS:
        x = KINDS[kind](a)
        for i in (KINDS[k](index) for k in ("plain", "replicated", "rows")):
            assert_same(x[i], a[index])
            assert_same(x[:, i], a[:, index])
            assert_same(x[i, i], a[index, index])
            assert_same(torch.index_select(x, 0, i), a[index])
            assert_same(ops.take(x, i, axis=1), a[:, index])
        assert_same(x[2], a[2])
        assert_same(x[1:4, ::2], a[1:4, ::2])
        assert_same(x[..., None, -1], a[..., None, -1])
        for m in (KINDS[k](mask) for k in ("plain", "replicated", "rows", "columns")):
            if kind != "partial":
                assert_same(x[m], a[mask])
        assert [float(v.sum()) for v in x] == pytest.approx([float(v.sum()) for v in a], rel=1e-4)


@on_ranks(2, 4)
def test_writing_into_parts():
    """A view along a sharded dim has memory of its own; writes into it must not get lost."""
    import warnings

    warnings.simplefilter("ignore", keras_spmd.ShardingWarning)
    a, b = matrices()
    activate_on_line()

    def write(x, other):
        x[0] = 1.0
        x[:, 1] = other[:, 0]
        x[2:4, 3:] = other[2:4, 3:]
        x[torch.tensor([5, 4])] = other[:2]
        x[4] += 3
        x[1].zero_()
        x.narrow(1, 2, 2).mul_(2)
        x.select(0, 3).copy_(other[3])
        x.t()[0].fill_(7)
        return x

    expected = write(a.clone(), b)
    for kind in ("plain", "replicated", "rows", "columns"):
        for other in KINDS:
            assert_same(write(KINDS[kind](a.clone()).clone(), KINDS[other](b)), expected)


@on_ranks(2, 4)
def test_reading_gives_global_values():
    a = torch.arange(12.0).reshape(3, 4) / 7
    activate_on_line()
    for kind in KINDS:
        x = KINDS[kind](a)
        assert ops.is_tensor(x)
        assert ops.shape(x) == (3, 4)
        assert tuple(x.shape) == (3, 4)
        assert isinstance(ops.convert_to_numpy(x), np.ndarray)
        np.testing.assert_allclose(np.array(x), a.numpy(), rtol=1e-6)
        np.testing.assert_allclose(np.asarray(x, dtype="float64"), a.numpy(), rtol=1e-6)
        np.testing.assert_allclose(x.numpy(), a.numpy(), rtol=1e-6)
        np.testing.assert_allclose(x.tolist(), a.tolist(), rtol=1e-6)
        assert float(x.sum()) == pytest.approx(float(a.sum()), rel=1e-5)
        assert x.max().item() == pytest.approx(a.max().item(), rel=1e-5)
        assert bool((x.sum() > 9.4) & (x.sum() < 9.5))
        assert int(x[2, 3] * 7 + 0.5) == 11
        assert ops.convert_to_tensor(x) is x
        cast = ops.cast(x, "float64")
        assert cast.dtype == torch.float64
        if kind not in ("plain", "partial"):
            assert cast.placements == x.placements
        assert ops.convert_to_numpy(ops.cast(x, "bfloat16")).dtype.name == "bfloat16"
        assert ops.convert_to_numpy([x[0], x[0]]).shape == (2, 4)


@on_ranks(2)
def test_raw_torch_in_a_custom_layer():
    class Mixed(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

        def call(self, x):
            table = torch.arange(4.0)
            y = torch.relu(x @ self.kernel.value) + table
            y = torch.where(y > 1, y, torch.zeros(()))
            return torch.cat([y, torch.ones(y.shape[0], 1)], dim=1) * torch.full((5,), 0.5)

    def run():
        keras.utils.set_random_seed(3)
        layer = Mixed()
        x = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        return whole(y), whole(x.grad), whole(layer.kernel.value.grad)

    expected = run()
    for layouts in ({}, {".*kernel": (None, "model")}, {".*kernel": ("model", None)}):
        distribution.set_distribution(model_parallel(layouts, line()))
        for got, want in zip(run(), expected, strict=True):
            assert_same(got, want)


@on_ranks(2)
def test_ops_that_torch_compile_calls():
    (a,) = matrices(1)
    activate_on_line()
    x = fully_sharded(a, 0)
    compiled = torch.compile(
        lambda t, plain: (t * plain + plain[0]).relu().sum(), backend="aot_eager", fullgraph=True
    )
    assert float(compiled(x, a)) == pytest.approx(float((a * a + a[0]).relu().sum()), rel=1e-5)


@on_ranks(1, 2)
def test_public_helpers():
    from torch.distributed.tensor import DTensor, Replicate, Shard

    (a,) = matrices(1)
    with pytest.raises(ValueError, match="no active distribution"):
        keras_spmd.ensure_dtensor(a)
    activate_on_line()
    assert not keras_spmd.is_dtensor(a)
    x = keras_spmd.ensure_dtensor(a)
    assert isinstance(x, DTensor)
    assert keras_spmd.is_dtensor(x)
    assert keras_spmd.ensure_dtensor(x) is x
    rows = keras_spmd.ensure_dtensor(a.requires_grad_(), placements=[Shard(0)])
    assert keras_spmd.get_dtensor_local(rows).shape == (6 // num_processes(), 6)
    (rows * rows).sum().backward()
    assert_same(a.grad, 2 * a)
    mesh, placements = keras_spmd.get_dtensor_spec(rows)
    assert placements == (Shard(0),)
    assert keras_spmd.get_dtensor_spec(a) is None
    assert keras_spmd.get_dtensor_local(a) is a
    again = keras_spmd.ensure_dtensor(rows, placements=[Replicate()])
    assert again.placements == (Replicate(),)
    one, two = keras_spmd.convert_tensors_to_dtensor(a, rows)
    assert (one.placements, two.placements) == ((Replicate(),), (Shard(0),))
    (three,) = keras_spmd.convert_tensors_to_dtensor(a, device_mesh=mesh)
    assert three.device_mesh == mesh
    assert keras_spmd.create_replicate_dtensor(rows).placements == (Replicate(),)
    assert_same(keras_spmd.create_replicate_dtensor(a, mesh), a)


def flag():
    return torch._C._get_dtensor_allow_implicit_replication()


@on_ranks(2)
def test_the_switch_is_on_exactly_while_a_distribution_is_active():
    from torch.distributed.tensor.experimental import implicit_replication

    one, two = model_parallel({}, line()), distribution.DataParallel()
    assert not flag()
    with one.scope():
        assert flag()
        with two.scope():
            assert flag()
        assert flag()
        with implicit_replication():
            assert flag()
        assert flag(), "torch's own context manager must not switch it off"
        with _promotion.promoting(), _promotion.promoting():
            pass
        assert flag()
    assert not flag()
    with pytest.raises(RuntimeError, match="on purpose"), one.scope():
        raise RuntimeError("on purpose")
    assert not flag()
    distribution.set_distribution(one)
    keras.utils.clear_session()
    assert distribution.distribution() is None
    assert not flag()
    with implicit_replication():
        assert flag()
        with one.scope():
            pass
        assert flag(), "what the user switched on stays on"
    assert not flag()


@on_ranks(2)
def test_users_own_dtensors_are_not_disturbed():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    (a,) = matrices(1)
    mine = distribute_tensor(a, init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(RuntimeError, match="mixed torch"):
        mine + a
    activate_on_line()
    assert (mine + mine).placements == (Shard(0),)
    assert_same(mine + mine, 2 * a)
    distribution.set_distribution(None)
    with pytest.raises(RuntimeError, match="mixed torch"):
        mine + a


@on_ranks(2)
def test_check_names_the_op_and_the_layer_of_a_tensor_that_differs():
    class Diverging(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

        def call(self, x):
            return self.kernel.value * (torch.ones(4) + self.extra)

    os.environ["KERAS_SPMD_CHECK"] = "1"
    distribution.set_distribution(model_parallel({".*kernel": (None, "model")}, line()))
    layer = Diverging(name="bad_layer")
    layer.extra = 0.0
    layer.build((None, 3))
    layer(torch.ones(2, 3))
    layer.extra = float(process_id())
    with pytest.raises(RuntimeError, match=r"aten\.mul.*bad_layer.*not the same on all ranks"):
        layer(torch.ones(2, 3))

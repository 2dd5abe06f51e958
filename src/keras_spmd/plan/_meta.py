"""Models without values: built in no time and no memory, to look at their variables."""

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from keras_spmd._planning import planning
from keras_spmd.plan._keeping import process_kept


@contextlib.contextmanager
def without_values(mode: FakeTensorMode) -> Iterator[None]:
    """Tensors that are made in this block have a shape and a dtype, and no memory."""
    with mode:
        try:
            yield
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
            raise ValueError(
                "The model reads the value of a tensor while it is built, and a dry run has no "
                f"values ({error}). Compute what it needs with numpy, or in call()."
            ) from error


def new_mode() -> FakeTensorMode:
    # Layers may hold constants that were made before. Optimizers read the learning rate, and with a
    # place for symbols that is an op of the graph.
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


@contextlib.contextmanager
def meta() -> Iterator[None]:
    """Build models of any size without allocating them, to look at their variables.

    Example:

    >>> import keras, keras_spmd
    >>> with keras_spmd.plan.meta():
    ...     model = keras.Sequential([keras.Input((10**6,)), keras.layers.Dense(10**6, name="big")])
    >>> [(v.path, v.shape, v.dtype) for v in model.variables][0]
    ('sequential/big/kernel', (1000000, 1000000), 'float32')

    Names are those that the model would have if it were made now, and a model that is made
    afterwards has them too. The variables have no values: such a model can't compute.
    """
    with process_kept(), planning(), without_values(new_mode()):
        yield

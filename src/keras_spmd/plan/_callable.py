"""`keras_spmd.plan`: a function that has other public names of dry runs as attributes.

Importing this imports no compiler, and on Keras's other backends not even torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from keras_spmd.plan import _figures


class Planner:
    """Plan a training step on a mesh of any size, on one machine and without any of its devices.

    Example:

    >>> import keras, keras_spmd
    >>> def make_model():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="first")])
    ...     model.compile("adamw", "mse")
    ...     return model
    >>> plan = keras_spmd.plan(
    ...     make_model, (4, 2), ("batch", "model"), {".*first/kernel": (None, "model")},
    ...     batch=((32, 64), (32, 64)), device="H100")
    >>> plan.memory.parameters, plan.fits                  # bytes on each device
    (8448, True)
    >>> "all_reduce" in {t.kind for t in plan.transfers if t.axis == "batch"}
    True

    `print(plan)` shows tables; `plan.to_json()` and `plan.to_html("plan.html")` have it all. The
    step is captured and improved as that of a real run is, with tensors that have no values, as
    rank 0 of a job whose other ranks don't exist. Afterwards the process is as before: names, seeds
    and the distribution too. With `plan.meta()` models are built without values.

    Args:
        model_fn: A function without arguments that makes and compiles the model.
        mesh_shape: The mesh, e.g. `(64, 8)`.
        axis_names: The names of its axes, e.g. `("batch", "model")`.
        layouts: None (only the batch is divided), a dict of patterns and axes, a `LayoutMap`, or a
            function `(model, mesh)` that makes one.
        batch: What `train_step` gets: a structure such as `(x, y)` of arrays, of `keras.Input` with
            a batch size, of shapes, or of shapes with dtypes, `((512, 4096), "int32")`. Global.
        device: "A100", "H100", "H200", "B200", "CPU", or a `plan.Device` with other figures.
        batch_axis: The axis that the batch is divided over; the first one by default.
        whole: Capture every block of the model. By default, of eight or more layers that are alike
            and made of layers, three are captured, and the others add what the third one did.

    Returns:
        A `Plan`.
    """

    Device, Link, Network = _figures.Device, _figures.Link, _figures.Network
    A100, H100, H200, B200, CPU = (
        _figures.A100,
        _figures.H100,
        _figures.H200,
        _figures.B200,
        _figures.CPU,
    )

    def __call__(
        self,
        model_fn: Callable[[], Any],
        mesh_shape: Sequence[int],
        axis_names: Sequence[str],
        layouts: Any = None,
        batch: Any = None,
        *,
        device: _figures.Device | str = "H100",
        batch_axis: str | None = None,
        whole: bool = False,
    ) -> Any:
        _check_backend()
        if batch is None:
            raise ValueError(
                "A plan needs to know the batch: batch=(x, y), as arrays or as shapes, e.g. "
                'batch=(((512, 4096), "int32"), ((512, 4096), "int32")).'
            )
        from keras_spmd.plan._planner import make_plan

        return make_plan(
            model_fn,
            mesh_shape,
            axis_names,
            layouts,
            batch,
            device=device,
            batch_axis=batch_axis,
            whole=whole,
        )

    def meta(self) -> AbstractContextManager[None]:
        """Build models of any size without allocating them, to look at their variables.

        Example:

        >>> import keras, keras_spmd
        >>> with keras_spmd.plan.meta():
        ...     model = keras.Sequential([keras.Input((10**6,)), keras.layers.Dense(10**6)])
        >>> model.variables[0].shape
        (1000000, 1000000)

        Names are those that the model would have if it were made now, and a model that is made
        afterwards has them too. The variables have no values: such a model can't compute.
        """
        _check_backend()
        from keras_spmd.plan._meta import meta

        return meta()


def _check_backend() -> None:
    import keras

    if keras.backend.backend() != "torch":
        raise RuntimeError(
            "Dry runs need Keras's torch backend, and this is the backend "
            f"'{keras.backend.backend()}'. Set KERAS_BACKEND=torch."
        )

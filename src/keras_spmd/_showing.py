"""The public name of `plan._show`, which imports the pictures."""

from typing import Any


def show(model: Any) -> Any:
    """Show how the variables of a model lie on the mesh, with their shards in colour.

    Call it on all ranks; rank 0 prints. In a notebook, what it returns is drawn as a table.

    Example:

    >>> import keras, keras_spmd
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="small")])
    >>> shards = keras_spmd.show(model)                                    # prints a table
    '...' on one device: 40 B on each rank...
    >>> [(row.path.split("/")[-1], row.local_nbytes) for row in shards.rows]
    [('kernel', 32), ('bias', 8)]

    Args:
        model: A model that is built.

    Returns:
        The same as numbers, `rows`, with a picture for notebooks.
    """
    from keras_spmd.plan._show import show as show_shards

    return show_shards(model)

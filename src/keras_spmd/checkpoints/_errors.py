"""What can be wrong with a checkpoint."""


class CheckpointError(OSError):
    """A checkpoint that can't be written, or that is damaged.

    Example:

    >>> import keras_spmd
    >>> issubclass(keras_spmd.CheckpointError, OSError)
    True
    """

"""What the user is told: once, and with the layer it happened in."""

import sys
import warnings
from types import FrameType

from keras.src.backend.common.name_scope import current_path

_told: set[object] = set()


class ShardingWarning(UserWarning):
    """Something works, but not the way a user would want it to.

    Example:

    >>> import warnings, keras_spmd
    >>> warnings.filterwarnings("error", category=keras_spmd.ShardingWarning)  # all are errors
    """


def warn_once(key: object, message: str) -> None:
    """Warn, unless a warning with this key was given before."""
    if key in _told:
        return
    _told.add(key)
    warnings.warn(message, ShardingWarning, stacklevel=_depth_of_user_code())


def _depth_of_user_code() -> int:
    """How far up the stack the first frame is that is neither ours, nor Keras's, nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in (
            "keras_spmd",
            "keras",
            "torch",
        ):
            return depth
        frame, depth = frame.f_back, depth + 1
    return 2


def forget_notices() -> None:
    """Let every warning be given again."""
    _told.clear()


def where() -> str:
    """The place in the model that runs now, for a message."""
    import torch

    # Name scopes are closed again when autograd walks back through the layers.
    if torch._C._current_graph_task_id() != -1:
        return "in the backward pass"
    path = current_path()
    return f"in layer '{path}'" if path else "outside of any layer"

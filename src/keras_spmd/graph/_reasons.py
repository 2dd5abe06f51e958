"""Why a step can't be captured, in words, with the line that is to blame."""

import traceback
from types import TracebackType

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from keras_spmd.graph._capture import CannotCapture

_LIBRARIES = ("keras", "torch", "keras_spmd", "optree")


def python_state(changed: list[str]) -> CannotCapture:
    return CannotCapture(f"it {changed[0]}")


def describe(error: Exception) -> str:
    """A sentence's end: '... because ...'."""
    if isinstance(error, CannotCapture):
        return str(error)
    place = _place(error.__traceback__)
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)) or (
        "data-dependent" in str(error).lower()
    ):
        return f"{place} reads the value of a tensor, which is not known while a graph is made"
    if isinstance(error, DynamicOutputShapeException):
        return f"{place} makes a tensor whose shape depends on values"
    return f"{place} can't be captured ({type(error).__name__}: {_first_line(error)})"


def _place(trace: TracebackType | None) -> str:
    """The last line of the user's own code, or of Keras's, that was running."""
    frames = list(traceback.walk_tb(trace))
    own = [
        (frame, line)
        for frame, line in frames
        if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES
        and not frame.f_code.co_filename.startswith("<")
    ]
    keras = [f for f in frames if f[0].f_globals.get("__name__", "").startswith("keras.src")]
    for candidates in (own, keras, frames):
        if candidates:
            frame, line = candidates[-1]
            code = frame.f_code
            return f"line {line} of {code.co_filename} (in {code.co_name})"
    return "it"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]

"""Where a process is in the user's program, for messages about ranks that wait for each other.

The main thread notes it itself on its way to others. To look at its frames from another thread is
not safe while it goes on: what is read there may have been freed, and trainings crashed by it. That
is for the moment when the job ends anyway.
"""

import linecache
import os
import sys
import sysconfig
import threading
from types import FrameType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(
    os.path.abspath(path) + os.sep
    for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)
NOWHERE = "in no line of the program"

# File and line of the program, and what that line called.
_Place = tuple[str, int, str]
_noted: _Place | None = None
_is_files_of_user: dict[str, bool] = {}


def note() -> None:
    """Remember the line of the user's program that is being run; for the main thread only."""
    global _noted
    if threading.get_ident() == threading.main_thread().ident:
        _noted = _place_of(sys._getframe(1))


def noted() -> str:
    """The line that was noted last."""
    return _text(_noted)


def of_main_thread() -> str:
    """The line that the main thread is at. Only if the process is about to end: see above.

    One that has left the program by an exception was where it was noted last.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _text(_place_of(frame) or _noted)


def _place_of(frame: FrameType | None) -> _Place | None:
    inner = ""
    while frame is not None:
        code = frame.f_code
        if _is_of_user(code.co_filename):
            return code.co_filename, frame.f_lineno, inner
        inner = code.co_name
        frame = frame.f_back
    return None


def _is_of_user(file: str) -> bool:
    known = _is_files_of_user.get(file)
    if known is None:
        known = not file.startswith(("<frozen", _OURS, *_LIBRARIES))
        _is_files_of_user[file] = known
    return known


def _text(place: _Place | None) -> str:
    if place is None:
        return NOWHERE
    file, line, inner = place
    source = linecache.getline(file, line).strip()
    within = f" (within {inner})" if inner else ""
    return f"at {os.path.basename(file)}:{line}: {source}{within}"

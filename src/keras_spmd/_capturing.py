"""Whether a step is being captured into a graph, for code that does something else then."""

import threading
from typing import Any


class _Here(threading.local):
    def __init__(self) -> None:
        self.scope: Any = None


here = _Here()


def is_capturing() -> bool:
    return here.scope is not None

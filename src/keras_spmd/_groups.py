"""Process groups come and go; what was done for one must be done for the next."""

import weakref

import torch.distributed as dist


class OncePerGroup:
    """Says once for each process group that it is a new one.

    The group itself is not kept: torch aborts at exit if somebody still holds it.
    """

    def __init__(self) -> None:
        self._seen: weakref.ref | None = None

    def is_new(self) -> bool:
        group = dist.group.WORLD
        if self._seen is not None and self._seen() is group:
            return False
        self._seen = weakref.ref(group)
        return True

    def forget(self) -> None:
        self._seen = None

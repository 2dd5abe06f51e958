"""A job of any number of processes, in this one alone: nobody answers, and nobody is asked."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from keras_spmd import _layouts, _random_state


@contextlib.contextmanager
def imagined_world(size: int) -> Iterator[None]:
    """This process is rank 0 of `size`. Groups that it is part of are put aside meanwhile.

    Nothing is sent and nobody is asked, so one rank of a job may imagine another job while the
    others do something else; they only have to wait for it before the next collective.
    """
    # Registers torch's backend that does nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    known = _known_meshes()
    with _groups_aside():
        _set_known_meshes({}, None, None)
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
            # There is nobody to agree with.
            _random_state._agreed.is_new()
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _set_known_meshes(*known)


@contextlib.contextmanager
def _groups_aside() -> Iterator[None]:
    """torch knows of no group, and afterwards of those that it knew.

    It keeps the default group in one private object, the tables of all groups in its module, and
    the groups by name and this process's rank in C++ (2.11 to 2.15). The end of a world empties all
    of them, and shuts down whatever the tables name. A new world also puts its rank in front of
    each line of a traceback, for good.
    """
    before, hook = c10d._world, sys.excepthook
    count = before.group_count
    tables = [before.pg_map, before.pg_names, before.pg_group_ranks]
    tables += [before.pg_backend_config, before.pg_to_tag, before.tags_to_pg]
    contents = [dict(table) for table in tables]
    names = contents[1]
    c10d._world = c10d._World()
    for table in tables:
        table.clear()
    # Groups are numbered, and these must not have the names of those.
    c10d._world.group_count = count
    try:
        yield
    finally:
        sys.excepthook = hook
        c10d._world = before
        c10d._update_default_pg(before.default_pg)
        c10d._world.group_count = count
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        for group, name in names.items():
            c10d._register_process_group(name, group)


def _known_meshes() -> tuple:
    return dict(_layouts._meshes), _layouts._group._seen, _random_state._agreed._seen


def _set_known_meshes(meshes: dict, seen: Any, agreed: Any) -> None:
    """Equal meshes of two worlds have other groups, so nothing that knows a mesh may stay."""
    _layouts._meshes.clear()
    _layouts._meshes.update(meshes)
    _layouts._group._seen, _random_state._agreed._seen = seen, agreed
    _clear_sharding_prop_cache()

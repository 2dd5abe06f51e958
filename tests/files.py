"""Folders that all ranks of a test share."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from keras_spmd.distribution_lib import num_processes, process_id


def meet():
    if num_processes() > 1:
        dist.barrier()


@contextlib.contextmanager
def shared_folder():
    """A new folder that all ranks know, and that is gone when all have left."""
    names = [tempfile.mkdtemp() if process_id() == 0 else None]
    if num_processes() > 1:
        dist.broadcast_object_list(names, src=0)
    folder = Path(names[0])
    yield folder
    # Not after an error: the others may be elsewhere.
    meet()
    if process_id() == 0:
        shutil.rmtree(folder, ignore_errors=True)

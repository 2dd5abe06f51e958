"""Whether this process is the command `keras-spmd`, which starts others and answers at once.

Importing the package imports Keras and torch, and that takes seconds. `keras-spmd --help` should
not: while the command runs, the package is imported without them, and completely once a subcommand
needs it.
"""

import importlib
import os
import sys

_is_complete = False


def is_command() -> bool:
    """Whether the package is imported by its command, and none needed all of it so far."""
    if _is_complete or not hasattr(sys, "argv") or not sys.argv:
        return False
    # Processes that this one spawns get its `argv`, but never its `orig_argv`.
    if sys.argv[0] == "-m" and "-m" in sys.orig_argv:
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]
        return module in (["keras_spmd"], ["keras_spmd.cli"])
    name = os.path.basename(sys.argv[0]).removesuffix(".exe")
    return name == "keras-spmd" and sys.argv[0] in sys.orig_argv


def import_all() -> None:
    """Import the package again, with Keras, torch and everything else."""
    global _is_complete
    os.environ.setdefault("KERAS_BACKEND", "torch")
    if not _is_complete:
        _is_complete = True
        if "keras_spmd._activate" not in sys.modules:
            importlib.reload(sys.modules["keras_spmd"])

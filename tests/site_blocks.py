"""Runs the Python blocks of a page, on every rank of a bench."""

import contextlib
import io
import linecache
import os
import sys
import types


def run_blocks(page, blocks, folder, environment):
    """Run pieces of code in order and with common names; returns what each printed.

    `blocks` has the text and the line of each in the page.
    """
    os.environ.update(environment)
    # As in a notebook.
    module, main = types.ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = module
    printed = []
    with contextlib.chdir(folder):
        sys.path.insert(0, folder)
        try:
            for text, line in blocks:
                printed.append(_run(text, f"{page}:{line}", vars(module)))
        finally:
            sys.modules["__main__"] = main
            sys.path.remove(folder)
    return printed


def _run(text, name, names):
    # Keras and torch look for the source of functions.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, name, "exec"), names)
    return out.getvalue()

"""One rank of `keras-spmd run`: gives its output the right way, then runs the script.

Started by path, not as a part of the package: the script may want to set variables before Keras is
imported. It runs as `__main__` of this process, so that an interrupt ends it quietly, and so that
the traceback of the first rank that fails is what the user sees first.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this folder; the script's own comes in its place

import contextlib
import io
import json
import os
import runpy
import signal
import threading
import time
import traceback
import types
from typing import Any

FOLDER, OUTPUT = "KERAS_SPMD_RUN_FOLDER", "KERAS_SPMD_RUN_OUTPUT"


class Rank:
    """This process's place in the job, and where its words go."""

    def __init__(self) -> None:
        self.folder = os.environ[FOLDER]
        self.output = os.environ[OUTPUT]
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.terminal = os.dup(2)
        self.is_hidden = self.output == "rank0" and self.rank > 0

    def direct_output(self) -> None:
        """What this process and its children write goes to the one that prefixes or keeps it."""
        if self.is_hidden:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        elif self.output == "prefix":
            os.dup2(os.open(self._path("out"), os.O_WRONLY), 1)
        if self.is_hidden or self.output == "prefix":
            os.dup2(os.open(self._path("err"), os.O_WRONLY), 2)

    def write_id(self) -> None:
        with open(self._path("pid"), "w") as file:
            file.write(f"{os.getpid()} {self.rank}")

    def was_interrupted(self) -> bool:
        return os.path.exists(os.path.join(self.folder, "interrupted"))

    def fail(self, error: BaseException) -> None:
        """Show the traceback if this is the first rank of this host that fails; tell the others."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        if self._is_first():
            text = "".join(traceback.format_exception(type(error), error, trace))
            if self.size > 1 and self.output != "prefix":
                text = f"keras-spmd: rank {self.rank} of {self.size} failed:\n{text}"
            sys.stderr.flush()
            os.write(2 if self.output == "prefix" else self.terminal, text.encode())
        # The hook of a rank that has joined the job ends the others; what it says has been said.
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, trace)

    def _is_first(self) -> bool:
        path = os.path.join(self.folder, f"failed.{self.attempt}")
        try:
            with open(path, "x") as file:
                json.dump({"rank": self.rank, "local_rank": self.local_rank}, file)
        except FileExistsError:
            return False
        return True

    def _path(self, kind: str) -> str:
        return os.path.join(self.folder, f"{self.local_rank}.{kind}")


def end_with_parent() -> None:
    """End when the process that started this one was killed and could not do it itself."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=look, name="keras-spmd parent", daemon=True).start()


def run_script(path: str, arguments: list[str]) -> None:
    """As `python path arguments...` would."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    exec(code, _new_main(__file__=path))


def run_module(name: str, arguments: list[str]) -> None:
    """As `python -m name arguments...` would."""
    sys.argv = ["-m", *arguments]
    sys.path.insert(0, os.getcwd())
    _new_main()
    # What `python -m` itself calls; `run_module` would leave `__main__` when it returns.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _new_main(**names: Any) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, **names)
    sys.modules["__main__"] = module
    return module.__dict__


def main() -> None:
    kind, target, *arguments = sys.argv[1:]
    rank = Rank()
    rank.write_id()
    rank.direct_output()
    if kind == "program":
        os.execvp(target, [target, *arguments])
    end_with_parent()
    try:
        (run_module if kind == "module" else run_script)(target, arguments)
    except SystemExit:
        raise
    except BaseException as error:
        # Others may have been faster to end, and this one complains about that.
        if isinstance(error, KeyboardInterrupt) or rank.was_interrupted():
            raise SystemExit(130) from None
        rank.fail(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

"""A rank of `keras_spmd.launch`: gets a function over a pipe, and sends back what it returned."""

import os
import pickle
import signal
import sys
import threading
import traceback
import types
from multiprocessing.connection import Connection

from keras_spmd import _sending


class Caller:
    """The process that launched this one."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.may_leave = threading.Event()

    def listen(self) -> None:
        """Wait for leave to go; if the caller is gone, end with all that this rank has started."""

        def look() -> None:
            try:
                self.pipe.recv_bytes()
            except (EOFError, OSError):
                os.killpg(os.getpgid(0), signal.SIGKILL)
            self.may_leave.set()

        threading.Thread(target=look, name="keras_spmd caller", daemon=True).start()

    def tell(self, *message: object) -> None:
        self.pipe.send_bytes(pickle.dumps(message))

    def wait(self) -> None:
        # Ranks that leave early look like failures to those that still talk to them.
        self.may_leave.wait()


def main() -> None:
    caller = Caller(Connection(int(sys.argv[1])))
    path, call = pickle.loads(caller.pipe.recv_bytes())
    caller.listen()
    sys.path[:] = path
    sys.argv = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        function, args, kwargs = pickle.loads(call)
        result = function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        caller.tell("error", _text(error), _pickled(error))
    else:
        caller.tell(*_message(result))
    sys.stdout.flush()
    sys.stderr.flush()
    caller.wait()


def _message(result: object) -> tuple:
    try:
        return "ok", _sending.dumps(result)
    except Exception as error:  # whatever the pickling of a user's object may raise
        text = (
            f"TypeError: its result of type {type(result).__name__} can't be sent back ({error}). "
            "Let the function return numbers, arrays, strings, or lists and dicts of them."
        )
        return "error", text, None


def _text(error: BaseException) -> str:
    """The traceback from the user's function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # an exception with arguments of its own; its text is sent anyway
        return None
    return data


if __name__ == "__main__":
    main()

"""One rank of the test bench: runs test bodies until the bench closes the pipe."""

import ctypes
import faulthandler
import importlib.util
import os
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from types import ModuleType

PR_SET_PDEATHSIG = 1


def load(path: str, modules: dict[str, ModuleType]) -> ModuleType:
    if path not in modules:
        spec = importlib.util.spec_from_file_location(f"body_{len(modules)}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]


def reset() -> None:
    """What a fresh process would have."""
    import keras
    import torch

    import keras_spmd
    from keras_spmd import _notices

    keras_spmd.activate()
    keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(1234)
    torch.set_num_threads(1)
    _notices.forget_notices()


def main() -> None:
    # No rank outlives the tests, not even one that hangs in a collective.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A crash says where, and the bench shows it.
    faulthandler.enable()
    pipe = Connection(int(sys.argv[1]))
    modules: dict[str, ModuleType] = {}
    environment = dict(os.environ)
    while True:
        try:
            path, name, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            reset()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # numpy 2 says this of every torch tensor that becomes an array.
                warnings.filterwarnings("ignore", message="__array__ implementation")
                warnings.filterwarnings("ignore", message="Found a non-scalar tensor")
                body = getattr(load(path, modules), name)
                result = getattr(body, "body", body)(**kwargs)
            answer = ("ok", result)
        except BaseException:
            answer = ("error", traceback.format_exc())
        finally:
            for key in set(os.environ) - set(environment):
                del os.environ[key]
            os.environ.update(environment)
            sys.stdout.flush()
        pipe.send(answer)


if __name__ == "__main__":
    main()

"""A function and its arguments as bytes, for another process of the same Python.

Pickle sends functions by name, which the other process can't find for lambdas, closures, and what
was typed into a notebook. cloudpickle can, where it is installed. Without it such functions are
sent as code, with the globals that they use; classes of a script are read from its file again.
"""

import dis
import importlib
import importlib.util
import io
import marshal
import pickle
import runpy
import sys
import types
from collections.abc import Iterator
from typing import Any

_main_files: dict[str, dict[str, Any]] = {}


def dumps(value: Any) -> bytes:
    """Bytes that `pickle.loads` understands in a process that can import this module."""
    try:
        import cloudpickle  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return _dumps(value, _Pickler)
    return _dumps(value, _with_checks(cloudpickle.Pickler))


def why_not(function: Any, arguments: dict[str, Any]) -> str:
    """What of a function or its arguments can't be sent, and why."""
    parts = {f"the argument {name}": value for name, value in arguments.items()}
    if isinstance(function, types.FunctionType):
        names = function.__code__.co_freevars
        cells = zip(names, function.__closure__ or (), strict=True)
        parts |= {f"'{name}', which it uses": _contents(cell)[0] for name, cell in cells}
        parts |= {f"'{name}', which it uses": v for name, v in _used_globals(function).items()}
    for name, value in {**parts, "it": function}.items():
        try:
            dumps(value)
        except Exception as error:  # whatever the pickling of a user's object may raise
            return f"{name}: {error}"
    return "all of it together, though each part alone can be sent"


def _dumps(value: Any, pickler: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _with_checks(base: Any) -> Any:
    class Checked(base):
        def reducer_override(self, value: Any) -> Any:
            _refuse_gpu_tensor(value)
            return super().reducer_override(value)

    return Checked


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        _refuse_gpu_tensor(value)
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.CellType):
            # Filled later: a function may refer to itself by a cell of its own.
            return _new_cell, (), _contents(value), None, None, _fill_cell
        if isinstance(value, types.FunctionType) and not _is_found_by_name(value):
            return _reduce_function(value)
        if isinstance(value, type) and value.__module__ == "__main__":
            return _class_of_main_file, (_main_file(value), value.__qualname__)
        return NotImplemented


def _new_cell() -> types.CellType:
    return types.CellType()


def _contents(cell: types.CellType) -> tuple:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name that has no value yet
        return (None, "empty")


def _fill_cell(cell: types.CellType, contents: tuple) -> None:
    if len(contents) == 1:
        (cell.cell_contents,) = contents


def _refuse_gpu_tensor(value: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type == "cuda":
        raise TypeError(
            f"a tensor of shape {tuple(value.shape)} lives on {value.device} of this process, and "
            "other processes can't have it. Pass `tensor.cpu()`, or make it inside the function"
        )


def _is_found_by_name(function: types.FunctionType) -> bool:
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _reduce_function(function: types.FunctionType) -> tuple:
    module = function.__module__
    is_shared = module != "__main__" and _can_be_imported(module)
    state = {
        "globals": {} if is_shared else _used_globals(function),
        "modules": list(_used_submodules(function)),
        "defaults": function.__defaults__,
        "kwdefaults": function.__kwdefaults__,
        "dict": function.__dict__,
        "qualname": function.__qualname__,
    }
    code = marshal.dumps(function.__code__)
    made = (code, module, is_shared, function.__name__, function.__closure__)
    # The state comes after the function itself, which may refer to itself by its globals.
    return _new_function, made, state, None, None, _set_state


def _can_be_imported(module: str | None) -> bool:
    return module is not None and importlib.util.find_spec(module) is not None


def _new_function(
    code: bytes, module: str, is_shared: bool, name: str, closure: tuple | None
) -> types.FunctionType:
    if is_shared:
        names = vars(importlib.import_module(module))
    else:
        names = vars(sys.modules.setdefault(module, types.ModuleType(module)))
    return types.FunctionType(marshal.loads(code), names, name, None, closure)


def _set_state(function: types.FunctionType, state: dict[str, Any]) -> None:
    for module in state["modules"]:
        importlib.import_module(module)
    function.__globals__.update(state["globals"])
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["kwdefaults"]
    function.__qualname__ = state["qualname"]
    function.__dict__.update(state["dict"])


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _used_globals(function: types.FunctionType) -> dict[str, Any]:
    names = {
        instruction.argval
        for code in _codes(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname.endswith(("_GLOBAL", "_NAME"))
    }
    return {n: function.__globals__[n] for n in sorted(names) if n in function.__globals__}


def _used_submodules(function: types.FunctionType) -> Iterator[str]:
    """`a.b` of a function that says `a.b.c()`, where only `a` is one of its globals."""
    modules = [m for m in _used_globals(function).values() if isinstance(m, types.ModuleType)]
    attributes = {name for code in _codes(function.__code__) for name in code.co_names}
    for module in modules:
        for attribute in sorted(attributes):
            if f"{module.__name__}.{attribute}" in sys.modules:
                yield f"{module.__name__}.{attribute}"


def _main_file(kind: type) -> str:
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or "<" in kind.__qualname__:
        raise TypeError(
            f"the class '{kind.__qualname__}' is defined in a notebook or inside a function. Move "
            "it into a module, define it inside the function that is launched, or "
            "`pip install cloudpickle`"
        )
    return path


def _class_of_main_file(path: str, qualname: str) -> Any:
    if path not in _main_files:
        _main_files[path] = runpy.run_path(path, run_name="__mp_main__")
    first, *rest = qualname.split(".")
    found = _main_files[path][first]
    for name in rest:
        found = getattr(found, name)
    return found

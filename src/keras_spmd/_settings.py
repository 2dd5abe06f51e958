"""Every environment variable that keras-spmd reads, in one place.

They are read when they are needed, so that a program (or a test) may change them while it runs.
"""

import os


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {name} must be a number, got {text!r}."
        ) from None


def check() -> bool:
    """`KERAS_SPMD_CHECK=1`: verify that promoted plain tensors are equal on all ranks."""
    return _flag("KERAS_SPMD_CHECK")


def strict() -> bool:
    """`KERAS_SPMD_STRICT=1`: an op that would run replicated is an error instead of a warning."""
    return _flag("KERAS_SPMD_STRICT")


def join_timeout() -> float:
    """`KERAS_SPMD_JOIN_TIMEOUT`: how many seconds to wait for all ranks to arrive."""
    return _number("KERAS_SPMD_JOIN_TIMEOUT", 300.0)


def timeout() -> float:
    """`KERAS_SPMD_TIMEOUT`: how many seconds a rank waits for another one before it gives up."""
    return _number("KERAS_SPMD_TIMEOUT", 600.0)


def large_share() -> float:
    """`KERAS_SPMD_LARGE_SHARE`: the share of a model that makes a variable a large one."""
    return _number("KERAS_SPMD_LARGE_SHARE", 0.25)


def capture_limit() -> int:
    """`KERAS_SPMD_CAPTURE_LIMIT`: how many graphs one step may have."""
    return int(_number("KERAS_SPMD_CAPTURE_LIMIT", 16))


def cuda_graphs() -> bool | None:
    """`KERAS_SPMD_CUDA_GRAPHS`: 1 or 0; without it, steps are recorded where it pays."""
    return _flag("KERAS_SPMD_CUDA_GRAPHS") if "KERAS_SPMD_CUDA_GRAPHS" in os.environ else None


def keep_memory() -> bool:
    """`KERAS_SPMD_KEEP_MEMORY=0`: compiled CPU steps give freed memory back to the system."""
    return os.environ.get("KERAS_SPMD_KEEP_MEMORY", "1") != "0"


def recompute(*, default: bool) -> bool:
    """`KERAS_SPMD_RECOMPUTE`: 1 or 0; without it, where memory is scarcer than time."""
    return _flag("KERAS_SPMD_RECOMPUTE") if "KERAS_SPMD_RECOMPUTE" in os.environ else default


def compiler() -> str:
    """What makes code of a captured step: "inductor", or "none" to run the graph as it is."""
    return os.environ.get("KERAS_SPMD_COMPILER", "inductor")


def failure_was_shown() -> bool:
    """Whether `keras-spmd run` has shown the traceback of the rank that failed, on this host."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = os.environ.get("KERAS_SPMD_RUN_FOLDER")
    return folder is not None and os.path.exists(os.path.join(folder, f"failed.{attempt}"))


def progress() -> bool:
    """`KERAS_SPMD_PROGRESS=0`: no spinners, bars and lines about what takes long."""
    return os.environ.get("KERAS_SPMD_PROGRESS", "1") != "0"

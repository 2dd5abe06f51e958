"""What `keras-spmd doctor` looks at without starting anything: versions, devices, variables."""

import difflib
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from keras_spmd import _backends, _settings, _versions
from keras_spmd.commands.run import cores

PYTHON = ((3, 11), (3, 14))
OK, WARNING, BROKEN = "ok", "warning", "broken"


class Check(NamedTuple):
    """One finding; `fix` says what to do about it, and is empty where there is nothing to do."""

    name: str
    status: str
    found: str
    fix: str = ""


def versions() -> list[Check]:
    """Read from the files of the packages, since a wrong version may not even import."""
    python = ".".join(map(str, sys.version_info[:3]))
    checks = [_version("python", python, *PYTHON)]
    for name, bounds in (("torch", _versions.TORCH), ("keras", _versions.KERAS)):
        try:
            checks.append(_version(name, importlib.metadata.version(name), *bounds))
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, BROKEN, "not installed", f"pip install {name}"))
    from keras_spmd import __version__

    return [*checks, Check("keras_spmd", OK, __version__)]


def _version(name: str, found: str, low: tuple, high: tuple) -> Check:
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if low <= numbers < high:
        return Check(name, OK, found)
    wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
    how = "use a Python" if name == "python" else f"pip install '{name}"
    return Check(name, BROKEN, found, f"{how}{wanted}" + ("" if name == "python" else "'"))


def devices() -> list[Check]:
    import torch

    if torch.cuda.is_available():
        checks = []
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            checks.append(
                Check(f"gpu:{i}", OK, f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
            )
        return checks
    found = f"{cores()} cores, no GPU that torch can use"
    if shutil.which("nvidia-smi"):
        build = torch.version.cuda or "none"
        fix = f"torch is built for CUDA {build}; install a build that fits the driver (nvidia-smi)"
        return [Check("cpu", BROKEN, found, fix)]
    return [Check("cpu", OK, found)]


def links() -> str | None:
    """What `nvidia-smi topo -m` says about how the GPUs are connected."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "topo", "-m"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout) if result.returncode == 0 else None


def link_gb_per_s(topology: str | None) -> float | None:
    """What the link between the first two GPUs carries in each direction, where that is known.

    >>> link_gb_per_s("        GPU0    GPU1\\nGPU0     X      NV18\\nGPU1    NV18     X\\n")
    450.0
    """
    rows = [line.split() for line in (topology or "").splitlines() if line.startswith("GPU0")]
    words = rows[0][1:3] if rows else []
    # A link of NVLink 2 to 4 carries 25 GB/s.
    match = re.fullmatch(r"NV(\d+)", words[1]) if len(words) == 2 else None
    return 25.0 * int(match.group(1)) if match else None


def environment() -> list[Check]:
    return [
        _backend(),
        *_own_settings(),
        _threads(),
        *_launcher_leftovers(),
        _open_files(),
        *_shared_memory(),
        *_compiler(),
    ]


def _backend() -> Check:
    name, value = "KERAS_BACKEND", os.environ.get("KERAS_BACKEND")
    if value == "torch":
        return Check(name, OK, value)
    if value:
        return Check(name, BROKEN, value, "export KERAS_BACKEND=torch")
    if _backends.configured() == "torch":
        return Check(name, OK, f"torch, from {_backends.configuration()}")
    return Check(
        *(name, WARNING, "not set"),
        "export KERAS_BACKEND=torch for plain `python`; `keras-spmd run` sets it",
    )


def _own_settings() -> list[Check]:
    """Variables with our prefix: known ones with a value that can be read."""
    source = Path(str(_settings.__file__)).read_text()
    known = sorted(set(re.findall(r"KERAS_SPMD_[A-Z_]+", source)))
    checks = []
    for name in sorted(n for n in os.environ if n.startswith("KERAS_SPMD_")):
        value = os.environ[name]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            checks.append(Check(name, WARNING, f"{value!r}, which nobody reads", fix))
        else:
            checks.append(_own_setting(name, value))
    return checks


def _own_setting(name: str, value: str) -> Check:
    if name == "KERAS_SPMD_COMPILER" and value not in ("inductor", "none"):
        return Check(name, BROKEN, repr(value), "set it to inductor or none, or unset it")
    try:
        getattr(_settings, name.removeprefix("KERAS_SPMD_").lower(), lambda **_: None)(
            **({"default": False} if name == "KERAS_SPMD_RECOMPUTE" else {})
        )
    except ValueError as error:
        return Check(name, BROKEN, repr(value), str(error))
    return Check(name, OK, repr(value))


def _threads() -> Check:
    value = os.environ.get("OMP_NUM_THREADS")
    if value:
        return Check("OMP_NUM_THREADS", OK, value)
    fix = "every rank takes all cores with plain torch; `keras-spmd run` gives each its share"
    return Check("OMP_NUM_THREADS", WARNING, "not set", fix)


def _launcher_leftovers() -> list[Check]:
    names = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n in os.environ]
    if not names:
        return []
    found = " ".join(f"{n}={os.environ[n]}" for n in names)
    fix = f"unset {' '.join(names)}: scripts would wait for the other processes of a job"
    return [Check("launcher", WARNING, found, fix)]


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= 4096:
        return Check("open files", OK, "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    most = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    return Check("open files", WARNING, str(soft), f"ulimit -n {most}: data loaders open many")


def _shared_memory() -> list[Check]:
    if not os.path.isdir("/dev/shm"):
        return []
    size = shutil.disk_usage("/dev/shm").total
    found = f"{size / 2**30:.1f} GiB"
    if size >= 2**30:
        return [Check("/dev/shm", OK, found)]
    fix = "NCCL and data loaders need more: docker run --shm-size=8g, or --ipc=host"
    return [Check("/dev/shm", WARNING, found, fix)]


def _compiler() -> list[Check]:
    names = (os.environ.get("CXX", "g++"), "c++", "clang++")
    found = next((name for name in names if shutil.which(name)), None)
    if found:
        return [Check("C++ compiler", OK, str(shutil.which(found)))]
    fix = "jit_compile=True needs one on CPUs (apt install g++), or KERAS_SPMD_COMPILER=none"
    return [Check("C++ compiler", WARNING, "none", fix)]


def as_dict(checks: list[Check]) -> list[dict[str, Any]]:
    return [check._asdict() for check in checks]

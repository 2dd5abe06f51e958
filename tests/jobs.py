"""Jobs of their own processes, for tests that end them in some way."""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import _free_port

HERE = Path(__file__).parent
SURVIVOR = HERE / "survivor.py"


def environment(**more):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": path}
    return {**os.environ, "KERAS_BACKEND": "torch", **quiet, **more}


def start(script, size, *args, **env):
    """The ranks of a job that nobody watches over."""
    port = _free_port()
    if "\n" in str(script):
        with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="job_", delete=False) as file:
            file.write(script)
        script = file.name
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, args)],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                **env,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def outcomes(ranks, timeout):
    """The exit statuses and what was written to stderr; no rank outlives a test."""
    try:
        errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], errors


def torchrun(script, size, *args, restarts=0, timeout=300, **env):
    """Run a job under torchrun to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), "--max-restarts", str(restarts), str(script)]
    return subprocess.run(
        [*command, *map(str, args)],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def result_of(file):
    return pickle.loads(Path(file).read_bytes())


def is_running(process_id):
    """Whether there is such a process, and it has not ended."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

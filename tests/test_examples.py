"""Every script in examples/ runs on one process and on several, quietly and with equal results.

Python warnings are errors in the scripts (`-W error`), and nothing may be written to stderr.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
RANKS = {"hybrid_transformer": 4}
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WARNINGS = (
    "error",
    # numpy 2 says this of every torch tensor that becomes an array.
    "ignore:__array__ implementation:DeprecationWarning",
    # Python 3.12 says this whenever a loader of torch starts its workers.
    "ignore:This process:DeprecationWarning",
)


@functools.cache
def output_of(name: str, ranks: int) -> str:
    """What a script prints, checked to be all that it says."""
    python = [sys.executable, *(part for w in WARNINGS for part in ("-W", w))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    launcher = [] if ranks == 1 else [*torchrun, "--nproc-per-node", str(ranks)]
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    result = subprocess.run(
        [*launcher, *python, str(EXAMPLES / f"{name}.py")],
        env={**env, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def final_loss(output: str) -> float:
    (number,) = re.findall(r"^final loss: (\S+)$", output, re.MULTILINE)
    return float(number)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_the_same_on_any_number_of_processes(name):
    alone, together = output_of(name, 1), output_of(name, RANKS.get(name, 2))
    # A line that two processes print would be one line more.
    assert len(together.splitlines()) == len(alone.splitlines())


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "demo"])
def test_the_final_loss_is_that_of_one_process(name):
    alone, together = output_of(name, 1), output_of(name, RANKS.get(name, 2))
    assert final_loss(together) == pytest.approx(final_loss(alone), rel=1e-4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_docstring_says_how_to_start_the_script(name):
    docstring = (EXAMPLES / f"{name}.py").read_text().split('"""')[1]
    command = "make demo" if name == "demo" else f"torchrun --nproc-per-node {RANKS.get(name, 2)} "
    assert command in docstring

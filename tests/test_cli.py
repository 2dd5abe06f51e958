"""The command `keras-spmd`, as a user starts it: in processes of its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jobs import is_running
from keras_spmd import cli
from keras_spmd.commands import _checks, doctor

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KERAS_BACKEND")
COMMAND = [sys.executable, "-m", "keras_spmd.cli"]


def environment(**more):
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    return {**env, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def keras_spmd(*words, cwd=None, timeout=120, drop=(), **env):
    env = {k: v for k, v in environment(**env).items() if k not in drop}
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.parametrize("how", ["-m keras_spmd", "-m keras_spmd.cli", "keras-spmd"])
def test_help_lists_the_commands_without_importing_torch(how, tmp_path):
    (tmp_path / "keras-spmd").write_text(  # as pip writes it
        "import sys\nfrom keras_spmd.cli import main\nsys.exit(main())\n"
    )
    python = [sys.executable, "-X", "importtime", *how.split(), "--help"]
    result = subprocess.run(
        python, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    for command in cli.COMMANDS:
        assert f"  {command.name} " in result.stdout
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "keras_spmd._starting" in imported
    assert not imported & {"torch", "keras", "numpy"}


def test_a_command_that_needs_keras_gets_the_whole_package(tmp_path):
    code = """
import sys
from keras_spmd import _starting, cli
import keras_spmd
assert "keras" not in sys.modules and not hasattr(keras_spmd, "ShardingWarning")
cli.load(cli.find("convert"))
assert "keras" not in sys.modules
_starting.import_all()
import keras
keras.distribution.set_distribution(keras.distribution.DataParallel())
print(keras_spmd.is_dtensor.__module__, keras_spmd.ShardingWarning.__name__)
"""
    (tmp_path / "keras-spmd").write_text(code)
    env = environment()
    python = [sys.executable, str(tmp_path / "keras-spmd")]
    result = subprocess.run(python, env=env, capture_output=True, text=True, timeout=100)
    assert result.stdout == "keras_spmd._promotion ShardingWarning\n", result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rum"], "no command 'rum'. Did you mean 'run'?"),
        (["run"], "required: script.py"),
        (["run", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["run", "-n", "0", __file__], "-n must be at least 1, got 0"),
        (["run", "-n", "2", "--nproc-per-node", "2", __file__], "mean the same"),
        (["run", "--max-restarts", "-1", __file__], "max_restarts"),
        (["run", "--output", "loud", __file__], "invalid choice: 'loud'"),
    ],
)
def test_wrong_usage_is_a_message_and_exit_code_2(words, message):
    result = keras_spmd(*words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_another_backend_is_an_error():
    result = keras_spmd("run", __file__, KERAS_BACKEND="jax")
    assert result.returncode == 2
    assert "KERAS_BACKEND is 'jax'" in result.stderr


PLACE = """
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["KERAS_BACKEND"], sys.argv[1:])
print("note of", os.environ["RANK"], file=sys.stderr)
"""


def test_rank_0_speaks_and_the_arguments_arrive(script):
    path = script(PLACE)
    result = keras_spmd("run", "-n", 2, path, "--output", "mine", "-n", "7")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "0 2 torch ['--output', 'mine', '-n', '7']\n"
    assert result.stderr == "note of 0\n"


def test_lines_get_the_number_of_their_rank(script):
    result = keras_spmd("run", "-n", 3, "--output", "prefix", script(PLACE))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{r}] {r} 3 torch []" for r in range(3)]
    assert sorted(result.stderr.splitlines()) == [f"[{r}] note of {r}" for r in range(3)]


def test_a_host_without_gpus_gets_two_processes_and_each_its_cores(script):
    path = script(PLACE + "print('threads', os.environ['OMP_NUM_THREADS'])")
    result = keras_spmd(
        "run", "--output", "all", path, drop=["OMP_NUM_THREADS"], CUDA_VISIBLE_DEVICES=""
    )
    assert result.returncode == 0, result.stderr
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(result.stdout.splitlines()) == [
        "0 2 torch []",
        "1 2 torch []",
        f"threads {share}",
        f"threads {share}",
    ]


def test_a_module_runs_as_python_m_would(script, tmp_path):
    script("import sys; print(__name__, __spec__.name, sys.argv[0][-9:])", "modul.py")
    result = keras_spmd("run", "-n", 1, "-m", "modul", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "__main__ modul /modul.py\n"


def test_a_script_is_the_main_module(script, tmp_path):
    """Processes that it spawns find its functions, and it finds the modules beside it."""
    script("WORD = 'beside'", "neighbour.py")
    path = script(
        "import multiprocessing, neighbour\n"
        "def work(x):\n    return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(neighbour.WORD, pool.map(work, [1, 2]), __file__[-9:])\n"
    )
    result = keras_spmd("run", "-n", 1, path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "beside [2, 3] script.py\n"


def test_options_of_torchrun_reach_it(script, tmp_path):
    path = script(
        "import os, sys\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['ROLE_NAME'])\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(5)\n"
    )
    result = keras_spmd("run", "-n", 1, "--max-restarts", 1, "--role=worker", path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "attempt 0 worker\nattempt 1 worker\n"


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("raise OSError('bad disk')", 1)],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(ending, code, script):
    path = script(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('last words', file=sys.stderr)\n"
        f"    {ending}\n"
        "time.sleep(60)\n"
    )
    result = keras_spmd("run", "-n", 2, path, timeout=50)
    assert result.returncode == code, result.stderr
    assert "last words" in result.stderr
    assert "rank 1 ended with" in result.stderr
    assert result.stderr.count("Traceback") == ("raise" in ending)


FAILING = """
import keras, keras_spmd, torch
from keras_spmd.distribution_lib import process_id
keras.distribution.set_distribution(keras.distribution.DataParallel())
if process_id() == 1:
    raise LookupError("the rows have run away")
while True:
    torch.distributed.all_reduce(torch.ones(2))
"""


@pytest.mark.parametrize("output", ["rank0", "prefix"])
def test_the_traceback_of_the_failing_rank_comes_first_and_once(output, script):
    path = script(FAILING)
    result = keras_spmd("run", "-n", 2, "--output", output, path)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    if output == "rank0":
        assert lines[0] == "keras-spmd: rank 1 of 2 failed:"
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[2] == f'  File "{path}", line 6, in <module>'
    else:
        assert lines[0] == "[1] Traceback (most recent call last):"
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count("LookupError: the rows have run away") == 1


WAITING = """
import os, sys, subprocess, time
child = subprocess.Popen(["sleep", "300"])
with open(f"{os.path.dirname(__file__)}/ids.{os.environ['RANK']}", "w") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
try:
    time.sleep(300)
finally:
    open(f"{os.path.dirname(__file__)}/cleaned.{os.environ['RANK']}", "w").close()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_everything(number, code, script, tmp_path):
    path = script(WAITING)
    command = [*COMMAND, "run", "-n", "2", str(path)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ids = [int(word) for rank in (0, 1) for word in wait_for(tmp_path / f"ids.{rank}").split()]
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code
    said = "\nkeras-spmd: interrupted. Another Ctrl-C ends the ranks at once.\n"
    assert (out, err) == ("", said if number == signal.SIGINT else "")
    assert not [i for i in ids if is_running(i)]
    if number == signal.SIGINT:  # a script may still save what it has
        assert (tmp_path / "cleaned.0").exists()
        assert (tmp_path / "cleaned.1").exists()


def test_ranks_end_when_their_launcher_is_killed(script, tmp_path):
    path = script(WAITING)
    process = subprocess.Popen([*COMMAND, "run", "-n", "1", str(path)], env=environment())
    try:
        ids = [int(word) for word in wait_for(tmp_path / "ids.0").split()]
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while any(map(is_running, ids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [i for i in ids if is_running(i)]


def wait_for(path, timeout=60):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            text = path.read_text()
            if text.endswith("\n"):
                return text
        time.sleep(0.05)
    raise AssertionError(f"{path} was never written")


def test_a_file_for_slurm_is_a_shell_script_with_all_options(tmp_path):
    words = ["-n", 8, "--nnodes", 4, "--print", "slurm", "--max-restarts", 2, "-m", "my.train"]
    result = keras_spmd("run", *words, "--name", "two words")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=my.train\n#SBATCH --nodes=4\n")
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in text
    assert "--max-restarts 2 -m my.train --name 'two words'\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_the_commands_for_hosts_meet(script):
    """What is printed for two hosts works, both of them on this one."""
    path = script(PLACE)
    result = keras_spmd(
        "run", "-n", 1, "--nnodes", 2, "--master-addr", "localhost", "--print", "hosts", path
    )
    assert result.returncode == 0, result.stderr
    commands = [line for line in result.stdout.splitlines() if line.startswith("keras-spmd ")]
    port = str(20000 + os.getpid() % 10000)
    hosts = [
        subprocess.Popen(
            [*COMMAND, *command.replace("29500", port).split()[1:]],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    texts = [host.communicate(timeout=120) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], texts
    assert [text[0] for text in texts] == ["0 2 torch []\n", ""]


def test_doctor_tests_the_contract_and_the_links_of_this_host():
    result = keras_spmd("doctor", "-n", 2, "--json", KERAS_TORCH_DEVICE="cpu", timeout=400)
    report = json.loads(result.stdout)
    assert result.returncode == 0, report
    assert report["ok"] is True
    assert [row["status"] for row in report["contract"]] == ["ok"] * 5, report["contract"]
    assert {row["name"] for row in report["versions"]} == {"python", "torch", "keras", "keras_spmd"}
    speeds = {(row["collective"], row["bytes"]): row["bus_gb_per_s"] for row in report["bandwidth"]}
    assert {name for name, _ in speeds} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert len(speeds) == 9
    assert all(speed > 0 for speed in speeds.values())


def test_doctor_finds_what_is_wrong_with_the_environment():
    result = keras_spmd(
        "doctor",
        "--no-self-test",
        drop=["OMP_NUM_THREADS"],
        COLUMNS="300",
        KERAS_BACKEND="jax",
        KERAS_SPMD_JOIN_TIMEOUT="soon",
        KERAS_SPMD_CHEKC="1",
        WORLD_SIZE="8",
    )
    assert result.returncode == 1
    lines = [line.strip() for line in result.stdout.splitlines()]

    def row(name):
        (number,) = [i for i, line in enumerate(lines) if name in line.split()[:3]]
        return lines[number], lines[number + 1]

    assert row("KERAS_BACKEND")[0].startswith("broken")
    assert row("KERAS_BACKEND")[1] == "-> export KERAS_BACKEND=torch"
    assert row("KERAS_SPMD_JOIN_TIMEOUT")[0].startswith("broken")
    assert "must be a number, got 'soon'" in row("KERAS_SPMD_JOIN_TIMEOUT")[1]
    assert "did you mean KERAS_SPMD_CHECK?" in row("KERAS_SPMD_CHEKC")[1]
    assert row("OMP_NUM_THREADS")[0].startswith("warning")
    assert "unset WORLD_SIZE" in row("launcher")[1]
    assert lines[-1] == "Something is broken."


def test_doctor_calls_wrong_results_broken():
    """A result that is off, a failed exercise and a false statement are all found."""
    right = {"loss": np.array([1.0, 2.0]), "all rows": True}
    assert doctor._difference(right, right) is None
    off = {**right, "loss": np.array([1.0, 2.1])}
    assert "loss differs from one device's by 0.1" in doctor._difference(off, right)
    assert "not so" in doctor._difference({**right, "all rows": False}, right)
    assert "failed with ValueError" in doctor._difference(ValueError("x"), right)
    nothing = {**right, "loss": np.array([np.nan, 2.0])}
    assert "differs" in doctor._difference(nothing, right)


def test_doctor_knows_what_a_link_should_carry():
    topology = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-95\nGPU1\tNV18\t X \t0-95\n"
    assert _checks.link_gb_per_s(topology) == 450
    assert _checks.link_gb_per_s(topology.replace("NV18", "PHB")) is None
    rows = [{"collective": "all_reduce", "bus_gb_per_s": s} for s in (20.0, 100.0)]
    assert [c.status for c in doctor._compare_with_link(rows, 450.0)] == ["warning"]
    assert [c.status for c in doctor._compare_with_link(rows, 150.0)] == ["ok"]
    assert [c.status for c in doctor._compare_with_link(rows, None)] == ["ok"]


def test_doctor_needs_two_processes():
    result = keras_spmd("doctor", "-n", 1)
    assert result.returncode == 2
    assert "-n must be at least 2" in result.stderr


@pytest.fixture(scope="module")
def bash_completion(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "keras-spmd.bash"
    result = keras_spmd("completion", "bash")
    assert result.returncode == 0, result.stderr
    path.write_text(result.stdout)
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["d"], ["doctor"]),
        (["run", "--out"], ["--output"]),
        (["run", "--output", ""], ["rank0", "prefix", "all"]),
        (["run", "--max-r"], ["--max-restarts"]),
        (["run", "-n", "2", "train.py", "--out"], []),
        (["run", "tr"], []),
        (["doctor", "--j"], ["--json"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes(line, expected, bash_completion):
    words = " ".join(f"'{word}'" for word in ["keras-spmd", *line])
    code = f"""
    source {bash_completion}
    COMP_WORDS=({words})
    COMP_CWORD={len(line)}
    _keras_spmd
    printf '%s\\n' "${{COMPREPLY[@]}}"
    complete -p keras-spmd >&2
    """
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=20)
    assert result.stdout.split() == expected
    assert "-F _keras_spmd" in result.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command_and_option(shell):
    result = keras_spmd("completion", shell)
    assert result.returncode == 0, result.stderr
    for command in cli.COMMANDS:
        assert command.name in result.stdout
    for option in ("output", "max-restarts", "json", "no-self-test"):
        assert option in result.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=result.stdout, text=True, timeout=20)
        assert checked.returncode == 0


def test_every_command_has_help_with_examples():
    for command in cli.COMMANDS:
        result = keras_spmd(command.name, "--help")
        assert result.returncode == 0, result.stderr
        assert f"\nexamples:\n  keras-spmd {command.name}" in result.stdout


def test_jobs_of_one_host_meet_at_ports_of_their_own():
    """torch 2.11 would have all of them meet at one."""
    from keras_spmd.commands import _torchrun

    def chosen(*words):
        given = _torchrun.parser().parse_args([*words, "train.py"])
        _torchrun._choose_meeting_point(given)
        return given.standalone, given.master_port

    assert chosen() == (True, 29500)
    assert chosen("--master-port", "1234") == (False, 1234)
    assert chosen("--nnodes", "2", "--master-addr", "a") == (False, 29500)
    backend = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1")
    assert chosen(*backend) == (False, 29500)

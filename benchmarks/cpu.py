"""Steps a second against rivals, on two CPU ranks with a thread each, in one run.

All contestants are started once. In each round each one runs some steps while the others sleep, so
that what the machine does at the time meets all of them; what counts is the ratio of the medians.

python benchmarks/cpu.py [rounds]
"""

import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
JAX_PYTHON = HERE.parent / ".venv-keras" / "bin" / "python"

# Ours, the rival, and the ratio of times that ours must not exceed.
DUELS = [
    ("ours, data parallel", "DDP by hand", 1.0),
    ("ours, tensor parallel", "parallelize_module by hand", 0.9),
    ("ours, data parallel", "Keras on jax, data parallel", 0.65),
    ("ours, tensor parallel", "Keras on jax, tensor parallel", 0.65),
    ("ours, one device", "Keras eager", 0.75),
    ("ours, mesh of one", "ours, one device", 1.01),
    ("ours, small MLP", "Keras eager, small MLP", 0.2),
]
RANKS = {"DDP by hand": 2, "parallelize_module by hand": 2}
RANKS |= {"ours, data parallel": 2, "ours, tensor parallel": 2}


class Contestant:
    """The processes of one contestant; rank 0 tells the time."""

    def __init__(self, name: str) -> None:
        self.name, self.times = name, []
        self.steps = 200 if "MLP" in name else 4
        ranks = RANKS.get(name, 1)
        is_jax = "jax" in name
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {
            **os.environ,
            "KERAS_BACKEND": "jax" if is_jax else "torch",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if not is_jax:
            env["OMP_NUM_THREADS"] = "1"
        self.processes = [
            subprocess.Popen(
                [str(JAX_PYTHON) if is_jax else sys.executable, str(HERE / "cpu_worker.py"), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=env
                if ranks == 1
                else {
                    **env,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                },
            )
            for rank in range(ranks)
        ]
        self.first = max(float(line) for line in self._answers())

    def _answers(self) -> list[str]:
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError(f"'{self.name}' died.")
        return [line.split()[0] for line in lines]

    def round(self) -> None:
        for process in self.processes:
            process.stdin.write(f"{self.steps}\n")
            process.stdin.flush()
        self.times.append(max(map(float, self._answers())))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    names = dict.fromkeys(name for ours, rival, _ in DUELS for name in (ours, rival))
    contestants: dict[str, Contestant] = {}
    try:
        for name in names:
            contestants[name] = Contestant(name)
            print(f"{name}: first step {contestants[name].first:.1f} s", flush=True)
        for i in range(rounds + 1):
            for contestant in contestants.values():
                contestant.round()
                if i == 0:
                    contestant.times.clear()  # to warm up
    finally:
        for contestant in contestants.values():
            contestant.stop()
    print()
    for name, contestant in contestants.items():
        print(f"{name:32}{statistics.median(contestant.times) * 1e3:10.2f} ms a step")
    print()
    failed = 0
    for ours, rival, limit in DUELS:
        ratio = statistics.median(contestants[ours].times) / statistics.median(
            contestants[rival].times
        )
        failed += ratio > limit
        verdict = "" if ratio <= limit else "  TOO SLOW"
        print(f"{ours:22} / {rival:32}{ratio:6.2f}   (at most {limit}){verdict}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

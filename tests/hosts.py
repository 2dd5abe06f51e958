"""Two hosts on one machine: network namespaces that a cable joins."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from jobs import environment

NETWORK = "10.211.77."
MEETING = f"{NETWORK}1"


def ip(*words, check=True):
    command = ["ip", *map(str, words)]
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


class Job:
    """A launcher on a host. What it and its ranks write is read while they run."""

    def __init__(self, process):
        self.process = process
        self.lines = {"stdout": [], "stderr": []}
        self.changed = threading.Condition()
        self.readers = [
            threading.Thread(target=self._read, args=[name, getattr(process, name)], daemon=True)
            for name in self.lines
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, name, stream):
        for line in stream:
            with self.changed:
                self.lines[name].append(line)
                self.changed.notify_all()

    def text(self, name="stderr"):
        with self.changed:
            return "".join(self.lines[name])

    def wait_for(self, text, name="stderr", count=1, timeout=60):
        """Wait until so many lines have the text; those lines."""
        deadline = time.monotonic() + timeout
        with self.changed:
            while len(found := [line for line in self.lines[name] if text in line]) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"no {text!r} within {timeout} s:\n" + "".join(self.lines[name])
                self.changed.wait(left)
        return found

    def end(self, timeout):
        """Its exit status."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text()[-8000:]) from None
        for reader in self.readers:
            reader.join(5)
        return self.process.returncode


class Host:
    """A host with a network of its own."""

    def __init__(self, number):
        self.name = f"keras-spmd-{os.getpid()}-{number}"
        self.address, self.link = f"{NETWORK}{number + 1}", f"cable{number}"
        self.jobs = []

    def start(self, *command, **env):
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *map(str, command)],
            env=environment(PYTHONUNBUFFERED="1", **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.jobs.append(Job(process))
        return self.jobs[-1]

    def torchrun(self, script, *args, nodes="2", restarts=3, **env):
        """One rank of a job. The launchers meet at the first host."""
        # Short, so that tests are: how soon a host is missed, and how long others are waited for.
        conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
        # A launcher would find out by the name of the host, which is the same for both.
        conf += f",is_host={int(self.address == MEETING)}"
        return self.start(
            *[sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes],
            *["--nproc-per-node", 1, "--max-restarts", restarts, "--local-addr", self.address],
            *["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{MEETING}:29400"],
            *["--rdzv-id", "job", "--rdzv-conf", conf, script, *args],
            **env,
        )

    def plug(self, state):
        """Set the link "up" or "down"."""
        ip("-n", self.name, "link", "set", self.link, state)

    def kill(self):
        """End everything that runs here, at once."""
        for pid in ip("netns", "pids", self.name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def two_hosts():
    """Two hosts, which are gone afterwards with everything that runs there."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("namespaces take root and the command ip")
    hosts = [Host(0), Host(1)]
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
                ip("-n", host.name, "link", "set", "lo", "up")
            a, b = hosts
            ip(
                *["link", "add", a.link, "netns", a.name, "type", "veth"],
                *["peer", "name", b.link, "netns", b.name],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces can't be made here: {error.stderr.strip()}")
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.link)
            host.plug("up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
        for host in hosts:
            for job in host.jobs:
                job.end(30)
                for stream in (job.process.stdout, job.process.stderr):
                    stream.close()
            ip("netns", "del", host.name, check=False)

"""A step that keeps the host busy is recorded once and replayed as a whole.

Launching the kernels of a small model takes longer than running them, and a larger one waits a
little before each. A CUDA graph launches all of them at once. It keeps the memory of a step for
itself, or for other recorded steps, so a step of few long kernels is left as it is.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_spmd import _settings
from keras_spmd._notices import warn_once

_WARM_UP = 3
# The share of a step's time that the host may take to launch it.
_HOST_SHARE = 0.4


_recorded: "weakref.WeakSet[Replayed]" = weakref.WeakSet()


def _pool() -> Any:
    """The memory of all recorded steps, one of which runs at a time.

    It ends with the last of them: torch can't record into it any more.
    """
    for step in _recorded:
        if step.graph is not None:
            return step.graph.pool()
    return torch.cuda.graph_pool_handle()


def _clean_up() -> None:
    """After a recording that failed, torch's generator believes that it still goes on.

    Every random number would be an error from then on. A recording that goes well sets it right.
    """
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")  # torch warns of a graph of nothing.


class Replayed:
    """Runs a compiled step, and records it when that pays.

    Args:
        run: The step: a list of state and inputs to a list of results; state is written in place.
        state_count: How many of its inputs are state, which stays where it is.
    """

    def __init__(self, run: Callable, state_count: int) -> None:
        self.run, self.state_count = run, state_count
        self.forget()

    def forget(self) -> None:
        """The state lies elsewhere now."""
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.host_seconds = 0.0
        self.events: list[torch.cuda.Event] = []

    def __call__(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.graph is not None:
            if self.inputs:
                torch._foreach_copy_(self.inputs, args[self.state_count :])
            self.graph.replay()
            return [output.clone() for output in self.outputs]
        self.calls += 1
        if self.calls <= _WARM_UP:
            return self.run(args)
        if self.calls == _WARM_UP + 1:
            return self._measured(args)
        if self.calls == _WARM_UP + 2 and self._pays():
            self._record(args)
            return self(args) if self.graph is not None else self.run(args)
        return self.run(args)

    def _measured(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        torch.cuda.current_stream().synchronize()
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start = time.perf_counter()
        self.events[0].record()
        result = self.run(args)
        self.events[1].record()
        self.host_seconds = time.perf_counter() - start
        return result

    def _pays(self) -> bool:
        wanted = _settings.cuda_graphs()
        if wanted is not None:
            return wanted
        before, after = self.events
        after.synchronize()
        return self.host_seconds > _HOST_SHARE * before.elapsed_time(after) / 1e3

    def _record(self, args: list[torch.Tensor]) -> None:
        state, leaves = args[: self.state_count], args[self.state_count :]
        graph = torch.cuda.CUDAGraph()
        inputs = [leaf.clone() for leaf in leaves]
        # What steps used until now would lie idle beside the graph's memory.
        torch.cuda.empty_cache()
        try:
            # Other threads may go on allocating: they read the next batch.
            with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
                outputs = list(self.run([*state, *inputs]))
        except RuntimeError as error:
            warn_once(
                ("cuda graph", id(self)),
                f"A step could not be recorded as a CUDA graph, and is launched op by op: {error}",
            )
            _clean_up()
            return
        self.graph, self.inputs, self.outputs = graph, inputs, outputs
        _recorded.add(self)


def can_be_replayed(inputs: Sequence[torch.Tensor], collectives: int) -> bool:
    """Whether a graph reads nothing on the host, and no other rank has to take part."""
    return bool(inputs) and collectives == 0 and all(x.is_cuda for x in inputs)

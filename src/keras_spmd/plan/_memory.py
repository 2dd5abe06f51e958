"""What lies in a device's memory during a step: its kernels one by one, as the allocator sees them.

Inductor brings kernels into an order that needs little memory, if it finds a better one than that
of the graph; so does this.
"""

from dataclasses import dataclass

from keras_spmd.graph._collectives import is_collective
from keras_spmd.plan._kernels import Buffer, Kernel
from keras_spmd.plan._ops import Kind, nbytes_of


@dataclass(frozen=True)
class Moment:
    """What is in memory while one kernel runs, beside variables and batch."""

    kernel: Kernel
    activations: int
    gradients: int

    @property
    def nbytes(self) -> int:
        return self.activations + self.gradients

    @property
    def phase(self) -> str:
        return self.kernel.origin.phase

    @property
    def layer(self) -> str:
        return self.kernel.origin.layer


def moments_of(kernels: list[Kernel], *, for_gpu: bool) -> list[Moment]:
    """What is in memory at each kernel, in the better of two orders."""
    orders = [kernels, _least_memory_first(kernels)]
    walks = [_walk(order, for_gpu) for order in orders]
    return min(walks, key=lambda moments: max((m.nbytes for m in moments), default=0))


def _walk(kernels: list[Kernel], for_gpu: bool) -> list[Moment]:
    memory = _Memory(kernels)
    live, moments = {True: 0, False: 0}, []
    for kernel in kernels:
        born, dying = memory.born(kernel), memory.dying(kernel)
        for buffer in born:
            live[buffer.is_gradient] += buffer.nbytes
        now = dict(live)
        if not for_gpu:
            now[False] += _scratch(kernel)
        reused = _written_over(kernel, born, dying)
        if reused is not None:
            now[reused.is_gradient] -= reused.nbytes
        moments.append(Moment(kernel, now[False], now[True]))
        memory.done(kernel)
        for buffer in dying:
            live[buffer.is_gradient] -= buffer.nbytes
    return moments


class _Memory:
    """Which buffers are there, while kernels run one after the other."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.there: set[Buffer] = set()
        buffers = {b for kernel in kernels for b in (*kernel.reads, *kernel.writes)}
        self.left = {b: len(b.readers) + len(b.writers) for b in buffers if not b.is_input}

    def born(self, kernel: Kernel) -> list[Buffer]:
        return [b for b in kernel.writes if b not in self.there]

    def dying(self, kernel: Kernel) -> list[Buffer]:
        """Buffers that nobody needs after this kernel."""
        touched = {b for b in (*kernel.reads, *kernel.writes) if not b.is_input}
        return [b for b in touched if self.left[b] == (b in kernel.reads) + (b in kernel.writes)]

    def done(self, kernel: Kernel) -> None:
        self.there.update(kernel.writes)
        for buffer in (*kernel.reads, *kernel.writes):
            if not buffer.is_input:
                self.left[buffer] -= 1

    def growth(self, kernel: Kernel) -> int:
        """By how much memory grows when this kernel is next."""
        born, dying = self.born(kernel), self.dying(kernel)
        return sum(b.nbytes for b in born) - sum(b.nbytes for b in dying)


def _least_memory_first(kernels: list[Kernel]) -> list[Kernel]:
    """An order in which always comes next what frees most, or takes least, of all that can."""
    waits_for, followers = _dependences(kernels)
    memory, order = _Memory(kernels), []
    ready = {kernel for kernel in kernels if not waits_for[kernel]}
    while ready:
        following = min(ready, key=lambda kernel: (memory.growth(kernel), kernel.position))
        ready.remove(following)
        order.append(following)
        memory.done(following)
        for kernel in followers[following]:
            waits_for[kernel] -= 1
            if not waits_for[kernel]:
                ready.add(kernel)
    return order


def _dependences(kernels: list[Kernel]) -> tuple[dict[Kernel, int], dict[Kernel, list[Kernel]]]:
    """For each kernel how many others it waits for, and who waits for it."""
    before: dict[Kernel, set[Kernel]] = {}
    for kernel in kernels:
        before[kernel] = {w for buffer in kernel.reads for w in buffer.writers}
        if kernel.kind is Kind.WRITE:
            # Who reads a variable reads its old value.
            target = kernel.node.all_input_nodes[0]
            inputs = [b for b in kernel.reads if b.is_input and b.node is target]
            before[kernel] |= {r for b in inputs for r in b.readers if r.kind is not Kind.WRITE}
        if kernel.kind is Kind.OUTPUT:
            before[kernel] |= set(kernels)
        before[kernel].discard(kernel)
    followers: dict[Kernel, list[Kernel]] = {kernel: [] for kernel in kernels}
    for kernel, others in before.items():
        for other in others:
            followers[other].append(kernel)
    return {kernel: len(others) for kernel, others in before.items()}, followers


def _scratch(kernel: Kernel) -> int:
    """What gloo needs to sum and scatter: a copy of what goes in."""
    node = kernel.node
    if not is_collective(node) or "reduce_scatter" not in str(node.target):
        return 0
    return nbytes_of(node.all_input_nodes[0].meta["val"])


def _written_over(kernel: Kernel, born: list[Buffer], dying: list[Buffer]) -> Buffer | None:
    """The input that an elementwise kernel, or a sum over ranks, writes its result into.

    What a library has computed is copied before it is summed.
    """
    is_sum = "all_reduce" in str(kernel.node.target)
    if not born or not (kernel.kind is Kind.ELEMENTWISE or is_sum):
        return None
    fitting = [b for b in dying if b.nbytes == born[0].nbytes and b not in born]
    if is_sum:
        fitting = [b for b in fitting if b.writers[0].kind is not Kind.WHOLE]
    return fitting[0] if fitting else None

"""What a user should know of a plan: what doesn't fit, what is whole everywhere, what is moved."""

from keras_spmd import _settings
from keras_spmd.plan._report import Memory, Transfer, Variable
from keras_spmd.plan._sizes import size

# A smaller transfer of activations is nobody's trouble.
_SMALL = 2**20


def advice(
    memory: Memory,
    limit: int,
    variables: list[Variable],
    transfers: list[Transfer],
    mesh: dict[str, int],
    batch: list[tuple[int, ...]],
    batch_axis: str,
) -> list[str]:
    """Sentences, the gravest first."""
    return [
        *_too_much(memory, limit),
        *_replicated(variables, limit, mesh),
        *_moved_activations(transfers, variables),
        *_uneven(variables, mesh),
        *_uneven_batch(batch, batch_axis, mesh[batch_axis]),
    ]


def _too_much(memory: Memory, limit: int) -> list[str]:
    if memory.peak <= limit:
        return []
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer_state,
        "activations": memory.activations,
    }
    largest = max(parts, key=lambda name: parts[name])
    fix = (
        "Use a smaller batch, more devices on the data axis, or keras.RematScope."
        if largest == "activations"
        else "Shard the weights over more devices, e.g. over the data axis too."
    )
    return [
        f"It does not fit: {size(memory.peak)} are needed and {size(limit)} are there. Most of it "
        f"are {largest} ({size(parts[largest])}). {fix}"
    ]


def _replicated(variables: list[Variable], limit: int, mesh: dict[str, int]) -> list[str]:
    devices = max(mesh.values())
    total = sum(v.nbytes for v in variables)
    whole = [v for v in variables if devices > 1 and v.local_nbytes == v.nbytes and v.shape]
    giants = [
        v
        for v in whole
        if v.nbytes > 0.02 * limit
        or (len(whole) < len(variables) and v.nbytes > _settings.large_share() * total)
    ]
    return [
        f"Every device holds all of '{v.path}' ({size(v.nbytes)}). A layout for it would divide it."
        for v in sorted(giants, key=lambda v: -v.nbytes)[:5]
    ]


def _moved_activations(transfers: list[Transfer], variables: list[Variable]) -> list[str]:
    moved = [
        t
        for t in transfers
        if t.of == "activations"
        and t.kind != "all_reduce"
        and t.nbytes >= _SMALL
        and t.nbytes > _gathered_weights(t, variables)
    ]
    told = [
        f"{size(t.nbytes)} of activations go through {_a(t.kind)} over '{t.axis}' in the {t.phase} "
        f"pass{f', {t.count} times' if t.count > 1 else ''}, for {', '.join(t.layers[:3])}."
        for t in sorted(moved, key=lambda t: -t.nbytes * t.count)[:5]
    ]
    if told:
        told[-1] += (
            " Layouts that agree from one layer to the next move less: compare with a recipe of "
            "keras_spmd.layouts, or let keras_spmd.layouts.auto choose."
        )
    return told


def _gathered_weights(transfer: Transfer, variables: list[Variable]) -> int:
    """What gathering the weights of its layers would send instead, each way."""
    return sum(
        v.nbytes
        for v in variables
        if transfer.axis in v.axes and v.path.rpartition("/")[0] in transfer.layers
    )


def _a(kind: str) -> str:
    return f"an {kind}" if kind.startswith("a") else f"a {kind}"


def _uneven(variables: list[Variable], mesh: dict[str, int]) -> list[str]:
    found = []
    for v in variables:
        for dim, axis in enumerate(v.axes):
            if axis is not None and v.shape[dim] % mesh[axis]:
                cut = v.local_shape[dim] != v.shape[dim]
                what = (
                    f"the first device holds {v.local_shape[dim]} and others fewer"
                    if cut
                    else "it is too small to be divided, and whole everywhere"
                )
                found.append(
                    f"Dim {dim} of '{v.path}' has {v.shape[dim]} elements for {mesh[axis]} devices "
                    f"of '{axis}': {what}."
                )
    more = [f"{len(found) - 4} more variables are divided unevenly."] if len(found) > 5 else []
    return found[: 4 if more else 5] + more


def _uneven_batch(batch: list[tuple[int, ...]], axis: str, devices: int) -> list[str]:
    rows = next((shape[0] for shape in batch if shape), 0)
    if not rows or rows % devices == 0:
        return []
    return [f"A batch of {rows} rows doesn't divide evenly over the {devices} devices of '{axis}'."]

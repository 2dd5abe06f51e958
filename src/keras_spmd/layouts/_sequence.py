"""Activations between layers that are divided: each rank has its part of the sequence.

Where ranks would add their sums and all keep the result, each keeps the sums of its own places.
Normalization, dropout and residuals are done on these, and a layer that is divided by columns gets
all places again.
"""

from collections.abc import Sequence

from keras_spmd.layouts._dims import Dim
from keras_spmd.layouts._trace import Trace

OutputLayouts = dict[str, tuple[str | None, ...]]


def sequence_layouts(
    trace: Trace, chosen: Sequence[Dim], axis: str, data_axis: str | None
) -> OutputLayouts:
    """Layouts of outputs, by the paths of the layers: of those that end in a sum, and their ends.

    Args:
        chosen: The dims that are sharded over `axis`.
    """
    sums = [s.layer_path for dim in chosen for s in dim.sums]
    layouts: OutputLayouts = {}
    for path in dict.fromkeys(sums):
        if _is_sequence(trace, path):
            layouts[path] = (data_axis, axis, None)
    for path, rows, columns in trace.products:
        makes = any(atom in chosen for atom in columns.atoms())
        ends = any(atom in chosen for atom in rows.atoms())
        if makes and not ends and path not in layouts and _is_sequence(trace, path):
            layouts[path] = (data_axis, None, None)
    return {f"{path}/output": layout for path, layout in layouts.items()}


def _is_sequence(trace: Trace, path: str) -> bool:
    """Whether a layer's output has rows, places and features."""
    return bool(path) and len(trace.outputs.get(path, ())) == 3

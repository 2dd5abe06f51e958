"""Which variable of a model was saved under which name.

Keras numbers layers that have no name of their own (`dense_3`), and a model that is made twice, or
after another one, has other numbers. A `Sequential` that is made from its config leaves its own
name out of paths. So where names differ they are compared without both, in their order. Names that
somebody gave are compared as they are.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.utils.naming import to_snake_case

OPTIMIZER, OPTIMIZERS = "optimizer/", "optimizers/"


def matched(variables: Mapping[str, Any], saved: Mapping[str, Any], model: Any) -> dict[str, str]:
    """For each variable of a model, the name under which it was saved."""
    if set(variables) == set(saved):
        return {name: name for name in variables}
    names = _Names(model)
    mine, theirs = names.grouped(variables), names.grouped(saved)
    found: dict[str, str] = {}
    for group, ours in mine.items():
        others = theirs.get(group, [])
        if len(ours) == len(others) and set(ours) != set(others):
            # All have moved by as many numbers: some names may be there on both sides.
            found.update(zip(ours, others, strict=True))
        else:
            found.update((name, name) for name in ours if name in others)
    return found


class _Names:
    """What is Keras's in the names of a model's variables."""

    def __init__(self, model: Any) -> None:
        layers = [model, *model._flatten_layers()]
        attributes = [getattr(model, "optimizer", None), *vars(model).values()]
        owners = [*layers, *(x for x in attributes if isinstance(x, BaseOptimizer))]
        given = {to_snake_case(type(owner).__name__) for owner in owners}
        given |= {"seed_generator", "variable"}
        self.numbered = _any_of(given) + r"_\d+(?=[/_#]|$)"
        sequences = {layer.name for layer in layers if isinstance(layer, keras.Sequential)}
        self.sequences = _any_of({re.sub(r"_\d+$", "", name) for name in sequences})

    def grouped(self, names: Iterable[str]) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(self._plain(name), []).append(name)
        return groups

    def _plain(self, name: str) -> str:
        if name.startswith("model/"):
            plain = re.sub(f"(?<=/){self.numbered}", r"\1", name)
        elif name.startswith((OPTIMIZER, OPTIMIZERS)):
            # An optimizer puts an underscore between the parts of a variable's path.
            plain = re.sub(f"(?<=[/_]){self.numbered}", r"\1", name)
        else:
            plain = re.sub(r"_\d+(?=[/#_]|$)", "", name)
        # As a folder of a weight's path, or at the front of what an optimizer calls it.
        return re.sub(f"(?<=/){self.sequences}(?:_\\d+)?[/_]", "", plain)


def _any_of(words: Iterable[str]) -> str:
    """A group of a pattern: nothing matches if there are no words."""
    # The longest first: `conv2d_transpose` begins with `conv2d`.
    return "(" + ("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)") + ")"

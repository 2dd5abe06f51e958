"""The step function of a model with `jit_compile=True`: a graph for each kind of batch.

The first batch of its kind is captured and compiled, and the graph is used for all that follow.
What can't be captured runs eagerly, and the user is told why.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from keras.src import tree
from keras.src.backend import config as keras_config
from keras.src.backend.common import global_state
from torch.distributed.tensor import DTensor

from keras_spmd import _data, _layouts, _random, _settings, _transfer
from keras_spmd._notices import warn_once
from keras_spmd.graph import _attributes, _reasons
from keras_spmd.graph._capture import CannotCapture, Captured, capture, local_of, slots_of
from keras_spmd.graph._collectives import assert_same_on_all_ranks, optimise
from keras_spmd.graph._compile import compile_graph
from keras_spmd.graph._scalars import keep_on_device

capture_limit = 16


class _Entry:
    """What is known of one kind of batch."""

    def __init__(self) -> None:
        self.is_eager = False
        self.captured: Captured | None = None
        self.run: Callable | None = None
        self.inputs: list[torch.Tensor] = []
        self.values: list[tuple[Any, torch.Tensor]] = []
        self.seconds = 0.0


class Step:
    """`model.train_function` and its like.

    Args:
        model: The model.
        kind: "train", "test" or "predict".
        eager: What to call where there is no graph.
    """

    def __init__(self, model: Any, kind: str, eager: Callable) -> None:
        self.model, self.kind, self.eager = model, kind, eager
        self.entries: dict[tuple, _Entry] = {}
        self.is_given_up = False
        self.failures = 0
        self.is_first = True

    def __call__(self, data: list) -> Any:
        batch = _data.distribute_batch(data[0])
        batch = tree.map_structure(_on_device, batch)
        if self.is_given_up:
            return self._eagerly(batch)
        leaves = [leaf for leaf in tree.flatten(batch) if leaf is not None]
        entry = self._entry(batch, leaves)
        if entry is None:
            return self._eagerly(batch)
        if entry.run is None and not self._prepare(entry, batch):
            return self._eagerly(batch)
        for variable, value in entry.values:
            if variable._value is not value:
                self.entries.clear()
                return self(data)
        with torch.no_grad():
            outputs = entry.run([*entry.inputs, *map(local_of, leaves)])  # type: ignore[misc]
        _transfer.read_ahead()
        return entry.captured.results(outputs)  # type: ignore[union-attr]

    def _eagerly(self, batch: Any) -> Any:
        with _random.layouts_at_hand(batch):
            return self.eager([batch])

    def _entry(self, batch: Any, leaves: list) -> _Entry | None:
        key = (
            tuple((tuple(x.shape), x.dtype, x._spec if _is_dt(x) else None) for x in leaves),
            None if len(leaves) < 2 else str(tree.map_structure(lambda x: x is None, batch)),
            id(_layouts.active_distribution()),
            keras_config.floatx(),
            _attributes.state_of(self.model),
        )
        entry = self.entries.get(key)
        if entry is None:
            if len(self.entries) >= capture_limit:
                self._give_up(leaves)
                return None
            entry = self.entries[key] = _Entry()
        return entry

    def _give_up(self, leaves: list) -> None:
        self.is_given_up = True
        shapes = [tuple(x.shape) for x in leaves]
        others = [[shape for shape, _, _ in key[0]] for key in self.entries]
        changing = [
            i
            for i, shape in enumerate(shapes)
            if len({other[i] for other in others if i < len(other)} | {shape}) > 2
        ]
        what = (
            f"input {changing[0]}, whose shape is {shapes[changing[0]]} now,"
            if changing
            else "an attribute of the model or of a layer"
        )
        warn_once(
            ("captures", id(self)),
            f"The {self.kind} step of '{self.model.name}' was captured {capture_limit} times, "
            f"because {what} keeps changing. It runs eagerly from now on. Pad the input to a few "
            "sizes, or raise keras_spmd.graph._step.capture_limit.",
        )

    def _prepare(self, entry: _Entry, batch: Any) -> bool:
        """Capture and compile; False if this batch must run eagerly."""
        if entry.is_eager:
            return False
        if self.is_first and not all(layer.built for layer in self.model._flatten_layers()):
            # A layer that is built while it is traced would have tensors of the trace for weights.
            self.is_first = False
            return False
        start = time.perf_counter()
        before = _attributes.snapshot(self.model)
        error: Exception | None = None
        try:
            captured = self._capture(batch)
            changed = _attributes.difference(before, _attributes.snapshot(self.model))
            if changed:
                error = _reasons.python_state(changed)
            keep_on_device(captured.module)
            optimise(captured.module)
        except Exception as problem:
            error = problem
        if not assert_same_on_all_ranks(None if error else captured.module):
            _attributes.restore(before)
            self.failures += 1
            # The first step may make what later ones only use, an optimizer's state, say.
            if self.failures > 1 or isinstance(error, CannotCapture):
                entry.is_eager = True
                self.is_given_up = isinstance(error, CannotCapture) or self.failures > 4
                self._say_why(error)
            return False
        entry.captured = captured
        entry.inputs = captured.inputs([])
        leaves = [local_of(x) for x in tree.flatten(batch) if x is not None]
        compiled = compile_graph(captured.module, [*entry.inputs, *leaves])
        entry.run = lambda inputs: compiled(*inputs)
        entry.values = [(s.variable, s.tensor) for s in captured.slots if s.variable is not None]
        entry.seconds = time.perf_counter() - start
        return True

    def _capture(self, batch: Any) -> Captured:
        step = getattr(self.model, f"{self.kind}_step")
        variables = [*self.model.variables, *self.model.metrics_variables]
        # A model that only predicts may never have been compiled.
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            variables += optimizer.variables
        generator = global_state.get_global_attribute("global_seed_generator")
        if generator is not None:
            variables.append(generator.state)
        with _random.layouts_at_hand(batch):
            return capture(
                step,
                slots_of(self.model, variables),
                batch,
                gather_results=self.kind != "predict",
                with_grad=self.kind == "train",
            )

    def _say_why(self, error: Exception | None) -> None:
        if error is None:
            reason = "another rank could not capture it"
        else:
            reason = _reasons.describe(error)
        message = (
            f"The {self.kind} step of '{self.model.name}' runs eagerly, because {reason}. "
            "The results are the same."
        )
        if _settings.strict():
            raise RuntimeError(f"KERAS_SPMD_STRICT: {message}") from error
        warn_once(("eager", id(self)), message)


def _on_device(leaf: Any) -> Any:
    if leaf is None or _is_dt(leaf):
        return leaf
    return _transfer.to_device(_data.as_tensor(leaf))


def _is_dt(x: Any) -> bool:
    return isinstance(x, DTensor)

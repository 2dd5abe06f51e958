"""The step function of a model with `jit_compile=True`: a graph for each kind of batch.

The first batch of its kind is captured and compiled, and the graph is used for all that follow.
What can't be captured runs eagerly, and the user is told why.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from keras.src import tree
from keras.src.backend import config as keras_config
from keras.src.backend.common import global_state

from keras_spmd import _data, _layouts, _random, _settings, _transfer
from keras_spmd._notices import warn_once
from keras_spmd._progress import progress
from keras_spmd._promotion import is_dtensor
from keras_spmd.graph import _attributes, _reasons
from keras_spmd.graph._agreement import Verdict, agree, signature_of
from keras_spmd.graph._capture import Batch, CannotCapture, Captured, capture, slots_of
from keras_spmd.graph._collectives import collectives_of
from keras_spmd.graph._compile import compile_graph
from keras_spmd.graph._cuda_graphs import Replayed, can_be_replayed
from keras_spmd.graph._passes import improved


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Making a graph makes millions of objects; looking through them for garbage takes a while."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Entry:
    """What is known of one kind of batch: its graph, once there is one."""

    def __init__(self) -> None:
        self.is_eager = False
        self.captured: Captured | None = None
        self.run: Callable | None = None
        self.state: list[torch.Tensor] = []
        self.values: list[tuple[int, Any, torch.Tensor]] = []
        self.seconds = {"capture": 0.0, "compile": 0.0}
        self.text: str | None = None  # the graph as captured, where it is checked

    def is_up_to_date(self) -> bool:
        """Whether its variables lie as they did; other tensors of the same kind are taken over."""
        for i, variable, value in self.values:
            new = variable._value
            if new is not value and not self._take(i, new, value):
                return False
        return True

    def _take(self, i: int, new: torch.Tensor, old: torch.Tensor) -> bool:
        if not _are_alike(new, old):
            return False
        slot = self.captured.slots[i]  # type: ignore[union-attr]
        slot.tensor = new
        self.state[i] = slot.local
        if isinstance(self.run, Replayed):
            self.run.forget()
        self._watch()
        return True

    def use(self, captured: Captured, run: Callable) -> None:
        self.captured, self.run = captured, run
        self.state = captured.state()
        self._watch()

    def _watch(self) -> None:
        slots = enumerate(self.captured.slots)  # type: ignore[union-attr]
        self.values = [(i, s.variable, s.tensor) for i, s in slots if s.variable is not None]


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _kind(a) == _kind(b) and a.requires_grad == b.requires_grad and a.stride() == b.stride()


def _kind(x: torch.Tensor) -> tuple:
    return (x.shape, x.dtype, x.device, getattr(x, "_spec", None))


class Step:
    """`model.train_function` and its like.

    Args:
        model: The model.
        kind: "train", "test" or "predict".
        eager: What to call where there is no graph.
    """

    def __init__(self, model: Any, kind: str, eager: Callable) -> None:
        self.model, self.kind, self.eager = model, kind, eager
        self.entries: dict[tuple, Entry] = {}
        self.count = 0  # of entries that there have been
        self.is_given_up = False
        self.reason: str | None = None  # why it runs eagerly, or did for some batch
        self.failures = 0
        self.is_first = True

    def __call__(self, data: list) -> Any:
        leaves, structure = optree.tree_flatten(_data.distribute_batch(data[0]), namespace="keras")
        batch = Batch([_on_device(leaf) for leaf in leaves], structure)
        if self.is_given_up or not all(isinstance(x, torch.Tensor) for x in batch.leaves):
            return self._eagerly(batch)
        entry = self._entry(batch)
        if entry is None or (entry.run is None and not self._prepare(entry, batch)):
            return self._eagerly(batch)
        if not entry.is_up_to_date():
            self.entries = {key: e for key, e in self.entries.items() if e is not entry}
            return self(data)
        if _settings.check():
            self._assert_nothing_frozen(entry, batch)
        with torch.no_grad():
            outputs = entry.run([*entry.state, *batch.locals()])  # type: ignore[misc]
        _transfer.read_ahead()
        return entry.captured.results(outputs)  # type: ignore[union-attr]

    def _eagerly(self, batch: Batch) -> Any:
        """The step itself; its logs are whole, as a graph's are."""
        results = self.eager([batch.data])
        if self.kind == "predict":
            return results
        return tree.map_structure(lambda x: x.full_tensor() if is_dtensor(x) else x, results)

    def _entry(self, batch: Batch) -> Entry | None:
        key = (
            tuple(_kind(x) for x in batch.leaves),
            batch.structure,
            _layouts.active_distribution(),
            keras_config.floatx(),
            _attributes.state_of(self.model),
        )
        entry = self.entries.get(key)
        if entry is None:
            if self.count >= _settings.capture_limit():
                self._give_up(batch.leaves)
                return None
            self.count += 1
            entry = self.entries[key] = Entry()
        return entry

    def _give_up(self, leaves: list) -> None:
        shapes = [tuple(x.shape) for x in leaves]
        others = [[kind[0] for kind in key[0]] for key in self.entries]
        changing = [
            i
            for i, shape in enumerate(shapes)
            if len({tuple(other[i]) for other in others if i < len(other)} | {shape}) > 2
        ]
        what = (
            f"input {changing[0]}, whose shape is {shapes[changing[0]]} now,"
            if changing
            else "an attribute of the model or of a layer"
        )
        self.is_given_up, self.reason = True, f"{what} keeps changing"
        warn_once(
            ("captures", id(self)),
            f"The {self.kind} step of '{self.model.name}' was captured "
            f"{_settings.capture_limit()} times, because {self.reason}. It runs eagerly from now "
            "on. Pad the input to a few sizes, or raise KERAS_SPMD_CAPTURE_LIMIT.",
        )

    @_without_garbage_collection()
    def _prepare(self, entry: Entry, batch: Batch) -> bool:
        """Capture and compile; False if this batch must run eagerly."""
        if entry.is_eager:
            return False
        if self.is_first and not all(layer.built for layer in self.model._flatten_layers()):
            # A layer that is built while it is traced would have tensors of the trace for weights.
            self.is_first = False
            return False
        start = time.perf_counter()
        before = _attributes.snapshot(self.model)
        captured: Captured | None = None
        error: Exception | None = None
        try:
            with progress(f"Capturing the {self.kind} step of {self.model.name}"):
                captured = self._capture(batch)
            changed = _attributes.difference(before, _attributes.snapshot(self.model))
            if changed:
                raise _reasons.python_state(changed)
        except Exception as problem:
            error = problem
        ops = []
        if captured is not None and error is None:
            # Which activations are kept may differ; how ranks communicate may not.
            ops = signature_of(captured.module)
            error = _improve(captured)
            ops += [op for op in signature_of(captured.module) if len(op) > 1]
        verdict = agree(_verdict(error), ops)
        if verdict is not Verdict.CAPTURED or captured is None:
            _attributes.restore(self.model, before)
            self.failures += 1
            # The first step may make what later ones only use, an optimizer's state, say.
            if self.failures > 1 or verdict is Verdict.NEVER:
                entry.is_eager = True
                is_final = verdict is Verdict.NEVER or self.failures > 4
                self._say_why(error, is_final)
            return False
        entry.seconds["capture"] = time.perf_counter() - start
        start = time.perf_counter()
        inputs = [*captured.state(), *batch.locals()]
        with progress(f"Compiling the {self.kind} step of {self.model.name}"):
            run = compile_graph(captured.module)
        if can_be_replayed(inputs, len(collectives_of(captured.module))):
            run = Replayed(run, len(captured.slots))
        entry.use(captured, run)
        entry.seconds["compile"] = time.perf_counter() - start
        return True

    def _assert_nothing_frozen(self, entry: Entry, batch: Batch) -> None:
        """With `KERAS_SPMD_CHECK=1`: raise if the step would be captured differently by now."""
        text = str(self._capture(batch).module.graph)
        if entry.text is not None and entry.text != text:
            pairs = zip(entry.text.splitlines(), text.splitlines(), strict=False)
            first = next(((a, b) for a, b in pairs if a != b), ("the end", "the end"))
            raise RuntimeError(
                f"KERAS_SPMD_CHECK: the {self.kind} step of '{self.model.name}' is another graph "
                f"now: '{first[0].strip()}' would be '{first[1].strip()}'. It depends on something "
                "that changes between steps and that can't be seen, such as a global variable. "
                "Make that a keras.Variable, or an attribute of a layer."
            )
        entry.text = text

    def _capture(self, batch: Batch) -> Captured:
        step = getattr(self.model, f"{self.kind}_step")
        variables = [*self.model.variables, *self.model.metrics_variables]
        # A model that only predicts may never have been compiled.
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            variables += optimizer.variables
        generator = global_state.get_global_attribute("global_seed_generator")
        if generator is not None:
            variables.append(generator.state)
        with _random.layouts_at_hand(batch.leaves):
            return capture(
                step,
                slots_of(self.model, variables),
                batch,
                gather_results=self.kind != "predict",
                with_grad=self.kind == "train",
            )

    def _say_why(self, error: Exception | None, is_final: bool) -> None:
        reason = "another rank could not capture it" if error is None else _reasons.describe(error)
        self.is_given_up, self.reason = is_final, reason
        message = (
            f"The {self.kind} step of '{self.model.name}' runs eagerly, because {reason}. "
            "The results are the same."
        )
        if _settings.strict():
            raise RuntimeError(f"KERAS_SPMD_STRICT: {message}") from error
        warn_once(("eager", id(self)), message)


def _improve(captured: Captured) -> Exception | None:
    try:
        captured.module = improved(captured.module)
    except Exception as problem:
        error = CannotCapture(f"its graph could not be improved ({problem!r})")
        error.__cause__ = problem
        return error
    return None


def _verdict(error: Exception | None) -> Verdict:
    if error is None:
        return Verdict.CAPTURED
    return Verdict.NEVER if isinstance(error, CannotCapture) else Verdict.LATER


def _on_device(leaf: Any) -> Any:
    return leaf if is_dtensor(leaf) else _transfer.to_device(_transfer.as_tensor(leaf))

"""A step as one graph of plain tensor ops and collectives.

What is traced is the step itself, Keras's or the user's. Local tensors go in; inside they are
DTensors, and each variable that is trained is a fresh leaf, so that `loss.backward()` and
`v.value.grad` mean what they always do. Local tensors come out: DTensor exists only while tracing.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import optree
import torch
from keras.src.backend.common.variables import initialize_all_variables
from keras.src.utils.torch_utils import TorchModuleWrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keras_spmd import _promotion
from keras_spmd._promotion import is_dtensor
from keras_spmd.graph._compile import decompositions
from keras_spmd.graph._functional import make_functional
from keras_spmd.graph._scope import CaptureScope, module_tensors
from keras_spmd.graph._simplify import clone_returned_inputs
from keras_spmd.rules._specs import is_pending

_LSTM_OF_MKLDNN = torch.ops.aten.mkldnn_rnn_layer_backward.default


class CannotCapture(Exception):
    """The step can't be a graph, for a reason that a user can understand."""


@dataclass
class Slot:
    """A tensor that the step reads or writes: a variable's value, or a torch module's buffer."""

    tensor: torch.Tensor
    variable: Any = None
    places: list[tuple[dict, str]] = field(default_factory=list)

    @property
    def spec(self) -> DTensorSpec | None:
        return self.tensor._spec if isinstance(self.tensor, DTensor) else None

    @property
    def local(self) -> torch.Tensor:
        tensor = self.tensor.detach()
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    @property
    def is_trained(self) -> bool:
        return self.tensor.requires_grad


@dataclass
class Captured:
    """A graph, and how to feed it and to read its results."""

    module: GraphModule
    slots: list[Slot]
    structure: Any
    specs: list[DTensorSpec | None]
    fallbacks: Counter

    def state(self) -> list[torch.Tensor]:
        return [slot.local for slot in self.slots]

    def results(self, outputs: Sequence[torch.Tensor]) -> Any:
        flat = [_wrapped(output, spec) for output, spec in zip(outputs, self.specs, strict=True)]
        return self.structure.unflatten(flat)


def slots_of(model: Any, variables: Sequence[Any]) -> list[Slot]:
    """Every tensor that a step of this model may touch, as far as it is known before tracing."""
    slots: dict[int, Slot] = {}
    for variable in variables:
        if variable._value is not None:
            slots.setdefault(id(variable._value), Slot(variable._value, variable))
    for layer in model._flatten_layers():
        if isinstance(layer, TorchModuleWrapper):
            for module in layer.module.modules():
                for owner in (module._parameters, module._buffers):
                    for name, tensor in owner.items():
                        if tensor is not None:
                            slot = slots.setdefault(id(tensor), Slot(tensor))
                            slot.places.append((owner, name))
        # What `layer.parameters()` returns, and `layer.zero_grad()` clears.
        owner = layer.torch_params._parameters
        for name, tensor in owner.items():
            if id(tensor) in slots:
                slots[id(tensor)].places.append((owner, name))
    return list(slots.values())


class Batch(NamedTuple):
    """The tensors and DTensors of a step's data, and what they are leaves of."""

    leaves: list[torch.Tensor]
    structure: Any

    @property
    def data(self) -> Any:
        return self.structure.unflatten(self.leaves)

    def locals(self) -> list[torch.Tensor]:
        return [local_of(leaf) for leaf in self.leaves]

    def wrapped(self, local_leaves: list[torch.Tensor]) -> Any:
        """The same data of other local tensors."""
        specs = [getattr(leaf, "_spec", None) for leaf in self.leaves]
        pairs = zip(local_leaves, specs, strict=True)
        return self.structure.unflatten([_wrapped(leaf, spec) for leaf, spec in pairs])


def capture(
    step: Callable, slots: list[Slot], batch: Batch, *, gather_results: bool, with_grad: bool
) -> Captured:
    """Trace `step(data)`.

    Args:
        step: What is traced; a method of the model.
        slots: The state that it touches. Others that turn up are added, and it is traced again.
        batch: Its data.
        gather_results: Whether results are made whole in the graph (logs), or stay sharded.
        with_grad: Whether the step needs autograd.
    """
    table = {**decompositions(), **_DECOMPOSITIONS}
    for _ in range(10):
        tracer = _Tracer(step, slots, batch, gather_results, with_grad)
        with (
            torch.autograd.set_multithreading_enabled(False),
            without_log_of_fake_tensors(),
            _without_optimizers_of_torch(),
        ):
            trace = make_fx(tracer, table, tracing_mode="fake", _allow_non_fake_inputs=True)
            module = trace([slot.local for slot in slots], batch.locals())
        if not tracer.undeclared:
            break
        initialize_all_variables()
        slots = [*slots, *(Slot(v._value, v) for v in tracer.undeclared)]
    else:
        raise CannotCapture("it touches other variables at each run")
    if any(node.target is _LSTM_OF_MKLDNN for node in module.graph.nodes):
        # It needs a workspace of the forward pass, which a fake one does not have.
        raise CannotCapture("it trains torch.nn.LSTM on a CPU; keras.layers.LSTM is captured")
    _write_state_in_place(module.graph, len(slots), len(tracer.specs))
    module = make_functional(module, [*(slot.local for slot in slots), *batch.locals()])
    return Captured(module, slots, tracer.structure, tracer.specs, tracer.fallbacks)


def _convolution_backward(
    grad: torch.Tensor, x: Any, weight: Any, bias_sizes: Any, *rest: Any
) -> Any:
    """The gradient of the bias by itself: a fake one has the size of the whole bias."""
    *options, output_mask = rest
    if not output_mask[2]:
        return NotImplemented
    others = torch.ops.aten.convolution_backward(
        grad, x, weight, None, *options, [*output_mask[:2], False]
    )
    return others[0], others[1], grad.sum([0, *range(2, grad.ndim)])


_DECOMPOSITIONS = {torch.ops.aten.convolution_backward.default: _convolution_backward}


@contextlib.contextmanager
def _without_optimizers_of_torch() -> Iterator[None]:
    """They update the parameters that they were given, and have state of their own."""

    def refuse(optimizer: Any, *_: Any) -> None:
        raise CannotCapture(
            f"it uses torch's {type(optimizer).__name__}, whose state a graph can't know; use one "
            "of keras.optimizers"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def without_log_of_fake_tensors() -> Iterator[None]:
    """torch logs the errors of fake tensors; here they are caught, and told in other words."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _wrapped(local: torch.Tensor | None, spec: DTensorSpec | None) -> Any:
    return local if spec is None else DTensor(local, spec, requires_grad=False)


def local_of(leaf: torch.Tensor) -> torch.Tensor:
    return leaf._local_tensor if isinstance(leaf, DTensor) else leaf


class _Tracer:
    """The function that is traced: local tensors in, local tensors out."""

    def __init__(
        self, step: Callable, slots: list[Slot], batch: Batch, gather_results: bool, with_grad: bool
    ) -> None:
        self.step, self.slots, self.batch = step, slots, batch
        self.gather_results, self.with_grad = gather_results, with_grad
        self.undeclared: list[Any] = []
        self.fallbacks: Counter = Counter()
        self.structure: Any = None
        self.specs: list[DTensorSpec | None] = []

    def __call__(self, state: list[torch.Tensor], leaves: list[torch.Tensor]) -> Any:
        with torch.set_grad_enabled(self.with_grad):
            values = [self._leaf(s, x) for s, x in zip(self.slots, state, strict=True)]
            scope = CaptureScope()
            for slot, value in zip(self.slots, values, strict=True):
                if slot.variable is not None:
                    scope.declare(slot.variable, value)
            swaps = [
                (owner, name, value)
                for slot, value in zip(self.slots, values, strict=True)
                for owner, name in slot.places
            ]
            with scope, scope.origins.watching_backward(), module_tensors(swaps):
                results = optree.tree_map(
                    # A metric may return the variable that it counts with.
                    lambda x: x.value if isinstance(x, keras.Variable) else x,
                    self.step(self.batch.wrapped(leaves)),
                    namespace="keras",
                )
                new = [
                    self._new_value(scope, s, v) for s, v in zip(self.slots, values, strict=True)
                ]
            self.undeclared, self.fallbacks = scope.undeclared, scope.fallbacks
            return self._outputs(results), new

    def _leaf(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        value = _wrapped(local, slot.spec)
        return value.detach().requires_grad_() if slot.is_trained and self.with_grad else value

    def _new_value(self, scope: CaptureScope, slot: Slot, value: torch.Tensor) -> Any:
        if slot.variable is not None:
            new = scope.get_current_value(slot.variable)
        else:
            owner, name = slot.places[0]
            new = owner[name]
        if new is value:
            return None  # What was written into it in place is in the graph already.
        if slot.spec is not None:
            new = _promotion.ensure_dtensor(new, slot.spec.mesh, slot.spec.placements)
        elif is_dtensor(new):
            new = new.full_tensor()
        return local_of(new.detach()).to(value.dtype)

    def _outputs(self, results: Any) -> list[torch.Tensor]:
        outputs, self.specs = [], []
        result: Any
        leaves, self.structure = optree.tree_flatten(results, namespace="keras")
        for result in leaves:
            if not isinstance(result, torch.Tensor):
                raise CannotCapture(
                    f"it returns {result!r} of type {type(result).__name__}, which is computed on "
                    "the host and would be the same after every step"
                )
            result = result.detach()
            if is_dtensor(result) and (self.gather_results or is_pending(result)):
                result = result.full_tensor()
            self.specs.append(result._spec if is_dtensor(result) else None)
            outputs.append(local_of(result))
        return outputs


def _write_state_in_place(graph: Graph, states: int, results: int) -> None:
    """Let the graph end by writing new values into the state, and return the results only."""
    graph.set_codegen(torch.fx.graph.CodeGen())
    places = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    flat = list(output.args[0])
    with graph.inserting_before(output):
        for place, value in zip(places[:states], flat[results:], strict=True):
            if value is not None:
                graph.call_function(torch.ops.aten.copy_.default, (place, value))
    output.args = (tuple(flat[:results]),)
    clone_returned_inputs(graph)

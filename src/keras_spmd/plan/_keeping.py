"""What building a model changes in the process, put back afterwards.

Keras numbers layers that have no name, and draws a seed for each initializer. A model that is made
after a dry run gets the names and the numbers that it would have got without it.
"""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

from keras.src.backend.common import global_state
from keras.src.backend.torch import core as keras_torch

from keras_spmd import _data, _notices, _promotion, _random_state, _variables

_NAMES = "object_name_uids"
_GENERATOR = "global_seed_generator"
_DEVICE = "torch_device"


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Whatever is built in this block leaves no trace in Keras, in torch or in keras-spmd."""
    settings = _snapshot(global_state.GLOBAL_SETTINGS_TRACKER)
    state = _snapshot(global_state.GLOBAL_STATE_TRACKER)
    random_states = _random_state._random_states()
    told, any_sharded, for_graph = set(_notices._told), _variables.any_sharded, _data.for_graph
    device = keras_torch.DEFAULT_DEVICE
    tracker = global_state.GLOBAL_STATE_TRACKER
    names = collections.defaultdict(int, state.get(_NAMES) or {})
    setattr(tracker, _NAMES, names)
    # A dry run has a generator of its own: this one has values.
    setattr(tracker, _GENERATOR, None)
    setattr(tracker, _DEVICE, "cpu")
    keras_torch.DEFAULT_DEVICE = "cpu"
    try:
        yield
    finally:
        # Somebody may have cleared Keras's session meanwhile, which makes new trackers.
        _restore(global_state.GLOBAL_SETTINGS_TRACKER, settings)
        _restore(global_state.GLOBAL_STATE_TRACKER, state)
        keras_torch.DEFAULT_DEVICE = device
        _random_state._set_random_states(random_states)
        _notices._told.clear()
        _notices._told.update(told)
        _variables.any_sharded, _data.for_graph = any_sharded, for_graph
        _promotion.sync_with_distribution()


def _snapshot(tracker: Any) -> dict[str, Any]:
    return dict(vars(tracker))


def _restore(tracker: Any, values: dict[str, Any]) -> None:
    vars(tracker).clear()
    vars(tracker).update(values)

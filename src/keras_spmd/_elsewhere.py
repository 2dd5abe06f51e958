"""The public helpers on Keras's other backends: there are no DTensors, so nothing is done.

They are here so that one script serves all backends, and torch is not even imported.
"""

from typing import Any


def activate() -> bool:
    return False


def deactivate() -> None:
    return None


def distribute_batch(batch: Any) -> Any:
    return batch


def is_dtensor(x: object) -> bool:
    return False


def ensure_dtensor(tensor: Any, device_mesh: Any = None, placements: Any = None) -> Any:
    return tensor


def convert_tensors_to_dtensor(*tensors: Any, device_mesh: Any = None) -> tuple[Any, ...]:
    return tensors


def get_dtensor_local(tensor: Any) -> Any:
    return tensor


def get_dtensor_spec(tensor: Any) -> Any:
    return None


def create_replicate_dtensor(tensor: Any, device_mesh: Any = None) -> Any:
    return tensor


def explain(model: Any, graph_file: Any = None) -> list[Any]:
    return []


def _on_torch_only(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "Sharded checkpoints are for Keras on torch. Start the program with KERAS_BACKEND=torch."
    )


save_checkpoint = load_checkpoint = latest_checkpoint = _on_torch_only
ShardedCheckpoint: Any = _on_torch_only


def show(model: Any) -> Any:
    return None

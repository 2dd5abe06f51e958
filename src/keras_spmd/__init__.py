"""keras.distribution for Keras on PyTorch.

Importing this package switches it on; on Keras's other backends nothing happens:

>>> import keras_spmd
>>> import keras
>>> keras.distribution.set_distribution(keras.distribution.DataParallel())
"""

from keras_spmd import _backends, _starting
from keras_spmd._launch import launch as launch
from keras_spmd.plan import plan as plan

if _starting.is_command():
    # `keras-spmd` itself needs neither Keras nor torch; see `_starting.import_all`.
    from keras_spmd._elsewhere import activate as activate
    from keras_spmd._elsewhere import deactivate as deactivate
else:
    _backends.choose_torch_if_there_is_nothing_else()
    from keras_spmd._activate import activate as activate
    from keras_spmd._activate import deactivate as deactivate
    from keras_spmd._notices import ShardingWarning as ShardingWarning

if activate():
    from keras_spmd import layouts as layouts
    from keras_spmd._data import distribute_batch as distribute_batch
    from keras_spmd._explaining import explain as explain
    from keras_spmd._promotion import convert_tensors_to_dtensor as convert_tensors_to_dtensor
    from keras_spmd._promotion import create_replicate_dtensor as create_replicate_dtensor
    from keras_spmd._promotion import ensure_dtensor as ensure_dtensor
    from keras_spmd._promotion import get_dtensor_local as get_dtensor_local
    from keras_spmd._promotion import get_dtensor_spec as get_dtensor_spec
    from keras_spmd._promotion import is_dtensor as is_dtensor
    from keras_spmd._showing import show as show
    from keras_spmd.checkpoints._callback import ShardedCheckpoint as ShardedCheckpoint
    from keras_spmd.checkpoints._errors import CheckpointError as CheckpointError
    from keras_spmd.checkpoints._loading import latest_checkpoint as latest_checkpoint
    from keras_spmd.checkpoints._loading import load_checkpoint as load_checkpoint
    from keras_spmd.checkpoints._saving import save_checkpoint as save_checkpoint
else:
    from keras_spmd._elsewhere import ShardedCheckpoint as ShardedCheckpoint
    from keras_spmd._elsewhere import convert_tensors_to_dtensor as convert_tensors_to_dtensor
    from keras_spmd._elsewhere import create_replicate_dtensor as create_replicate_dtensor
    from keras_spmd._elsewhere import distribute_batch as distribute_batch
    from keras_spmd._elsewhere import ensure_dtensor as ensure_dtensor
    from keras_spmd._elsewhere import explain as explain
    from keras_spmd._elsewhere import get_dtensor_local as get_dtensor_local
    from keras_spmd._elsewhere import get_dtensor_spec as get_dtensor_spec
    from keras_spmd._elsewhere import is_dtensor as is_dtensor
    from keras_spmd._elsewhere import latest_checkpoint as latest_checkpoint
    from keras_spmd._elsewhere import load_checkpoint as load_checkpoint
    from keras_spmd._elsewhere import save_checkpoint as save_checkpoint
    from keras_spmd._elsewhere import show as show

__version__ = "0.1.0"

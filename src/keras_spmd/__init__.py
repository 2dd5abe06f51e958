"""keras.distribution for Keras on PyTorch.

Importing this package switches it on; on Keras's other backends nothing happens:

>>> import keras_spmd
>>> import keras
>>> keras.distribution.set_distribution(keras.distribution.DataParallel())
"""

from keras_spmd._activate import activate as activate
from keras_spmd._activate import deactivate as deactivate
from keras_spmd._notices import ShardingWarning as ShardingWarning

if activate():
    from keras_spmd._data import distribute_batch as distribute_batch
    from keras_spmd._explaining import explain as explain
    from keras_spmd._promotion import convert_tensors_to_dtensor as convert_tensors_to_dtensor
    from keras_spmd._promotion import create_replicate_dtensor as create_replicate_dtensor
    from keras_spmd._promotion import ensure_dtensor as ensure_dtensor
    from keras_spmd._promotion import get_dtensor_local as get_dtensor_local
    from keras_spmd._promotion import get_dtensor_spec as get_dtensor_spec
    from keras_spmd._promotion import is_dtensor as is_dtensor
else:
    from keras_spmd._elsewhere import convert_tensors_to_dtensor as convert_tensors_to_dtensor
    from keras_spmd._elsewhere import create_replicate_dtensor as create_replicate_dtensor
    from keras_spmd._elsewhere import distribute_batch as distribute_batch
    from keras_spmd._elsewhere import ensure_dtensor as ensure_dtensor
    from keras_spmd._elsewhere import explain as explain
    from keras_spmd._elsewhere import get_dtensor_local as get_dtensor_local
    from keras_spmd._elsewhere import get_dtensor_spec as get_dtensor_spec
    from keras_spmd._elsewhere import is_dtensor as is_dtensor

__version__ = "0.1.0"

"""Recipes for layouts: a model and a mesh in, a `keras.distribution.LayoutMap` out."""

from keras_spmd.layouts._apply import apply as apply
from keras_spmd.layouts._auto import auto as auto
from keras_spmd.layouts._recipes import fsdp as fsdp
from keras_spmd.layouts._recipes import hybrid as hybrid
from keras_spmd.layouts._recipes import sequence_parallel as sequence_parallel
from keras_spmd.layouts._recipes import tensor_parallel as tensor_parallel
from keras_spmd.layouts._recipes import zero1 as zero1

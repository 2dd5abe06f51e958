"""Sharding rules by family. Importing this package lists them; `install` makes them count."""

from keras_spmd.rules import alignment as alignment
from keras_spmd.rules import attention as attention
from keras_spmd.rules import convolution as convolution
from keras_spmd.rules import counting as counting
from keras_spmd.rules import embedding as embedding
from keras_spmd.rules import filling as filling
from keras_spmd.rules import indexing as indexing
from keras_spmd.rules import joining as joining
from keras_spmd.rules import linalg as linalg
from keras_spmd.rules import losses as losses
from keras_spmd.rules import normalization as normalization
from keras_spmd.rules import older as older
from keras_spmd.rules import padding as padding
from keras_spmd.rules import pointwise as pointwise
from keras_spmd.rules import pooling as pooling
from keras_spmd.rules import putting as putting
from keras_spmd.rules import randomness as randomness
from keras_spmd.rules import recurrent as recurrent
from keras_spmd.rules import reductions as reductions
from keras_spmd.rules import reshaping as reshaping
from keras_spmd.rules import scalars as scalars
from keras_spmd.rules import scattering as scattering
from keras_spmd.rules import searching as searching
from keras_spmd.rules import softmax as softmax
from keras_spmd.rules._registry import install as install
from keras_spmd.rules._registry import uninstall as uninstall

"""Dry runs: what a model would need on a mesh that isn't there.

`keras_spmd.plan` is the object `plan` of this module: it is called, and it holds the rest.
"""

from keras_spmd.plan._callable import Planner

plan = Planner()

"""Switching keras.distribution on for torch: the one table of everything that is replaced.

Each row says what of Keras or torch is replaced, with what, and why. Names are looked up when a
row is applied, so a name that a new release moved fails at once, and `deactivate` puts back exactly
what was there. The rows hold for the versions in `_versions.py`.
"""

import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_spmd._versions import check_versions


class Patch(NamedTuple):
    """One replacement. `make` gets what was there and returns what takes its place."""

    module: str
    name: str
    make: Callable[[Any], Any]
    why: str
    everywhere: bool = False


_ABSENT = object()
_undo: list[Callable[[], object]] = []


def patches() -> list[Patch]:
    """The table."""
    from keras_spmd import (
        _archives,
        _attention,
        _backups,
        _coverage,
        _cross_entropy,
        _data,
        _exchange,
        _exporting,
        _files,
        _gloo,
        _initial_values,
        _loading,
        _meshes,
        _messages,
        _optimizers,
        _orbax,
        _promotion,
        _random,
        _reading,
        _resuming,
        _saving,
        _segments,
        _slices,
        _statistics,
        _stopping,
        _trainer,
        _transfer,
        _variables,
        _wrapped,
        distribution_lib,
    )
    from keras_spmd.graph import _attributes, _control_flow
    from keras_spmd.rules import decisions, writing

    def use(value: Any) -> Callable[[Any], Any]:
        return lambda original: value

    dispatcher = "torch.distributed.tensor._dispatch"
    dtensor = "torch.distributed.tensor"
    optimizer = "keras.src.optimizers.base_optimizer"
    keras_dist = "keras.src.distribution.distribution_lib"
    torch_core = "keras.src.backend.torch.core"
    trainer = "keras.src.backend.torch.trainer"
    return [
        # The backend's distribution library, under the names that Keras and scripts import it by.
        Patch(
            "keras.src.backend.torch",
            "distribution_lib",
            use(distribution_lib),
            "Keras has none for torch; scripts import it from here",
        ),
        Patch(
            "keras.src.backend",
            "distribution_lib",
            use(distribution_lib),
            "is None on torch",
        ),
        Patch(
            keras_dist,
            "distribution_lib",
            use(distribution_lib),
            "was imported as None",
        ),
        # Setting a distribution.
        Patch(
            keras_dist,
            "set_distribution",
            _meshes.set_distribution_or,
            "promotion of plain tensors goes on and off with the distribution",
            everywhere=True,
        ),
        Patch(
            "keras.src.backend.common.global_state",
            "clear_session",
            _meshes.clear_session_or,
            "it drops the distribution without telling anybody",
            everywhere=True,
        ),
        Patch(
            keras_dist,
            "DeviceMesh.__init__",
            _meshes.device_mesh_init_or,
            "a mesh that is too large says how to start enough processes",
        ),
        Patch(
            keras_dist,
            "Distribution.__init__",
            _meshes.distribution_init_or,
            "the axis of batches is looked for in a tuple, whose error names neither",
        ),
        Patch(
            keras_dist,
            "LayoutMap.__getitem__",
            use(_coverage.look_up),
            "matches each path once, and remembers which keys matched",
        ),
        Patch(
            optimizer,
            "BaseOptimizer.build",
            _meshes.optimizer_build_or,
            "training starts here: the time to say which layouts were never used",
        ),
        # Variables.
        Patch(
            torch_core,
            "Variable._layout",
            use(None),
            "variables made before activation have none in Keras 3.14",
        ),
        Patch(
            torch_core,
            "Variable.__init__",
            _variables.init_or,
            "Keras 3.14 drops the argument `layout` on torch",
        ),
        Patch(
            torch_core,
            "Variable._initialize",
            _variables.initialize_or,
            "a value becomes this rank's shard",
        ),
        Patch(
            torch_core,
            "Variable._initialize_with_initializer",
            _variables.initialize_with_initializer_or,
            "initial values are made shard by shard",
        ),
        Patch(
            torch_core,
            "Variable._direct_assign",
            _variables.direct_assign_or,
            "an assigned value takes the variable's layout",
        ),
        Patch(
            torch_core,
            "Variable.assign_add",
            _variables.promoting_outside_of_scope,
            "adds a plain tensor to a sharded variable, also outside of the scope",
        ),
        Patch(
            torch_core,
            "Variable.assign_sub",
            _variables.promoting_outside_of_scope,
            "subtracts a plain tensor from a sharded variable, also outside of the scope",
        ),
        Patch(
            "keras.src.initializers.random_initializers",
            "random",
            use(_initial_values.recorder),
            "lets an initializer say what it would draw, without drawing it",
        ),
        Patch(
            "keras.src.layers.layer",
            "Layer.__call__",
            _variables.layer_call_or,
            "sharded layers work outside of their scope; plain ones inside of it are reported",
        ),
        Patch(
            "keras.src.utils.torch_utils",
            "TorchModuleWrapper._track_module_parameters",
            _variables.track_module_parameters_or,
            "the wrapped module must compute with the sharded parameters",
        ),
        Patch(
            "keras.src.utils.torch_utils",
            "TorchModuleWrapper.get_config",
            _wrapped.get_config_or,
            "pickles the module with one rank's shards",
        ),
        # Random numbers.
        *[
            Patch(
                "keras.src.backend.torch.random",
                function.__name__,
                _random.instead_of(function),
                "the same numbers on every mesh, each rank drawing its part",
            )
            for function in _random.FUNCTIONS
        ],
        Patch(
            "keras.src.layers.normalization.batch_normalization",
            "BatchNormalization.__init__",
            _statistics.batch_normalization_init_or,
            "refuses synchronized=True on torch, where it is what happens on a mesh",
        ),
        Patch(
            "keras.src.backend.torch.nn",
            "moments",
            _statistics.moments_or,
            "refuses synchronized=True on torch, where it is what happens on a mesh",
        ),
        # Training.
        Patch(
            "keras.src.trainers.data_adapters",
            "get_data_adapter",
            _data.get_data_adapter_or,
            "refuses everything but tf.data on a job of several processes",
        ),
        Patch(
            trainer,
            "TorchEpochIterator._get_iterator",
            _data.get_iterator_or,
            "each rank reads its rows of a batch, if they can be read alone",
        ),
        Patch(
            trainer,
            "TorchEpochIterator.__iter__",
            _data.iter_or,
            "shuffles are drawn from random states, which must be equal on all ranks",
        ),
        Patch(
            torch_core,
            "convert_to_tensor",
            _transfer.convert_to_tensor_or,
            "a number that is copied to a GPU makes the host wait for all that runs there",
            everywhere=True,
        ),
        Patch(
            "keras.src.random.seed_generator",
            "SeedGenerator.next",
            _transfer.next_seed_or,
            "it copies an array to the device at each call",
        ),
        Patch(
            trainer,
            "TorchTrainer.make_train_function",
            _trainer.make_function_or("train_function"),
            "a training step gets its batch laid out",
        ),
        Patch(
            trainer,
            "TorchTrainer.make_test_function",
            _trainer.make_function_or("test_function"),
            "an evaluation step gets its batch laid out",
        ),
        Patch(
            trainer,
            "TorchTrainer.make_predict_function",
            _trainer.make_function_or("predict_function"),
            "a prediction step gets its batch laid out",
        ),
        Patch(
            optimizer,
            "BaseOptimizer.apply",
            _optimizers.apply_or,
            "gradients take their variable's layout once, before the update",
        ),
        Patch(
            "keras.src.optimizers.loss_scale_optimizer",
            "LossScaleOptimizer.apply",
            _optimizers.apply_or,
            "it looks at the gradients before its inner optimizer does",
        ),
        Patch(
            optimizer,
            "BaseOptimizer.add_variable_from_reference",
            _optimizers.add_slot_or,
            "gradients take the layout of slots that a layout map shards by themselves",
        ),
        Patch(
            optimizer,
            "BaseOptimizer._backend_apply_gradients",
            _optimizers.apply_gradients_or,
            "accumulated gradients are reduced once, on the step that updates",
        ),
        Patch(
            optimizer,
            "BaseOptimizer._backend_increment_gradient_accumulators",
            _optimizers.increment_or,
            "pending sums are accumulated where they are",
        ),
        Patch(
            "keras.src.backend.torch.optimizers.torch_parallel_optimizer",
            "TorchParallelOptimizer._backend_increment_gradient_accumulators",
            _optimizers.increment_or,
            "pending sums are accumulated where they are",
        ),
        Patch(
            optimizer,
            "BaseOptimizer.variables",
            _optimizers.variables_or,
            "who reads an optimizer's state reads all of it",
        ),
        Patch(
            optimizer,
            "BaseOptimizer.set_weights",
            _optimizers.set_weights_or,
            "who sets an optimizer's state sets all of it",
        ),
        Patch(
            "keras.src.callbacks.callback_list",
            "CallbackList.__init__",
            _trainer.callback_list_init_or,
            "callbacks in a thread of their own would issue collectives in any order",
        ),
        *[
            Patch(
                "keras.src.callbacks.callback_list",
                f"CallbackList.on_{phase}_batch_end",
                _stopping.batch_end_or(attribute),
                f"{attribute} set on one rank stops all",
            )
            for phase, attribute in (
                ("train", "stop_training"),
                ("test", "stop_evaluating"),
                ("predict", "stop_predicting"),
            )
        ],
        Patch(
            "keras.src.callbacks.callback_list",
            "CallbackList.on_epoch_end",
            _stopping.epoch_end_or,
            "stop_training set on one rank stops all",
        ),
        # Going on where a training was interrupted.
        Patch(
            trainer,
            "TorchTrainer.fit",
            _resuming.fit_or,
            "a training that ends with an error must not go on in the next one",
        ),
        *[
            Patch(
                "keras.src.callbacks.callback_list",
                f"CallbackList.on_{event}",
                wrap,
                "callbacks that save know where the training is, and another one goes on there",
            )
            for event, wrap in (
                ("train_begin", _resuming.train_begin_or),
                ("train_end", _resuming.train_end_or),
                ("epoch_begin", _resuming.epoch_begin_or),
                ("epoch_end", _resuming.epoch_end_or),
                ("train_batch_end", _resuming.batch_end_or),
            )
        ],
        Patch(
            "keras.src.trainers.trainer",
            "Trainer._get_metrics_result_or_logs",
            _resuming.metrics_result_or_logs_or,
            "an epoch may be resumed after its last batch",
        ),
        *[
            Patch(
                "keras.src.callbacks.backup_and_restore",
                f"BackupAndRestore.{method}",
                wrap,
                "Keras keeps neither the order of batches nor seeds, metrics and history",
            )
            for method, wrap in (
                ("_save_model", _backups.save_model_or),
                ("_load_model", _backups.load_model_or),
            )
        ],
        # One step, one graph.
        Patch(
            trainer,
            "TorchTrainer._should_torch_compile",
            _trainer.should_torch_compile_or,
            "jit_compile=True captures the whole step instead",
        ),
        Patch(
            torch_core,
            "cond",
            _control_flow.cond_or,
            "reads its predicate on the host, which a graph can't",
            everywhere=True,
        ),
        Patch(
            torch_core,
            "scatter",
            _control_flow.scatter_or,
            "loops over its indices on the host, which a graph can't",
            everywhere=True,
        ),
        Patch(
            torch_core,
            "slice",
            _control_flow.slice_or,
            "reads a place that is a tensor on the host, which a graph can't",
            everywhere=True,
        ),
        Patch(
            torch_core,
            "slice_update",
            _slices.slice_update_or,
            "writes by index at a place that is a tensor, for which a sharded tensor is gathered",
            everywhere=True,
        ),
        Patch(
            torch_core,
            "while_loop",
            _control_flow.while_loop_or,
            "reads its predicate on the host, which a graph can't",
            everywhere=True,
        ),
        Patch(
            "keras.src.backend.torch.optimizers.torch_nadam",
            "core",
            _optimizers.core_or,
            "Nadam reads two numbers on the host, which a graph can't",
        ),
        Patch(
            "keras.src.backend.torch.nn",
            "_can_use_flash_attention",
            _attention.can_use_flash_or,
            "a captured step leaves the choice to torch where that prefers cuDNN's kernel",
        ),
        Patch(
            "keras.src.backend.torch.nn",
            "sparse_categorical_crossentropy",
            _cross_entropy.sparse_categorical_crossentropy_or,
            "transposes the scores, the largest tensor of a language model",
        ),
        Patch(
            "keras.src.backend.torch.math",
            "_segment_reduction_fn",
            _segments.segment_reduction_or,
            "repeats segments as often as a tensor says, which a graph can't read",
        ),
        *[
            Patch(
                module,
                f"{name}.__setattr__",
                _attributes.set_attribute_or,
                "numbers and flags are part of the key of a graph",
            )
            for module, name in (
                ("keras.src.layers.layer", "Layer"),
                ("keras.src.optimizers.base_optimizer", "BaseOptimizer"),
                ("keras.src.metrics.metric", "Metric"),
            )
        ],
        Patch(
            torch_core,
            "Variable.trainable",
            _attributes.trainable_setter_or,
            "what is trained is part of the key of a graph",
        ),
        # What is said and written once.
        Patch(
            "keras.src.utils.io_utils",
            "print_msg",
            _messages.print_msg_or,
            "progress and messages appear once",
        ),
        Patch(
            "keras.src.utils.summary_utils",
            "print_summary",
            _messages.print_summary_or,
            "in a terminal it prints past print_msg",
        ),
        Patch(
            "warnings",
            "showwarning",
            _messages.show_warning_or,
            "warnings of Keras appear once",
        ),
        *[
            Patch(
                f"keras.src.callbacks.{module}",
                "file_utils",
                use(files),
                "its files are written once",
            )
            for module, files in (
                ("csv_logger", _files.quiet_files),
                ("tensorboard", _files.quiet_files),
                ("model_checkpoint", _files.shared_files),
                ("backup_and_restore", _files.shared_files),
            )
        ],
        Patch(
            "keras.src.callbacks.tensorboard",
            "TensorBoard.set_model",
            _files.tensorboard_set_model_or,
            "its files are written once",
        ),
        Patch(
            "keras.src.callbacks.remote_monitor",
            "RemoteMonitor.on_epoch_end",
            _files.on_rank_0,
            "events are sent once",
        ),
        *[
            Patch(
                "keras.src.callbacks.orbax_checkpoint",
                name,
                make,
                "rank 0 gets the state, and Orbax writes it once",
            )
            for name, make in (
                ("OrbaxCheckpoint.__init__", _orbax.init_or),
                ("_get_state_tree", _orbax.get_state_tree_or),
                ("OrbaxCheckpoint._save_checkpoint", _orbax.save_or),
                ("OrbaxCheckpoint.on_train_end", _orbax.together),
                ("OrbaxCheckpoint.wait_until_finished", _orbax.together),
            )
        ],
        Patch(
            "keras.src.models.model",
            "Model.export",
            _exporting.export_or,
            "exporters trace plain tensors",
        ),
        *[
            Patch(
                module,
                name,
                make,
                "rank 0 gets the weights and writes them",
                everywhere=True,
            )
            for module, name, make in (
                ("keras.src.saving.saving_api", "save_model", _saving.save_or),
                ("keras.src.saving.saving_api", "save_weights", _saving.save_or),
                ("keras.src.saving.saving_lib", "save_model", _saving.save_file_or),
                ("keras.src.saving.saving_lib", "save_weights_only", _saving.save_file_or),
                ("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", _saving.save_or),
            )
        ],
        *[
            Patch(
                "keras.src.saving.saving_api",
                name,
                wrap,
                "what takes long is shown",
                everywhere=True,
            )
            for name, wrap in (
                ("load_weights", _loading.load_weights_or),
                ("load_model", _loading.load_model_or),
            )
        ],
        *[
            Patch(
                "keras.src.saving.saving_lib",
                f"{store}.__setitem__",
                _saving.set_item_or,
                "a variable becomes whole on rank 0 alone",
            )
            for store in ("H5IOStore", "ShardedH5IOStore")
        ],
        Patch(
            "keras.src.saving.saving_lib",
            "H5IOStore.__getitem__",
            _loading.get_item_or,
            "reads whole variables",
        ),
        Patch(
            "keras.src.saving.saving_lib",
            "H5IOStore._get_h5_file",
            _archives.h5_file_or,
            "reads a .keras file from its beginning, and collects it in memory to write it",
        ),
        Patch(
            "keras.src.saving.saving_lib",
            "H5IOStore.close",
            _archives.close_or,
            "collects a .keras file in memory to write it",
        ),
        Patch(
            "keras.src.saving.saving_lib",
            "is_memory_sufficient",
            _archives.is_memory_sufficient_or,
            "every rank would hold all weights",
        ),
        Patch(
            torch_core,
            "Variable.assign",
            _loading.assign_or,
            "a sharded variable reads its part of a file",
        ),
        Patch(
            "keras.src.optimizers.base_optimizer",
            "BaseOptimizer.save_own_variables",
            _saving.save_own_variables_or,
            "makes arrays of variables on every rank",
        ),
        # DTensor.
        Patch(
            dispatcher,
            "OpDispatcher._allow_implicit_replication",
            use(_promotion.torch_switch),
            "torch's context manager would switch promotion off inside of a distribution",
        ),
        Patch(
            dispatcher,
            "OpDispatcher._try_replicate_spec_for_scalar_tensor",
            _promotion.replicated_spec_or,
            "checks promoted tensors on demand; torch's warns of every tensor of shape (1,)",
        ),
        Patch(
            "torch.distributed.distributed_c10d",
            "ProcessGroupGloo",
            _gloo.with_one_thread,
            "two threads of torch's write into one string, and damage the heap",
        ),
        Patch(
            "torch.distributed.tensor.placement_types",
            "shard_dim_alltoall",
            use(_exchange.to_other_dim),
            "torch's gathers on CPUs, and on GPUs is none of the collectives that steps know",
        ),
        Patch(
            "torch.distributed.tensor.placement_types",
            "Partial.__hash__",
            use(decisions.hash_of_partial),
            "torch's differs from rank to rank, and with it the choice between equal costs",
        ),
        Patch(
            dispatcher,
            "OpDispatcher._propagate_op_sharding_dispatch_slow_path",
            decisions.deciding_or,
            "an op without a rule runs replicated instead of failing",
        ),
        Patch(
            dispatcher,
            "OpDispatcher._dispatch_fast_path_python_tail",
            writing.finishing_or,
            "in-place ops on plain tensors, and on views along a sharded dim",
        ),
        Patch(
            dtensor,
            "DTensor.__array__",
            use(_reading.to_array),
            "np.array(dtensor) fails in torch",
        ),
        Patch(
            dtensor,
            "DTensor.numpy",
            use(_reading.to_numpy),
            "fails in torch",
        ),
        Patch(
            dtensor,
            "DTensor.__format__",
            use(_reading.to_text),
            "a loss in an f-string fails in torch",
        ),
        Patch(
            dtensor,
            "DTensor.tolist",
            use(_reading.to_list),
            "fails in torch",
        ),
    ]


def activate() -> bool:
    """Make `keras.distribution` work on torch. Importing `keras_spmd` does this.

    Returns:
        Whether it is active: on other backends Keras needs no help and nothing is done.

    Example:

    >>> import keras_spmd
    >>> keras_spmd.deactivate()
    >>> keras_spmd.activate()
    True
    """
    if keras.config.backend() != "torch":
        return False
    if _undo:
        return True
    import torch

    check_versions(keras.__version__, torch.__version__)
    from keras_spmd import _processes, distribution_lib, rules

    _processes.bind_device()
    module_name = "keras.src.backend.torch.distribution_lib"
    sys.modules[module_name] = distribution_lib
    _undo.append(lambda: sys.modules.pop(module_name, None))
    _silence("Found a non-scalar tensor with numel=1")
    _silence_log("torch.distributed.tensor._redistribute", "sequential")
    try:
        for patch in patches():
            _apply(patch)
        _undo.append(rules.uninstall)
        rules.install()
    except BaseException:
        _undo_all()
        raise
    return True


def _silence(message: str) -> None:
    """Ignore a warning of torch's C++ code: promoting a tensor of shape (1,) is ordinary here."""
    filters: Any = warnings.filters
    before = list(filters)
    warnings.filterwarnings("ignore", message=message)
    for entry in [entry for entry in filters if entry not in before]:
        _undo.append(functools.partial(_discard, filters, entry))


def _silence_log(logger_name: str, word: str) -> None:
    """Drop a message of torch's log, which every rank would write.

    It says that a sum over two mesh axes takes two collectives: nothing that the author of a Keras
    script could change.
    """
    logger = logging.getLogger(logger_name)

    def keep(record: logging.LogRecord) -> bool:
        return word not in str(record.msg)

    logger.addFilter(keep)
    _undo.append(functools.partial(logger.removeFilter, keep))


def _discard(items: list, item: Any) -> None:
    if item in items:
        items.remove(item)


def deactivate() -> None:
    """Give Keras and torch back exactly what they had.

    Example:

    >>> import keras_spmd
    >>> keras_spmd.deactivate()
    >>> keras_spmd.activate()
    True
    """
    if not _undo:
        return
    keras.distribution.set_distribution(None)
    _undo_all()


def _undo_all() -> None:
    while _undo:
        _undo.pop()()


def _apply(patch: Patch) -> None:
    module = importlib.import_module(patch.module)
    *path, attribute = patch.name.split(".")
    owner = functools.reduce(getattr, path, module)
    original = vars(owner).get(attribute, _ABSENT)
    inherited = getattr(owner, attribute, None) if original is _ABSENT else original
    replacement = patch.make(inherited)
    _replace(owner, attribute, original, replacement)
    if patch.everywhere:
        # Keras's public modules import functions by name.
        for name, other in list(sys.modules.items()):
            if name.split(".")[0] == "keras" and other is not module:
                for key, value in list(vars(other).items()):
                    if value is inherited:
                        _replace(other, key, value, replacement)


def _replace(owner: Any, attribute: str, original: Any, replacement: Any) -> None:
    setattr(owner, attribute, replacement)
    if original is _ABSENT:
        _undo.append(lambda: delattr(owner, attribute))
    else:
        _undo.append(lambda: setattr(owner, attribute, original))

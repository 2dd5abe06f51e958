"""Two ranks build one sharded model: where each shard lives, and equal outputs with and without it.

make demo
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_spmd
from keras_spmd.distribution_lib import num_processes, process_id

COLOURS = ("cyan", "magenta", "yellow", "green")


def make_model() -> keras.Model:
    keras.utils.set_random_seed(42)
    tokens = keras.Input((12,), dtype="int32")
    x = keras.layers.Embedding(64, 16, name="tokens")(tokens)
    attention = keras.layers.MultiHeadAttention(4, 4, name="attention")
    x = keras.layers.LayerNormalization(name="norm")(x + attention(x, x, use_causal_mask=True))
    y = keras.layers.Dense(64, activation="gelu", name="up")(x)
    x = x + keras.layers.Dense(16, name="down")(y)
    return keras.Model(tokens, keras.layers.Dense(64, name="logits")(x), name="demo")


def shard_rows(model: keras.Model) -> list[tuple[str, tuple, str, int]]:
    """For each variable: its path, its shape, which part this rank holds, and how many bytes."""
    rows = []
    for v in model.weights:
        local = keras_spmd.get_dtensor_local(v.value)
        rows.append((v.path, v.shape, "x".join(map(str, local.shape)), local.nbytes))
    return rows


def main() -> None:
    tokens = np.random.default_rng(0).integers(0, 64, (8, 12))
    expected = keras.ops.convert_to_numpy(make_model()(tokens))

    mesh = keras.distribution.DeviceMesh((1, num_processes()), ("batch", "model"))
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*tokens/embeddings"] = ("model", None)
    layouts[".*attention/(query|key|value)/kernel"] = (None, "model", None)
    layouts[".*attention/attention_output/kernel"] = ("model", None, None)
    layouts[".*(up|logits)/kernel"] = (None, "model")
    layouts[".*(up|logits)/bias"] = ("model",)
    layouts[".*down/kernel"] = ("model", None)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))

    model = make_model()
    outputs = keras.ops.convert_to_numpy(model(tokens))
    difference = float(np.abs(outputs - expected).max())

    everybody: list = [None] * num_processes()
    if num_processes() > 1:
        import torch.distributed as dist

        dist.all_gather_object(everybody, shard_rows(model))
    else:
        everybody = [shard_rows(model)]
    if process_id() == 0:
        print_table(everybody, difference)


def print_table(everybody: list, difference: float) -> None:
    console = Console(width=110)
    table = Table(title="Where each shard lives")
    table.add_column("variable")
    table.add_column("shape", justify="right")
    for rank in range(len(everybody)):
        table.add_column(f"rank {rank}", style=COLOURS[rank % len(COLOURS)], justify="right")
    for rows in zip(*everybody, strict=True):
        path, shape = rows[0][:2]
        is_sharded = len(everybody) > 1 and rows[0][2] != "x".join(map(str, shape))
        parts = [part or "scalar" for _, _, part, _ in rows]
        table.add_row(
            path,
            "x".join(map(str, shape)),
            *(part if is_sharded else f"[dim]{part} (all)[/dim]" for part in parts),
        )
    table.add_section()
    totals = [f"{sum(row[3] for row in rows):,} B" for rows in everybody]
    table.add_row("bytes held", "", *totals)
    console.print(table)
    console.print(f"largest difference to the same model without a mesh: {difference:.2e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()

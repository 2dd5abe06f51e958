"""Data from torch: a `Dataset`, and a `DataLoader` with workers and a collate function of its own.

    python examples/torch_dataloader.py
    torchrun --nproc-per-node 2 examples/torch_dataloader.py

The loader is the one that you would write for one device: its batches are whole, on every device,
and `fit` takes from each one the rows that this device computes. No `DistributedSampler`.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import keras_spmd

WORDS, LONGEST = 20, 12
PADDING = 0


class Sentences(Dataset):
    """Sentences of 4 to 12 words; the question is whether there are more low words than high."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        # What a sentence is depends on its index only, so any worker of any process may make it.
        rng = np.random.default_rng([self.seed, index])
        words = torch.from_numpy(rng.integers(1, WORDS, rng.integers(4, LONGEST + 1)))
        low = (words < WORDS // 2).sum()
        return words, float(low > len(words) // 2)


def collate(samples: list[tuple[torch.Tensor, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences of different lengths, filled up to the longest one of the batch."""
    sentences, answers = zip(*samples, strict=True)
    x = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PADDING)
    return x, torch.tensor(answers)[:, None]


def make_loader(count: int, seed: int, *, shuffle: bool) -> DataLoader:
    return DataLoader(
        Sentences(count, seed),
        batch_size=64,
        shuffle=shuffle,
        collate_fn=collate,
        num_workers=2,
        persistent_workers=True,
    )


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(WORDS, 16, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )


def main() -> None:
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(keras.distribution.DataParallel())

    model = make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(0.02),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
    )

    # The loader shuffles, not `fit`. Processes share one random state, so they shuffle alike.
    train = make_loader(600, seed=1, shuffle=True)
    test = make_loader(200, seed=2, shuffle=False)
    model.fit(train, shuffle=False, epochs=3, validation_data=test, verbose=2)
    loss, accuracy = model.evaluate(test, verbose=0)
    assert accuracy > 0.85

    if keras_spmd.distribution_lib.process_id() == 0:
        print(f"right answers: {accuracy:.1%}")
        print(f"final loss: {loss:.7f}")


if __name__ == "__main__":
    main()

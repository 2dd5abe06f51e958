"""A training for tests that kill it: survivor.py FOLDER KIND JIT KILL,... RESULT

KIND has the word "backup" for Keras's callback, "slow" for time to send signals, and
"patient" for callbacks that stop it early.
KILL is ATTEMPT:RANK:BATCH, after which the rank dies in that life of the job.
"""

import os
import pickle
import signal
import sys
import time

os.environ["KERAS_BACKEND"] = "torch"

import keras

import keras_spmd
import training
from keras_spmd.distribution_lib import process_id


class Kill(keras.callbacks.Callback):
    def __init__(self, kills):
        super().__init__()
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.after = [k[2] for k in kills if k[:2] == [attempt, process_id()]]
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.count in self.after:
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(keras.callbacks.Callback):
    """Time for a test to send signals."""

    def on_train_batch_end(self, batch, logs=None):
        print("batch", batch, "of process", os.getpid(), flush=True)
        time.sleep(0.2)


def main():
    # A shell that starts the tests in the background has made its children deaf to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, kind, jit, kills, result = sys.argv[1:]
    kills = [[int(n) for n in kill.split(":")] for kill in kills.split(",") if kill]
    keras.distribution.set_distribution(training.of_ranks("rows" if jit == "0" else "data"))
    if "backup" in kind:
        callback = keras.callbacks.BackupAndRestore(folder, save_freq=2)
    else:
        callback = keras_spmd.ShardedCheckpoint(folder, every_steps=2)
    callbacks = [callback, Kill(kills), *([Slow()] if "slow" in kind else [])]
    options = {"jit_compile": jit == "1"}
    if "patient" in kind:
        callbacks += training.patient()
        options |= {"epochs": 20, "rate": training.RATE}
    found = training.fit(callbacks, **options)
    if process_id() == 0:
        with open(result, "wb") as file:
            pickle.dump(found, file)


if __name__ == "__main__":
    main()

"""Words that ranks leave for each other in the job's store.

Not collectives: they may be left and waited for in a thread, while the steps go on.
"""

import json
import time

import torch.distributed as dist

from keras_spmd import _failures, _processes, _settings, _whereabouts


class Words:
    """The words about one matter, such as one checkpoint. All ranks give it the same name."""

    def __init__(self, matter: str) -> None:
        self.matter = matter
        self.rank, self.size = _processes.process_id(), _processes.num_processes()
        self.store: dist.Store | None = _processes.store_aside() if self.size > 1 else None
        self._alone: dict[str, str] = {}

    def say(self, key: str, word: str) -> None:
        if self.store is None:
            self._alone[self._key(self.rank, key)] = word
        else:
            self.store.set(self._key(self.rank, key), word)

    def hear(self, rank: int, key: str, doing: str) -> str:
        """What a rank says, as soon as it does. `doing` is what for, if it never does."""
        if self.store is None:
            return self._alone[self._key(rank, key)]
        _whereabouts.note()
        full, start = self._key(rank, key), time.monotonic()
        pause = 0.001
        while not self.store.check([full]):
            waited = time.monotonic() - start
            if _failures.is_ending():
                raise RuntimeError(f"Rank {self.rank} ends, and does not wait for others.")
            if waited > _settings.timeout():
                raise TimeoutError(
                    f"Rank {self.rank} waited {waited:.0f} s for rank {rank} to {doing}. All ranks "
                    "must do this; KERAS_SPMD_TIMEOUT sets how many seconds to wait."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self.store.get(full).decode()

    def gathered(self, word: str, doing: str) -> list[str]:
        """The words of all ranks, on all of them."""
        self.say("mine", word)
        if self.rank == 0:
            self.say("all", json.dumps([self.hear(r, "mine", doing) for r in range(self.size)]))
        words = json.loads(self.hear(0, "all", doing))
        self.part("mine", "all")
        return words

    def part(self, *keys: str) -> None:
        """All ranks have heard what they want. Rank 0, which may hold the store, leaves last."""
        self.say("bye", "")
        if self.rank == 0:
            for rank in range(self.size):
                self.hear(rank, "bye", f"hear the others about {self.matter}")
            self.forget(*keys, "bye")

    def forget(self, *keys: str) -> None:
        """Remove what all ranks have said, once nobody will ask for it any more."""
        for rank in range(self.size):
            for key in keys:
                if self.store is not None:
                    self.store.delete_key(self._key(rank, key))

    def _key(self, rank: int, key: str) -> str:
        return f"words/{self.matter}/{key}/{rank}"

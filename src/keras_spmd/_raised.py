"""What rank 0 raised, for the others to raise too.

One `except PermissionError` in a script has to catch it on all ranks, or on none of them: a rank
that goes on alone would wait for the others.
"""

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        AttributeError,
        FileExistsError,
        FileNotFoundError,
        ImportError,
        IsADirectoryError,
        KeyError,
        MemoryError,
        ModuleNotFoundError,
        NotADirectoryError,
        NotImplementedError,
        OSError,
        PermissionError,
        RuntimeError,
        TypeError,
        ValueError,
    )
}


def as_word(error: Exception) -> str:
    """An error as a word that ranks can say to each other."""
    return f"{type(error).__name__}: {error}"


def of_rank_0(word: str, doing: str) -> Exception:
    """The error that was said: of the same kind, if Python itself has it."""
    name, _, _ = word.partition(": ")
    return _KINDS.get(name, RuntimeError)(f"Rank 0 could not {doing}: {word}")

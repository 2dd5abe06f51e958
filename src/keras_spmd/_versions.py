"""The versions of Keras and torch whose internals this package knows."""

import re

KERAS = ((3, 14), (3, 16))
TORCH = ((2, 11), (2, 16))


def check_versions(keras_version: str, torch_version: str) -> None:
    """Raise an error that names what was found and what is supported."""
    wrong = [
        f"{name} {found} (supported: at least {_dotted(low)}, below {_dotted(high)})"
        for name, found, (low, high) in (
            ("keras", keras_version, KERAS),
            ("torch", torch_version, TORCH),
        )
        if not low <= _numbers(found) < high
    ]
    if wrong:
        raise ImportError(
            f"keras-spmd doesn't know the internals of {' and '.join(wrong)}. Install versions "
            f"that it knows: pip install 'keras>={_dotted(KERAS[0])},<{_dotted(KERAS[1])}' "
            f"'torch>={_dotted(TORCH[0])},<{_dotted(TORCH[1])}', or a keras-spmd for yours."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

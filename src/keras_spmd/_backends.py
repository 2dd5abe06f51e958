"""Which backend Keras takes, where nobody said and its own choice isn't installed.

Keras takes TensorFlow if it is told nothing, and writes that down in its home at the first import.
With torch alone on a machine, `import keras` fails then.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def choose_torch_if_there_is_nothing_else() -> None:
    """Must be called before Keras is imported. What the user chose, or has installed, stays."""
    if "KERAS_BACKEND" in os.environ or "keras" in sys.modules:
        return
    if importlib.util.find_spec(configured() or "tensorflow") is None:
        os.environ["KERAS_BACKEND"] = "torch"


def configuration() -> Path:
    """Keras's file, whether there is one or not."""
    return Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"


def configured() -> str | None:
    """The backend that it names."""
    try:
        return str(json.loads(configuration().read_text())["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

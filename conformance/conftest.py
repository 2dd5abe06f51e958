"""Stands for the conftest.py of Keras's repository, which its wheel doesn't carry."""

import keras
import pytest


def skip_if_backend(name: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(keras.config.backend() == name, reason=reason)

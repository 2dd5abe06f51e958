"""The subcommands of `keras-spmd`, a module each; the table of them is in `keras_spmd.cli`."""


class Mistake(ValueError):
    """Something about what the user asked for; the command says it without a traceback."""

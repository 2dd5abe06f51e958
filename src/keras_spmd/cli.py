"""The command `keras-spmd`: a table of subcommands, each a module of `keras_spmd.commands`.

To add one, write a module with `add_arguments(parser)` and `run(arguments) -> int`, whose docstring
is its help (the examples with it), and add a row to `COMMANDS`. A module is imported when its
subcommand is called.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from keras_spmd import _starting
from keras_spmd.commands import Mistake


class Command(NamedTuple):
    """A row of the table.

    Args:
        name: What the user types.
        help: One line for the list of subcommands.
        module: The module of `keras_spmd.commands` that does it.
        needs_keras: Whether it uses Keras in this process; the package is imported completely then.
    """

    name: str
    help: str
    module: str
    needs_keras: bool = False


COMMANDS = (
    Command("run", "start a script on all devices, of one host or many", "run"),
    Command("doctor", "look at this host, test keras-spmd on it, say what to fix", "doctor"),
    Command("plan", "memory, network and time of a step on any mesh", "plan", needs_keras=True),
    Command("convert", "checkpoints to Keras's files and back", "convert", needs_keras=True),
    Command("completion", "print a script for the Tab key of bash, zsh or fish", "completion"),
)

EXAMPLES = """\
examples:
  keras-spmd run train.py                 one process for each GPU, or two on CPUs
  keras-spmd run -n 4 train.py --lr 1e-3  four processes
  keras-spmd doctor                       does everything work here, and how fast
  keras-spmd run --help                   all options, with examples
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """What the command does; returns its exit code.

    Example:

    >>> from keras_spmd.cli import main
    >>> main(["run", "--help"])  # doctest: +SKIP
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except SystemExit as end:  # argparse's, after `--help` or a wrong option
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except Mistake as mistake:
        sys.stderr.write(f"keras-spmd {words[0]}: error: {mistake}\n")
        return 2
    except BrokenPipeError:  # `keras-spmd ... | head`
        sys.stderr.close()
        return 141


def _dispatch(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        overview().parse_args(words or ["--help"])
        return 0
    command = find(words[0])
    module = load(command)
    arguments = parser_of(command, module).parse_args(words[1:])
    if command.needs_keras:
        _starting.import_all()
    return module.run(arguments)


def find(name: str) -> Command:
    """The row with this name."""
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"There are {', '.join(names)}."
    overview().error(f"no command '{name}'. {hint}")


def load(command: Command) -> ModuleType:
    return importlib.import_module(f"keras_spmd.commands.{command.module}")


def overview() -> argparse.ArgumentParser:
    """The parser of `keras-spmd` itself, which knows only the names and a line about each."""
    width = max(len(command.name) for command in COMMANDS)
    rows = "\n".join(f"  {command.name:<{width}}  {command.help}" for command in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="keras-spmd",
        usage="keras-spmd COMMAND ...",
        description=f"keras.distribution for Keras on PyTorch.\n\ncommands:\n{rows}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"keras-spmd {_version()}")
    return parser


def parser_of(command: Command, module: ModuleType) -> argparse.ArgumentParser:
    """The parser of a subcommand; its module may have `parents()`, whose options it takes."""
    parser = argparse.ArgumentParser(
        prog=f"keras-spmd {command.name}",
        usage=getattr(module, "USAGE", None),
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=getattr(module, "parents", list)(),
        conflict_handler="resolve",
    )
    module.add_arguments(parser)
    return parser


def _version() -> str:
    from keras_spmd import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())

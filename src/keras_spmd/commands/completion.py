"""Print a script that makes the Tab key know the subcommands and options of keras-spmd.

examples:
  keras-spmd completion bash >> ~/.bashrc
  keras-spmd completion zsh > ~/.zfunc/_keras-spmd     (a folder of your $fpath)
  keras-spmd completion fish > ~/.config/fish/completions/keras-spmd.fish
"""

import argparse
import shlex
from typing import NamedTuple

from keras_spmd import cli


class Option(NamedTuple):
    """An option of a subcommand: its names, what may follow it, and a line about it."""

    names: list[str]
    takes_value: bool
    choices: list[str]
    help: str


class Entry(NamedTuple):
    """What is known of a subcommand; `words` are what it takes that is not an option."""

    name: str
    help: str
    options: list[Option]
    words: list[str]
    takes_script: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="whose Tab key")


def run(arguments: argparse.Namespace) -> int:
    print(SHELLS[arguments.shell](entries()), end="")
    return 0


def entries() -> list[Entry]:
    """The table of subcommands, with what their parsers say."""
    return [_entry(command) for command in cli.COMMANDS]


def _entry(command: cli.Command) -> Entry:
    parser = cli.parser_of(command, cli.load(command))
    options, words, takes_script = [], list[str](), False
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        if not action.option_strings:
            words += choices
            takes_script |= action.nargs == argparse.REMAINDER
        elif action.help != argparse.SUPPRESS:
            # torchrun has each name with underscores, too.
            names = [name for name in action.option_strings if "_" not in name]
            about = " ".join((action.help or "").split()).split(". ")[0]
            options.append(Option(names, action.nargs != 0, choices, about))
    return Entry(command.name, command.help, options, words, takes_script)


def bash(table: list[Entry]) -> str:
    names = " ".join([*(entry.name for entry in table), "--help", "--version"])
    words, values = [], []
    for entry in table:
        options = " ".join(name for option in entry.options for name in option.names)
        words.append(
            f"        {entry.name}) options='{options}'; words='{' '.join(entry.words)}' ;;"
        )
        values += [
            f"        '{entry.name} {name}') words='{' '.join(option.choices)}' ;;"
            for option in entry.options
            if option.choices
            for name in option.names
        ]
    scripts = "|".join(entry.name for entry in table if entry.takes_script)
    newline = "\n"
    return f"""\
# Completion of keras-spmd for bash; made by `keras-spmd completion bash`.
_keras_spmd() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" options='' words='' i
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W '{names}' -- "$word") )
        return
    fi
    # Behind a script come its own arguments.
    case "$command" in {scripts or "-"})
        for (( i = 2; i < COMP_CWORD; i++ )); do
            [[ "${{COMP_WORDS[i]}}" == *.py ]] && return
        done ;;
    esac
    case "$command $before" in
{newline.join(values)}
    esac
    if [[ -z "$words" ]]; then
        case "$command" in
{newline.join(words)}
        esac
    fi
    [[ "$word" == -* ]] && words="$options"
    COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o default -F _keras_spmd keras-spmd
"""


def zsh(table: list[Entry]) -> str:
    names = "\n".join(f"        {shlex.quote(f'{e.name}:{e.help}')}" for e in table)
    cases = "\n".join(_zsh_case(entry) for entry in table)
    return f"""\
#compdef keras-spmd
# Completion of keras-spmd for zsh; made by `keras-spmd completion zsh`.
_keras_spmd() {{
    local -a commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$command" in
{cases}
    esac
}}
compdef _keras_spmd keras-spmd
"""


def _zsh_case(entry: Entry) -> str:
    specs = []
    for option in entry.options:
        about = _plain(option.help)
        values = f"({' '.join(option.choices)})" if option.choices else "_files"
        value = f":value:{values}" if option.takes_value else ""
        specs += [shlex.quote(f"{name}[{about}]{value}") for name in option.names]
    rest = f":what:({' '.join(entry.words)})" if entry.words else ":file:_files"
    lines = " \\\n                ".join([*specs, shlex.quote(f"*{rest}")])
    return f"        {entry.name})\n            _arguments \\\n                {lines} ;;"


def fish(table: list[Entry]) -> str:
    lines = [
        "# Completion of keras-spmd for fish; made by `keras-spmd completion fish`.",
        *(
            f"complete -c keras-spmd -f -n __fish_use_subcommand -a {e.name} -d {_quoted(e.help)}"
            for e in table
        ),
    ]
    for entry in table:
        condition = f"complete -c keras-spmd -n '__fish_seen_subcommand_from {entry.name}'"
        if entry.words:
            lines.append(f"{condition} -f -a '{' '.join(entry.words)}'")
        for option in entry.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            values = " -r" if option.takes_value else ""
            values += f" -f -a '{' '.join(option.choices)}'" if option.choices else ""
            lines.append(f"{condition} {names}{values} -d {_quoted(option.help)}")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text without the signs that mean something to zsh's `_arguments`."""
    return "".join(" " if sign in "[]:" else sign for sign in text)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}

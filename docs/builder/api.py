"""The reference: docstrings and signatures of all public names as Markdown."""

import argparse
import inspect
import os
import re
from typing import Any
from unittest import mock

from builder.pages import SiteError

GROUPS = {
    "Looking at models": ["explain", "show"],
    "Layouts": [
        "layouts.fsdp",
        "layouts.zero1",
        "layouts.tensor_parallel",
        "layouts.sequence_parallel",
        "layouts.hybrid",
        "layouts.auto",
        "layouts.apply",
    ],
    "Dry runs": ["plan", "plan.meta", "plan.Device", "plan.Network", "plan.Link"],
    "Checkpoints": [
        "ShardedCheckpoint",
        "save_checkpoint",
        "load_checkpoint",
        "latest_checkpoint",
        "CheckpointError",
    ],
    "Loops of your own": ["distribute_batch"],
    "Jobs": ["launch"],
    "Tensors on a mesh": [
        "is_dtensor",
        "ensure_dtensor",
        "convert_tensors_to_dtensor",
        "create_replicate_dtensor",
        "get_dtensor_local",
        "get_dtensor_spec",
    ],
    "The plug-in itself": ["activate", "deactivate", "ShardingWarning"],
}
SECTIONS = ("Args", "Returns", "Raises", "Attributes")


def public_names() -> list[str]:
    """What `keras_spmd`, its recipes and its dry runs offer."""
    import keras_spmd

    def offered(owner: Any) -> list[str]:
        return [n for n in dir(owner) if not n.startswith("_") and callable(getattr(owner, n))]

    own = [n for n in offered(keras_spmd) if n in vars(keras_spmd)]
    recipes = [f"layouts.{n}" for n in offered(keras_spmd.layouts)]
    plans = [f"plan.{n}" for n in offered(keras_spmd.plan)]
    return sorted([*own, *recipes, *plans])


def documented_names() -> list[str]:
    """All names of the groups; an error if that isn't what is public."""
    names = [name for group in GROUPS.values() for name in group]
    if sorted(names) != public_names():
        odd = sorted(set(names) ^ set(public_names()))
        raise SiteError(f"docs/builder/api.py and keras_spmd don't agree about {', '.join(odd)}.")
    return names


def value_of(name: str) -> Any:
    import keras_spmd

    value: Any = keras_spmd
    for part in name.split("."):
        value = getattr(value, part)
    return value


def reference() -> str:
    """All groups as Markdown."""
    documented_names()
    parts = []
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [_entry(name) for name in names]
    return "\n\n".join(parts)


def names_with_urls(page_url: str, slug: Any) -> dict[str, str]:
    """Where each name is explained."""
    return {
        f"keras_spmd.{name}": f"{page_url}#{slug(f'keras_spmd.{name}')}"
        for name in documented_names()
    }


def _entry(name: str) -> str:
    value = value_of(name)
    doc = inspect.getdoc(value) or ""
    if not doc or doc.startswith("Exception raised"):
        raise SiteError(f"keras_spmd.{name} has no docstring.")
    if inspect.isclass(value) and issubclass(value, Exception):
        signature = ""
    else:
        signature = f"```python\nkeras_spmd.{name}{_signature(value)}\n```"
    return "\n\n".join(filter(None, [f"### `keras_spmd.{name}`", signature, markdown_of(doc)]))


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(inspect.Signature(bare))
    if len(text) < 70:
        return text
    parts = [str(p) for p in bare]
    kinds = [p.kind for p in bare]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return "(\n    " + ",\n    ".join(parts) + ",\n)"


def markdown_of(doc: str) -> str:
    """A docstring as Markdown: examples fenced, arguments as lists."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", doc):
        head, _, rest = paragraph.partition("\n")
        if head.rstrip(":") in SECTIONS and head.endswith(":"):
            parts.append(f"**{head.rstrip(':')}**\n\n{_items(rest)}")
        elif paragraph.strip() == "Example:":
            continue
        elif paragraph.startswith(">>>"):
            parts.append(f"```pycon\n{re.sub(r'  # doctest:.*', '', paragraph)}\n```")
        else:
            parts.append(paragraph)
    return "\n\n".join(parts)


def _items(text: str) -> str:
    """`name: what it is`, with further lines indented, as a list; other text as it is."""
    lines = inspect.cleandoc(text).splitlines()
    items: list[str] = []
    for line in lines:
        found = re.match(r"(\w+): (.*)", line)
        if found:
            items.append(f"- `{found[1]}`: {found[2]}")
        elif items:
            items[-1] += " " + line.strip()
        else:
            return "\n".join(lines)
    return "\n".join(items)


def command_line() -> str:
    """What `--help` says of each command."""
    from keras_spmd import cli

    parts = []
    with mock.patch.dict(os.environ, {"COLUMNS": "96"}):
        for command in cli.COMMANDS:
            parser: argparse.ArgumentParser = cli.parser_of(command, cli.load(command))
            text = f"$ keras-spmd {command.name} --help\n{parser.format_help()}"
            parts.append(f"## keras-spmd {command.name}\n\n```console\n{text}```")
    return "\n\n".join(parts)

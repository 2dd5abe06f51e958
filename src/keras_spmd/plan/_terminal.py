"""Where tables are printed: a terminal, a notebook, or a file that somebody reads later."""

import io
import os
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

# Nobody's window limits what goes to a file or a pipe.
_WIDE = 160


def console() -> Console:
    found = Console()
    if not found.is_terminal and not found.is_jupyter and "COLUMNS" not in os.environ:
        found.width = _WIDE
    return found


def titled(title: str, table: Table) -> Group:
    """rich breaks the title of a table where the table ends."""
    return Group(Text(title, style="italic"), table)


def text_of(view: Any, width: int) -> str:
    """What would be printed, without colours."""
    file = io.StringIO()
    Console(file=file, width=width, no_color=True).print(view)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())

"""The code blocks of a page, as the tests run them.

```python               runs on the page's ranks; all of a page share their names
```python ranks=1       runs in one process
```python file=train.py is written to the page's folder
```bash file=job.sh     too
```console              its lines with `$ ` run in that folder and end with 0; other lines are
                        parts of what they print, with `...` for anything
```console exit=1       the last one ends with this instead
```output               what the Python block before prints on rank 0
```text                 no code: a picture made of letters, a tree of files
```console slow         runs with `make test-all` only
<!-- setup ... -->      Python that runs, or is written to a file, but is not shown
"""

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from markdown_it import MarkdownIt

from builder.pages import Page, SiteError

LANGUAGES = ("python", "bash", "console", "output", "text", "")
SETUP = re.compile(r"<!--\s*(setup[^\n]*)\n(.*?)-->", re.DOTALL)


@dataclass
class Block:
    """One block: its language, its text, where it is, and the words behind its language."""

    language: str
    text: str
    line: int
    options: dict[str, str] = field(default_factory=dict)
    output: str | None = None

    @property
    def file(self) -> str | None:
        return self.options.get("file")

    @property
    def is_python(self) -> bool:
        return self.language == "python" and self.file is None


@dataclass
class Command:
    """A line of a console block, and the lines of its output that are shown."""

    line: str
    shown: list[str]
    status: int = 0


def parse_info(info: str) -> tuple[str, dict[str, str]]:
    """`python file=train.py` as the language and the options."""
    words = shlex.split(info)
    options = dict(word.partition("=")[::2] for word in words[1:])
    return (words[0] if words else ""), options


def blocks_of(page: Page) -> list[Block]:
    """All blocks of a page in their order; an output belongs to the block before it."""
    blocks: list[Block] = []
    for token in MarkdownIt("commonmark").parse(page.text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            for info, text in SETUP.findall(token.content):
                blocks.append(Block("python", text, line, parse_info(info)[1]))
        elif token.type == "code_block":
            raise SiteError(f"{page.where}:{line}: code is fenced by ```, not indented.")
        elif token.type == "fence":
            _add(blocks, page, line, token)
    return blocks


def _add(blocks: list[Block], page: Page, line: int, token: Any) -> None:
    language, options = parse_info(token.info)
    if language not in LANGUAGES:
        raise SiteError(f"{page.where}:{line}: '{language}' is none of {LANGUAGES}.")
    if language != "output":
        blocks.append(Block(language, token.content, line, options))
    elif not blocks or not blocks[-1].is_python:
        raise SiteError(f"{page.where}:{line}: no Python block stands before this output.")
    else:
        blocks[-1].output = token.content


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block."""
    commands: list[Command] = []
    continues = False
    for line in block.text.splitlines():
        if continues:
            commands[-1].line += "\n" + line
        elif line.startswith("$ "):
            commands.append(Command(line[2:], []))
        else:
            commands[-1].shown.append(line)
        is_command = continues or line.startswith("$ ")
        continues = is_command and line.endswith("\\")
    if commands:
        commands[-1].status = int(block.options.get("exit", "0"))
    return commands


def is_shown(expected: list[str], printed: str) -> bool:
    """Whether the lines come in this order in what was printed; `...` stands for anything."""
    lines = iter(line.strip() for line in printed.splitlines())
    for shown in expected:
        if shown.strip() in ("", "..."):
            continue
        pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
        if not any(re.fullmatch(pattern, line) for line in lines):
            return False
    return True

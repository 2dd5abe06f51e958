"""The table of pages, docs/pages.toml, and what is in each of them."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
TABLE = DOCS / "pages.toml"


class SiteError(Exception):
    """Something in the sources that a reader would stumble over."""


@dataclass
class Page:
    """One page of the site.

    Attributes:
        source: Its Markdown file.
        name: The name of its HTML file, without the suffix.
        section: The part of the sidebar that it belongs to.
        ranks: On how many ranks the tests run its Python blocks.
        needs: Modules without which the tests skip its blocks.
        slow: Whether its commands take long, and run with `make test-all` only.
        environment: Variables that its blocks find.
    """

    source: Path
    name: str
    section: str
    ranks: int = 2
    needs: list[str] = field(default_factory=list)
    slow: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{self.name}.html"

    @property
    def text(self) -> str:
        return self.source.read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        found = re.search(r"^# (.+)$", self.text, re.MULTILINE)
        if found is None:
            raise SiteError(f"{self.where} has no title: a line that begins with '# '.")
        return found[1].replace("`", "")

    @property
    def where(self) -> str:
        return self.source.relative_to(ROOT).as_posix()


def read_pages(table: Path = TABLE) -> list[Page]:
    """All pages, in the order of the sidebar."""
    content = tomllib.loads(table.read_text(encoding="utf-8"))
    pages = []
    for section in content["section"]:
        for row in section["pages"]:
            row = dict(row)
            source = (table.parent / row.pop("file")).resolve()
            if not source.exists():
                raise SiteError(f"{table.name} names '{source}', which doesn't exist.")
            name = row.pop("name", source.stem)
            pages.append(Page(source, name, section["title"], **row))
    forgotten = {path.resolve() for path in table.parent.glob("*.md")} - {p.source for p in pages}
    if forgotten:
        names = ", ".join(sorted(path.name for path in forgotten))
        raise SiteError(f"{table.name} has no row for {names}.")
    return pages

"""Every link of the built site leads somewhere."""

from html.parser import HTMLParser
from pathlib import Path


class _Reader(HTMLParser):
    """Collects the ids and the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken_links(folder: Path) -> list[str]:
    """A sentence for each link that leads nowhere, and each anchor that there is twice."""
    readers = {}
    for path in sorted(folder.glob("*.html")):
        readers[path.name] = reader = _Reader()
        reader.feed(path.read_text(encoding="utf-8"))
    problems = []
    for name, reader in readers.items():
        twice = {anchor for anchor in reader.ids if reader.ids.count(anchor) > 1}
        problems += [f"{name}: the anchor '{anchor}' is there twice" for anchor in sorted(twice)]
        for link in dict.fromkeys(reader.links):
            problem = _problem(link, name, folder, readers)
            if problem:
                problems.append(f"{name}: the link '{link}' {problem}")
    return problems


def _problem(link: str, name: str, folder: Path, readers: dict[str, _Reader]) -> str | None:
    if link.startswith(("http://", "https://")):
        return None
    file, _, anchor = link.partition("#")
    target = file or name
    if not (folder / target).exists():
        return "leads to no file"
    if anchor and target in readers and anchor not in readers[target].ids:
        return "leads to no anchor of that page"
    return None

"""Build the documentation site: `python docs/build.py [folder]`, by default build/site.

Markdown files in docs/ become HTML pages that need nothing else: no server, no network. The table
of pages is docs/pages.toml. A link that leads nowhere is an error.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path.insert(0, str(Path(__file__).parent))

from builder import api, links, search, template
from builder.markdown import Renderer, coloured, slug
from builder.pages import DOCS, ROOT, SiteError, read_pages

LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml"}


def build(folder: Path) -> int:
    """Write the site, and return how many pages it has."""
    pages = read_pages()
    renderer = Renderer(pages, api.names_with_urls("api.html", slug))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.html"):
        old.unlink()
    rows = []
    for page in pages:
        content, headings = renderer.render(page)
        rows += search.entries(page, content, headings)
        _write(folder / page.url, template.page_html(page, pages, content, headings))
    for source, url in renderer.sources.items():
        code = coloured(source.read_text(encoding="utf-8"), LANGUAGES.get(source.suffix, "text"))
        where = source.relative_to(ROOT).as_posix()
        _write(folder / url, template.source_html(where, code, pages))
    _write(folder / "search-index.js", search.index_script(rows))
    for asset in [*(DOCS / "assets").iterdir(), *renderer.images]:
        shutil.copy(asset, folder / asset.name)
    problems = links.broken_links(folder)
    if problems:
        raise SiteError("\n".join(problems))
    return len(pages)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    arguments = parser.parse_args()
    try:
        count = build(arguments.folder)
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{count} pages in {arguments.folder}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())

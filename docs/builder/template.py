"""The frame of a page: sidebar, search, links to the neighbours."""

import itertools
from html import escape

from builder.pages import Page

Headings = list[tuple[int, str, str]]


def page_html(page: Page, pages: list[Page], content: str, headings: Headings) -> str:
    """A whole HTML document."""
    at = pages.index(page)
    before = pages[at - 1] if at else None
    after = pages[at + 1] if at + 1 < len(pages) else None
    return frame(
        page.title,
        _sidebar(page, pages),
        f"<article>{content}</article>{_neighbours(before, after)}",
        _contents(headings),
    )


def source_html(where: str, code: str, pages: list[Page]) -> str:
    """A source file that a page links to."""
    content = f'<h1>{escape(where)}</h1><div class="block"><pre tabindex="0"><code>{code}</code>'
    return frame(where, _sidebar(None, pages), f"<article>{content}</pre></div></article>", "")


def frame(title: str, sidebar: str, content: str, contents: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - keras-spmd</title>
<link rel="icon" href="icon.svg">
<link rel="stylesheet" href="style.css">
<script src="site.js"></script>
<script src="search-index.js" defer></script>
</head>
<body>
<a class="skip" href="#content">To the text</a>
<header>
<a class="home" href="index.html">keras-spmd</a>
<div class="search"><input type="search" placeholder="Search" aria-label="Search"
 autocomplete="off"><ol class="found" hidden></ol></div>
<button class="theme" type="button" aria-label="Light or dark">&#9680;</button>
</header>
<div class="columns">
<nav class="pages" aria-label="Pages"><details open><summary>Pages</summary>
{sidebar}</details></nav>
<main id="content">{content}</main>
{contents}
</div>
</body>
</html>
"""


def _sidebar(current: Page | None, pages: list[Page]) -> str:
    parts = []
    for section, members in itertools.groupby(pages, lambda page: page.section):
        rows = "".join(_row(page, page is current) for page in members)
        parts.append(f"<h2>{escape(section)}</h2><ul>{rows}</ul>")
    return "".join(parts)


def _row(page: Page, is_current: bool) -> str:
    mark = ' aria-current="page"' if is_current else ""
    return f'<li><a href="{page.url}"{mark}>{escape(page.title)}</a></li>'


def _neighbours(before: Page | None, after: Page | None) -> str:
    left = f'<a rel="prev" href="{before.url}">&larr; {escape(before.title)}</a>' if before else ""
    right = f'<a rel="next" href="{after.url}">{escape(after.title)} &rarr;</a>' if after else ""
    return f'<nav class="neighbours" aria-label="Neighbours">{left}<span></span>{right}</nav>'


def _contents(headings: Headings) -> str:
    rows = [
        f'<li class="level{level}"><a href="#{escape(anchor)}">'
        f"{escape(text.removeprefix('keras_spmd.'))}</a></li>"
        for level, text, anchor in headings
        if level in (2, 3)
    ]
    if len(rows) < 2:
        return ""
    return f'<nav class="contents" aria-label="On this page"><ul>{"".join(rows)}</ul></nav>'

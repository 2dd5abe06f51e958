"""The index of the search: a line for each section of each page."""

import json
import re
from html import unescape

from builder.pages import Page
from builder.template import Headings


def entries(page: Page, html: str, headings: Headings) -> list[dict[str, str]]:
    """The sections of a page: title, heading, address and text."""
    starts = [(m.start(), m[1]) for m in re.finditer(r'<h[1-6] id="([^"]+)"', html)]
    texts = {anchor: text for _, text, anchor in headings}
    result = []
    for i, (start, anchor) in enumerate(starts):
        end = starts[i + 1][0] if i + 1 < len(starts) else len(html)
        body = html[start:end].partition("\n")[2]
        is_title = i == 0
        result.append(
            {
                "page": page.title,
                "title": "" if is_title else texts[unescape(anchor)],
                "url": page.url if is_title else f"{page.url}#{unescape(anchor)}",
                "text": _plain(body),
            }
        )
    return result


def index_script(rows: list[dict[str, str]]) -> str:
    """A script rather than data: a page that was opened as a file may load scripts only."""
    return f"window.SEARCH_INDEX = {json.dumps(rows, ensure_ascii=False)};\n"


def _plain(html: str) -> str:
    text = re.sub(r"<svg.*?</svg>|<a class=\"anchor\".*?</a>", " ", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())

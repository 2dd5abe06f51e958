"""A page's Markdown as HTML: anchors, links between pages, colours, pictures."""

import itertools
import re
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from builder.blocks import SETUP, parse_info
from builder.generated import generate
from builder.pages import ROOT, Page, SiteError
from builder.pictures import picture

LEXERS = {"output": "text", "": "text"}
NAME = re.compile(r"(keras_spmd(?:\.\w+)+)(?:\(.*\))?")
PICTURE = re.compile(r"<!--\s*picture: (\w+)\n(.*?)-->", re.DOTALL)
GENERATE = re.compile(r"<!--\s*generate: (.+?)\s*-->")


class Renderer:
    """Renders pages, and remembers which source files they link to.

    Args:
        pages: All pages, for links between them.
        names: Where each public name is explained: `{"keras_spmd.show": "api.html#..."}`.
    """

    def __init__(self, pages: list[Page], names: dict[str, str]) -> None:
        self.urls = {page.source: page.url for page in pages}
        self.names = names
        self.sources: dict[Path, str] = {}
        self.images: set[Path] = set()
        self.markdown = MarkdownIt("commonmark").enable("table")
        self.markdown.add_render_rule("fence", _fence)

    def render(self, page: Page) -> tuple[str, list[tuple[int, str, str]]]:
        """The HTML of a page, and its headings: level, text and anchor."""
        text = GENERATE.sub(lambda found: generate(found[1], page), page.text)
        tokens = self.markdown.parse(text)
        headings = _add_anchors(tokens)
        in_heading = False
        for token in tokens:
            if token.type in ("heading_open", "heading_close"):
                in_heading = token.type == "heading_open"
            if token.type == "inline":
                self._rewrite(token, page, in_heading)
            elif token.type == "html_block":
                token.content = _html(token.content)
        html = self.markdown.renderer.render(tokens, self.markdown.options, {})
        html = html.replace("<table>", '<div class="wide"><table>')
        return html.replace("</table>", "</table></div>"), headings

    def _rewrite(self, token: Token, page: Page, in_heading: bool) -> None:
        children: list[Token] = []
        is_linked = in_heading
        for child in token.children or []:
            if child.type in ("link_open", "link_close"):
                is_linked = child.type == "link_open" or in_heading
            if child.type == "image":
                child.attrs["src"] = self._url(str(child.attrs["src"]), page)
            if child.type == "link_open":
                child.attrs["href"] = self._url(str(child.attrs["href"]), page)
            if child.type == "code_inline" and not is_linked:
                children += self._named(child)
            else:
                children.append(child)
        token.children = children

    def _named(self, child: Token) -> list[Token]:
        """A public name in running text leads to its explanation."""
        found = NAME.fullmatch(child.content)
        url = self.names.get(found[1]) if found else None
        if url is None:
            return [child]
        start = Token("link_open", "a", 1, attrs={"href": url})
        return [start, child, Token("link_close", "a", -1)]

    def _url(self, href: str, page: Page) -> str:
        if re.match(r"https?:|#", href):
            return href
        path, _, anchor = href.partition("#")
        target = (page.source.parent / path).resolve()
        if target in self.urls:
            return self.urls[target] + (f"#{anchor}" if anchor else "")
        if not target.is_relative_to(ROOT) or not target.is_file():
            raise SiteError(f"{page.where}: the link '{href}' leads to no file.")
        if target.suffix == ".png":
            self.images.add(target)
            return target.name
        self.sources[target] = f"source-{'-'.join(target.relative_to(ROOT).parts)}.html"
        return self.sources[target]


def slug(text: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def _add_anchors(tokens: list[Token]) -> list[tuple[int, str, str]]:
    headings: list[tuple[int, str, str]] = []
    used: dict[str, int] = {}
    for token, inline in itertools.pairwise(tokens):
        if token.type == "heading_open":
            text = "".join(child.content for child in inline.children or [])
            anchor = slug(text)
            used[anchor] = used.get(anchor, -1) + 1
            if used[anchor]:
                anchor = f"{anchor}-{used[anchor]}"
            token.attrs["id"] = anchor
            mark = Token("html_inline", "", 0, content=_mark(anchor))
            inline.children = [*(inline.children or []), mark]
            headings.append((int(token.tag[1]), text, anchor))
    return headings


def _mark(anchor: str) -> str:
    return f' <a class="anchor" href="#{escape(anchor)}" aria-label="link to this section">#</a>'


def _html(content: str) -> str:
    content = SETUP.sub("", content)
    return PICTURE.sub(lambda found: picture(found[1], found[2].strip()), content)


def coloured(code: str, language: str) -> str:
    """Code with the classes of Pygments."""
    lexer = get_lexer_by_name(LEXERS.get(language, language), stripnl=False)
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


def _fence(_: Any, tokens: list[Token], index: int, *__: Any) -> str:
    language, options = parse_info(tokens[index].info)
    title = f'<div class="file">{escape(options["file"])}</div>' if "file" in options else ""
    kind = language or "text"
    return (
        f'<div class="block {kind}">{title}<pre tabindex="0"><code>'
        f"{coloured(tokens[index].content, language)}</code></pre></div>\n"
    )

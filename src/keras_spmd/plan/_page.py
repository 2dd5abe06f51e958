"""The frame of a plan's page: its style and its script are inside of it, so it needs no network."""

from html import escape
from importlib import resources

_DARK = (
    "color-scheme: dark; --page: #14161a; --card: #1d2026; --ink: #e9ebef; --soft: #a3a9b5; "
    "--line: #343943; --good: #3ecf9f; --bad: #ff9159; --mark: #1f2f3d;"
)


def page(title: str, body: str) -> str:
    style = _read("page.css").replace("/*dark*/", _DARK)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        # Nothing may come from elsewhere, whatever a name in the plan says.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\"/>"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body>\n{body}\n"
        f"<script>\n{_read('page.js')}</script></body></html>\n"
    )


def _read(name: str) -> str:
    return resources.files("keras_spmd.plan").joinpath(name).read_text(encoding="utf-8")

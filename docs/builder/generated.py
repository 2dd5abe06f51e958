"""Parts of pages that are made of something else: `<!-- generate: what -->`."""

import re
from collections.abc import Callable

from builder import api
from builder.pages import DOCS, ROOT, Page, SiteError


def generate(what: str, page: Page) -> str:
    """The Markdown that stands for `what`, in this page."""
    kind, _, argument = what.partition(" ")
    if kind not in KINDS:
        raise SiteError(f"{page.where}: nothing is generated as '{kind}'; there are {[*KINDS]}.")
    return KINDS[kind](argument)


def _readme(heading: str) -> str:
    """The table under a heading of README.md, whose links are relative to the root."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n+(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None:
        raise SiteError(f"README.md has no heading '{heading}'.")
    return re.sub(r"\]\((?!https?:|#)(?:docs/)?", _from_docs, found[1].strip())


def _from_docs(found: re.Match) -> str:
    return "](" if found[0].endswith("docs/") else "](../"


def _versions(_: str) -> str:
    """What can be installed beside this version, from its own metadata."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python = re.search(r'requires-python = "(.+)"', text)
    assert python is not None
    rows = [("Python", python[1])]
    rows += re.findall(r'^    "(keras|torch)(.+)",$', text, re.MULTILINE)
    return _table(("", "versions"), [(name, f"`{versions}`") for name, versions in rows])


def _audits(_: str) -> str:
    """The sums of the audits' tables."""
    rows = []
    for name, what in (("ops", "functions of `keras.ops`"), ("layers", "layers of `keras.layers`")):
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        count = len(re.findall(r"^\| `", text, re.MULTILINE))
        for kind in ("eager", "captured"):
            sums = re.search(rf"^- {kind}: ([\d,]+) rows.*: (\d+) / (\d+) / (\d+)$", text, re.M)
            assert sums is not None
            right, replicated, wrong = (f"{int(number):,}" for number in sums.groups()[1:])
            rows.append((f"[{count} {what}]({name}.md)", kind, sums[1], right, replicated, wrong))
    head = ("", "", "layouts tried", "right, on shards", "right, replicated", "wrong")
    return _table(head, rows, numbers=4)


def _replicated(name: str) -> str:
    """The functions or layers of which some layout runs replicated, and how many."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| `(.+?)` \|[^|]*\| (\d+) / (\d+) / \d+ \|", text, re.MULTILINE)
    some = [(n, int(r), int(all_)) for n, r, all_ in ((n, b, int(a) + int(b)) for n, a, b in cells)]
    return ", ".join(f"`{n}` ({r} of {total})" for n, r, total in some if r)


def _conformance(_: str) -> str:
    text = (DOCS / "conformance.md").read_text(encoding="utf-8")
    rows = []
    for kind, what in (("data", "data parallel"), ("model", "every variable sharded")):
        found = re.search(rf"^{kind}: (\d+) of (\d+) tests", text, re.MULTILINE)
        assert found is not None
        rows.append((what, f"{int(found[1]):,}", f"{int(found[2]):,}"))
    return _table(("", "pass on two ranks", "pass without a mesh"), rows, numbers=2)


def _devices(_: str) -> str:
    """The figures that dry runs know."""
    import keras_spmd

    rows = []
    for name in ("A100", "H100", "H200", "B200", "CPU"):
        device = getattr(keras_spmd.plan, name)
        rows.append(
            (
                f'`"{name}"`',
                f"{device.memory / 2**30:.0f} GiB",
                f"{device.flops_16 / 1e12:g}",
                f"{device.bandwidth / 1e12:g} TB/s",
                f"{device.network.within.name}, {device.network.within.bandwidth / 1e9:g} GB/s",
                f"{device.network.across.name}, {device.network.across.bandwidth / 1e9:g} GB/s",
            )
        )
    head = ("device", "memory", "16-bit TFLOPS", "its memory", "inside of a host", "between hosts")
    return _table(head, rows)


def _table(head: tuple, rows: list[tuple], numbers: int = 0) -> str:
    marks = ["---"] * (len(head) - numbers) + ["--:"] * numbers
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, marks, *rows])


KINDS: dict[str, Callable[[str], str]] = {
    "api": lambda _: api.reference(),
    "command-line": lambda _: api.command_line(),
    "readme": _readme,
    "versions": _versions,
    "audits": _audits,
    "replicated": _replicated,
    "conformance": _conformance,
    "devices": _devices,
}

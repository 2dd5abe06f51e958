"""The documentation site builds without a broken link, and every code block on it runs."""

import doctest
import html
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import build  # noqa: E402
from bench import bench_of  # noqa: E402
from builder import api  # noqa: E402
from builder import blocks as site  # noqa: E402
from builder.pages import Page, SiteError, read_pages  # noqa: E402
from site_blocks import run_blocks  # noqa: E402

PAGES = {page.name: page for page in read_pages()}
WITH_CODE = [name for name, page in PAGES.items() if any(b.language for b in site.blocks_of(page))]
STAND_INS = Path(__file__).parent / "stand_ins"
# Compiling is not what the pages are about, and nobody watches.
QUICK = {"KERAS_SPMD_COMPILER": "none", "KERAS_SPMD_PROGRESS": "0", "COLUMNS": "120"}
# What the launcher of the tests themselves may have set.
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def slow_blocks(page: Page) -> list[site.Block]:
    return [b for b in site.blocks_of(page) if "slow" in b.options or page.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The site; building it fails if a link leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    assert build.build(folder) == len(PAGES)
    return folder


def test_the_site_has_every_page(folder):
    for page in PAGES.values():
        title = html.escape(page.title)
        assert f"<title>{title} - keras-spmd</title>" in (folder / page.url).read_text()


@pytest.mark.parametrize("link", ["start.html#nowhere", "nowhere.html", "#nowhere"])
def test_a_link_that_leads_nowhere_is_an_error(folder, tmp_path, link):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    index = tmp_path / "index.html"
    index.write_text(index.read_text() + f'<a href="{link}">x</a>')
    (problem,) = build.links.broken_links(tmp_path)
    assert problem.startswith(f"index.html: the link '{link}' leads to no ")


def test_no_page_loads_anything_from_elsewhere(folder):
    texts = [path for path in folder.iterdir() if path.suffix in (".html", ".css", ".js")]
    for path in texts:
        text = path.read_text()
        assert 'src="http' not in text
        assert "@import" not in text
        assert "<link rel" not in text or 'href="http' not in text.partition("</head>")[0]


def test_a_block_whose_language_is_unknown_is_an_error(tmp_path):
    source = ROOT / "docs" / "index.md"

    class Odd(Page):
        text = "# Odd\n\n```pyhton\nx\n```\n"

    with pytest.raises(SiteError, match=r"docs/index.md:3: 'pyhton' is none of"):
        site.blocks_of(Odd(source, "odd", "Odd"))


@pytest.mark.parametrize("name", [name for name in api.GROUPS["Dry runs"] if "." in name])
def test_examples_of_the_reference(name):
    """Those of other names are run by test_docs.py and test_layout_recipes.py."""
    test = doctest.DocTestParser().get_doctest(api.value_of(name).__doc__, {}, name, None, None)
    failures = []
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", WITH_CODE)
def test_every_file_of_a_page_is_used_by_a_later_block(name):
    blocks = site.blocks_of(PAGES[name])
    for i, block in enumerate(blocks):
        if block.file is not None:
            stem = block.file.partition(".")[0]
            assert any(stem in later.text for later in blocks[i + 1 :]), block.file


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_blocks_of_a_page_run(name, tmp_path):
    """Files are written first; then Python blocks run, and then commands."""
    page = PAGES[name]
    skip_without(page)
    write_files(page, tmp_path)
    run_python(page, tmp_path)
    slow = slow_blocks(page)
    run_commands(page, tmp_path, [b for b in site.blocks_of(page) if b not in slow])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in WITH_CODE if slow_blocks(PAGES[name])])
def test_all_commands_of_a_page_run(name, tmp_path):
    page = PAGES[name]
    skip_without(page)
    write_files(page, tmp_path)
    run_python(page, tmp_path)
    run_commands(page, tmp_path, site.blocks_of(page))


def skip_without(page: Page) -> None:
    missing = [name for name in page.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


def write_files(page: Page, folder: Path) -> None:
    for block in site.blocks_of(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


def run_python(page: Page, folder: Path) -> None:
    blocks = [block for block in site.blocks_of(page) if block.is_python]
    counts = sorted({int(block.options.get("ranks", page.ranks)) for block in blocks})
    for count in counts:
        own = [b for b in blocks if int(b.options.get("ranks", page.ranks)) == count]
        pieces = [(block.text, block.line) for block in own]
        kwargs = {"page": page.where, "blocks": pieces, "folder": str(folder)}
        kwargs["environment"] = {**QUICK, **page.environment}
        printed = bench_of(count).run(run_blocks, kwargs, timeout=180)[0]
        for block, text in zip(own, printed, strict=True):
            if block.output is not None:
                where = f"{page.where}:{block.line} printed\n{text}"
                assert site.is_shown(block.output.splitlines(), text), where


def run_commands(page: Page, folder: Path, blocks: list[site.Block]) -> None:
    env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    path = [str(STAND_INS), str(Path(sys.executable).parent), env.get("PATH", "")]
    env |= {"PATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env |= {"KERAS_BACKEND": "torch", **QUICK}
    for block in blocks:
        if block.language != "console":
            continue
        for command in site.commands_of(block):
            result = subprocess.run(
                ["bash", "-c", command.line],
                cwd=folder,
                env={**env, **page.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=240,
            )
            said = f"{page.where}:{block.line}: {command.line}\nprinted\n{result.stdout}"
            assert result.returncode == command.status, said
            assert site.is_shown(command.shown, result.stdout), said

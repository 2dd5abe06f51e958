"""Make the pictures of docs/pictures again: python docs/make_pictures.py (it needs a Chromium).

The plan is of a model like Llama 8B on 64 devices, which takes some minutes.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests")]
os.environ["KERAS_BACKEND"] = "torch"

import keras_spmd  # noqa: E402
from browser import Page, find_browser, open_page  # noqa: E402
from keras_spmd.plan._show import Row, Shards  # noqa: E402
from llama import llama  # noqa: E402

PICTURES = HERE / "pictures"
SIZE = {"blocks": 32, "width": 4096, "heads": 32, "groups": 8, "inner": 14336, "words": 128256}
LAYOUTS = {
    ".*embedding/embeddings": (None, "model"),
    ".*(query|key|value|gate|up|logits)/kernel": (None, "model"),
    ".*(out|down)/kernel": ("model", None),
}
TOKENS = ((16, 4096), "int32")
CHOSEN = "block_7/up/kernel"


def main() -> None:
    browser = find_browser()
    if browser is None:
        raise SystemExit("No Chromium was found. Set CHROMIUM to its path.")
    plan = keras_spmd.plan(
        lambda: llama(SIZE, 4096), (8, 8), ("batch", "model"), LAYOUTS, (TOKENS, TOKENS)
    )
    print(plan)
    draw(dataclasses.replace(plan, model="llama_8b"), browser)


def draw(plan: Any, browser: str) -> None:
    page_file, notebook_file = PICTURES / "plan.html", PICTURES / "shards.html"
    plan.to_html(page_file)
    notebook_file.write_text(_notebook(plan), encoding="utf-8")
    with open_page(browser) as page:
        try:
            _pictures(page, page_file, notebook_file)
        finally:
            page_file.unlink()
            notebook_file.unlink()
    for picture in PICTURES.glob("*.png"):
        _make_small(picture)


def _make_small(picture: Path) -> None:
    """With a palette a picture takes a third; where Pillow isn't installed, it stays as it is."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(picture, optimize=True)


def _pictures(page: Page, page_file: Path, notebook_file: Path) -> None:
    page.prefer("light")
    page.resize(1200, 1110)
    page.open(page_file)
    page.screenshot(PICTURES / "plan.png")
    page.resize(1200, 960)
    page.prefer("dark")
    page.type(".variables .filter", "block_7/")
    page.run(
        "[...document.querySelectorAll('.variables tbody tr')]"
        f".find(row => row.cells[0].textContent === '{CHOSEN}').id = 'chosen'"
    )
    page.click("#chosen td")
    page.run("document.querySelector('section:last-of-type').scrollIntoView()")
    page.point(".tensor rect:nth-child(4)")
    page.screenshot(PICTURES / "variables.png")
    page.prefer("light")
    page.resize(400, 800)
    page.open(page_file)
    page.screenshot(PICTURES / "narrow.png")
    page.resize(800, 440)
    page.open(notebook_file)
    page.screenshot(PICTURES / "shards.png")


def _notebook(plan: Any) -> str:
    rows = [Row(v.path, v.shape, v.divided, v.nbytes, v.local_nbytes) for v in plan.variables[:8]]
    shards = Shards(plan.model, plan.mesh, rows)
    style = "<style>body { font: 14px system-ui, sans-serif; }</style>"
    return f"<!DOCTYPE html><meta charset='utf-8'>{style}{shards._repr_html_()}"


if __name__ == "__main__":
    main()

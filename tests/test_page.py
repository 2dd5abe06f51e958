"""The page of a plan in a real browser: offline, in light and dark, wide and narrow."""

import dataclasses

import keras
import pytest
from keras import layers

import keras_spmd
from browser import find_browser, open_page
from keras_spmd.plan._html import page_of
from keras_spmd.plan._report import Transfer
from keras_spmd.plan._show import Row, Shards

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="no Chromium was found: install the package chromium, or set CHROMIUM to its path",
)
HOSTILE = (
    """</script><script>owned = 1</script><img src="http://x.invalid/a" onerror='owned = 1'>"""
)


def make():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(256, activation="relu", name="first"),
            layers.Dense(64, name="second"),
            layers.Dense(3, name="third"),
        ],
        name="little",
    )
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def plan():
    layouts = {
        ".*first/kernel": (None, "model"),
        ".*second/kernel": ("model", "batch"),
        ".*third/bias": ("batch",),
    }
    device = keras_spmd.plan.Device(
        "gadget", 2**20, 1e12, 1e12, 1e12, keras_spmd.plan.H100.network, reserved=2**18
    )
    return keras_spmd.plan(
        make, (4, 2), ("batch", "model"), layouts, ((32, 64), (32, 3)), device=device
    )


@pytest.fixture(scope="module")
def browser():
    with open_page(BROWSER) as page:
        yield page


@pytest.fixture
def page(browser, plan, tmp_path):
    browser.prefer("light")
    browser.resize(1200)
    plan.to_html(tmp_path / "plan.html")
    browser.open(tmp_path / "plan.html")
    return browser


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({selector!r})].map(e => e.innerText.trim())")


def visible(page, column, table="variables"):
    """What a column shows, from top to bottom."""
    rows = f".{table} tbody tr:not([hidden]) td:nth-child({column})"
    return texts(page, rows)


def test_it_needs_nothing_but_the_file(page, tmp_path):
    assert page.said == []
    assert page.asked == [(tmp_path / "plan.html").as_uri()]


def test_filters_by_what_is_typed(page, plan):
    assert visible(page, 1) == [v.path for v in plan.variables]
    page.type(".variables .filter", "kernel BATCH")
    assert visible(page, 1) == ["little/second/kernel"]
    assert texts(page, ".variables .told") == [f"1 of {len(plan.variables)}"]
    page.type(".variables .filter", "nothing like it")
    assert visible(page, 1) == []
    page.type(".variables .filter", "")
    assert len(visible(page, 1)) == len(plan.variables)
    kinds = [t.kind for t in plan.transfers]
    page.type(".collectives .filter", "all_reduce")
    assert len(visible(page, 1, "collectives")) == kinds.count("all_reduce")


def test_sorts_by_the_column_that_is_clicked(page, plan):
    head = ".variables th:nth-child({}) button".format
    page.click(head(6))
    by_size = sorted(plan.variables, key=lambda v: -v.local_nbytes)
    assert visible(page, 1) == [v.path for v in by_size], "the largest first"
    order = "document.querySelector('.variables th:nth-child(6)').ariaSort"
    assert page.run(order) == "descending"
    page.click(head(6))
    assert page.run(order) == "ascending"
    assert visible(page, 1)[0] == "little/third/bias"
    page.click(head(1))
    assert visible(page, 1) == sorted(v.path for v in plan.variables)
    assert page.run(order) is None


def brightness(page):
    colour = page.run("getComputedStyle(document.body).backgroundColor")
    return sum(int(n) for n in colour.strip("rgb()").split(","))


def test_the_theme_is_the_systems_until_it_is_chosen(page):
    assert brightness(page) > 700
    page.prefer("dark")
    assert brightness(page) < 100
    page.click("#theme")
    assert brightness(page) > 700
    page.prefer("light")
    page.click("#theme")
    assert brightness(page) < 100
    assert texts(page, "#theme") == ["Light theme"]


def widths(page, selector):
    return page.run(
        f"[...document.querySelectorAll({selector!r})].map(e => e.getBoundingClientRect().width)"
    )


def test_the_memory_bar_stands_against_the_limit(page, plan):
    (whole,) = widths(page, ".memory")
    memory = plan.memory
    parts = [memory.parameters, memory.gradients, memory.optimizer_state, memory.activations]
    expected = [nbytes / plan.memory_limit * whole for nbytes in parts]
    assert widths(page, ".memory i") == pytest.approx(expected, abs=1.5)
    assert texts(page, ".memory span") == ["limit 768.0 KiB"]
    assert plan.fits
    assert "fits: " in texts(page, ".tile")[0]


def test_a_step_that_does_not_fit(browser, plan, tmp_path):
    small = dataclasses.replace(plan.device, memory=2**18 + 2**16)
    plan = dataclasses.replace(plan, device=small, warnings=["It does not fit."])
    plan.to_html(tmp_path / "small.html")
    browser.resize(1200)
    browser.open(tmp_path / "small.html")
    (whole,) = widths(browser, ".memory")
    assert sum(widths(browser, ".memory i")) == pytest.approx(whole, abs=4)
    left = browser.run("document.querySelector('.memory .limit').offsetLeft")
    assert left == pytest.approx(2**16 / plan.memory.peak * whole, abs=4)
    assert "does not fit" in texts(browser, ".tile")[0]
    assert texts(browser, ".warnings li") == ["It does not fit."]


def test_the_timeline_is_as_long_as_the_step(page, plan):
    (whole,) = widths(page, ".timeline")
    end = max(span.start + span.seconds for span in plan.spans)
    drawn = page.run(
        "[...document.querySelectorAll('.timeline > rect')].map(e => [e.getAttribute('fill'),"
        "e.getAttribute('y'), e.getBoundingClientRect().width])"
    )

    def length(of):
        return sum(width for fill, y, width in drawn if of(fill, y)) / whole * end

    waiting = "url(#waiting)"
    assert end == pytest.approx(plan.seconds)
    computed = length(lambda fill, y: fill != waiting and y == "22")
    assert computed == pytest.approx(plan.compute_seconds, rel=0.01)
    assert length(lambda _, y: y == "68") == pytest.approx(plan.network_seconds, rel=0.01)
    waited = length(lambda fill, _: fill == waiting)
    assert waited == pytest.approx(plan.exposed_seconds, rel=0.01)
    page.point(".timeline > rect[y='68']")
    first = next(span for span in plan.spans if span.lane == "network")
    assert texts(page, "#span")[0].startswith(f"{first.phase}, {first.label}: ")
    page.run("zoom.value = 2; zoom.dispatchEvent(new Event('input'))")
    assert widths(page, ".timeline") == pytest.approx([4 * whole], rel=0.01)


LOOKS = "(e => [e.style.fill, e.style.fillOpacity])"


def test_the_chosen_variable_is_shown_on_the_mesh(page, plan):
    """Each device has the colour of the part that it holds."""
    assert texts(page, ".where code") == ["little/second/kernel"], "the one in most parts"
    about = texts(page, ".where p")[0]
    assert "(256, 64) float32, 64.0 KiB: 8 parts of (128, 16), 8.0 KiB each" in about
    looks = page.run(
        f"[...document.querySelectorAll('.mesh g')].map(g => [+g.dataset.number,"
        f"{LOOKS}(g.querySelector('rect'))])"
    )
    assert sorted(number for number, _ in looks) == list(range(8))
    parts = page.run(f"[...document.querySelectorAll('.tensor rect')].map({LOOKS})")
    assert len(parts) == 8
    for number, look in looks:
        row, column = number % 2, number // 2  # rows over 'model', columns over 'batch'
        assert look == parts[4 * row + column]
    page.click(".variables tbody tr:nth-child(1)")
    assert texts(page, ".where code") == ["little/first/kernel"]
    assert len(page.run(f"[...document.querySelectorAll('.tensor rect')].map({LOOKS})")) == 2


def test_pointing_says_which_slice_is_where(page):
    page.point(".tensor rect:nth-child(6)")  # the second row, the second column
    assert texts(page, ".where output") == ["[128:256, 16:32] is on device 3."]
    faint = page.run("[...document.querySelectorAll('.mesh g:not(.faint)')].length")
    assert faint == 1
    page.click(".variables tbody tr:nth-child(1)")
    page.point(".mesh g[data-number='0'] rect")
    assert texts(page, ".where output") == ["[:, 0:128] is on devices 0, 2, 4, 6."]


def test_a_dim_that_is_too_small_is_whole(page, plan):
    """Three elements for four devices are not divided, whatever the layout says."""
    number = next(i for i, v in enumerate(plan.variables) if v.path.endswith("third/bias"))
    assert visible(page, 7)[number] == "8"
    page.click(f".variables tbody tr:nth-child({number + 1})")
    assert "whole on 8 devices" in texts(page, ".where p")[0]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_narrow_window_shows_it_all(page, plan, theme):
    page.prefer(theme)
    page.resize(400, 800)
    assert page.run("document.documentElement.scrollWidth") == 400
    paths = page.run(
        "[...document.querySelectorAll('.variables tbody td')].map(e => {"
        "const b = e.getBoundingClientRect(); return [b.left, b.right]; })"
    )
    assert all(0 <= left <= right <= 400 for left, right in paths), "no column is cut off"
    page.type(".variables .filter", "kernel")
    assert len(visible(page, 1)) == 3
    page.click(".variables th:nth-child(6) button")
    assert visible(page, 1)[0] in ("little/first/kernel", "little/second/kernel")


def test_names_are_only_names(browser, plan, tmp_path):
    variables = [dataclasses.replace(v, path=HOSTILE + v.path) for v in plan.variables]
    spans = [dataclasses.replace(s, label=HOSTILE) for s in plan.spans]
    transfers = [Transfer("all_reduce", 1, HOSTILE, "forward", [HOSTILE] * 5)]
    device = dataclasses.replace(plan.device, name=HOSTILE)
    mesh = {HOSTILE: 4, "model": 2}
    axes = tuple(HOSTILE if axis == "batch" else axis for axis in variables[2].axes)
    variables[2] = dataclasses.replace(variables[2], axes=axes)
    variables = [v for v in variables if "batch" not in v.axes]
    memory = dataclasses.replace(plan.memory, where=HOSTILE)
    hostile = dataclasses.replace(
        plan,
        model=HOSTILE,
        mesh=mesh,
        memory=memory,
        variables=variables,
        spans=spans,
        transfers=transfers,
        device=device,
        warnings=[HOSTILE],
        batch=[HOSTILE],
        repeats={HOSTILE: 9},
    )
    hostile.to_html(tmp_path / "hostile.html")
    browser.open(tmp_path / "hostile.html")
    assert browser.run("typeof owned") == "undefined"
    assert browser.run("document.images.length") == 0
    assert browser.run("document.scripts.length") == 1
    assert (browser.said, len(browser.asked)) == ([], 1)
    assert texts(browser, "h1") == [HOSTILE]
    assert visible(browser, 1)[0].startswith(HOSTILE)


def test_thousands_of_variables_are_filtered_at_once(browser, plan, tmp_path):
    kernel = plan.variables[0]
    many = [dataclasses.replace(kernel, path=f"block_{i}/up/kernel") for i in range(5000)]
    path = tmp_path / "many.html"
    path.write_text(page_of(dataclasses.replace(plan, variables=many)), encoding="utf-8")
    assert path.stat().st_size < 4 * 2**20
    browser.open(path)
    milliseconds = [filter_by(browser, f"block_{i}") for i in range(73, 78)]
    assert len(visible(browser, 1)) == 11
    opening = browser.run("performance.getEntriesByType('navigation')[0].domComplete")
    assert min(milliseconds) < opening


def filter_by(browser, text):
    """Type into the field above the variables: how many milliseconds the page takes."""
    return browser.run(
        "(() => { const field = document.querySelector('.variables .filter');"
        f"const start = performance.now(); field.value = '{text}';"
        "field.dispatchEvent(new Event('input')); document.body.offsetHeight;"
        "return performance.now() - start; })()"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_shards_in_a_notebook(browser, theme, tmp_path):
    """Two outputs on one page, each with pictures of its own."""
    rows = [
        Row(f"{HOSTILE}/kernel", (512, 128), ("model", "batch"), 2**18, 2**15),
        Row("norm/scale", (128,), (None,), 512, 512),
    ]
    outputs = [
        Shards("one", {"batch": 4, "model": 2}, rows),
        Shards("two", {"batch": 2, "model": 1}, rows[1:]),
    ]
    body = "".join(shards._repr_html_() for shards in outputs)
    style = f"<style>:root {{ color-scheme: {theme}; }}</style>"
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{style}{body}", encoding="utf-8")
    browser.resize(800)
    browser.open(path)
    assert (browser.said, len(browser.asked)) == ([], 1)
    assert browser.run("typeof owned") == "undefined"
    drawn = browser.run(
        "[...document.querySelectorAll('use')].map(use => document.querySelector("
        "use.getAttribute('href')).querySelectorAll('path').length)"
    )
    assert drawn == [8, 1, 1]
    assert len(set(browser.run("[...document.querySelectorAll('symbol')].map(s => s.id)"))) == 3
    assert all(width == 84 for width in widths(browser, ".parts"))
    rows_shown = texts(browser, "tbody tr")
    assert "32.0 KiB" in rows_shown[0]
    assert rows_shown[1].split()[-1] == "8", "whole on all eight"

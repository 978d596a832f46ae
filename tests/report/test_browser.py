"""The page in a real browser: it draws without an error, plays clips, and loads nothing."""

from __future__ import annotations

import pytest

from mm_core.report.page import render
from mm_core.report.reading import read_runs
from tests.report.browser import Browser, find
from tests.report.test_page import HOSTILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium is installed"),
]


@pytest.fixture
def page_of(tmp_path):
    def write(*folders, media=10**7):
        path = tmp_path / "report.html"
        path.write_text(render(read_runs(list(folders)), media), encoding="utf-8")
        return path

    return write


@pytest.fixture
def browse(tmp_path):
    opened = []

    def start(page, **options) -> Browser:
        browser = Browser(tmp_path / f"profile{len(opened)}", **options)
        opened.append(browser)
        browser.open(page)
        return browser

    yield start
    for browser in opened:
        browser.close()


def quiet(browser: Browser, page) -> bool:
    """No error or warning, and no address but the page itself and what it holds."""
    elsewhere = [url for url in browser.requests if not url.startswith("data:")]
    return browser.errors == [] and elsewhere == [page.resolve().as_uri()]


def test_several_runs_are_drawn_without_an_error_and_controls_redraw(make_run, page_of, browse):
    page = page_of(make_run("a", sampled=(20, 40)), make_run("b", lr=5e-4, steps=25, validated=False))
    browser = browse(page)
    titles = browser.evaluate("[...document.querySelectorAll('h3')].map(node => node.textContent)")
    assert titles[:5] == ["Loss", "Validation loss", "Learning rate", "Gradient norm", "Seconds per step"]
    assert "a: loss by sigma" in titles and "b: seconds per step by phase" in titles
    loss = "document.querySelector('.card svg')"
    lines = f"{loss}.querySelectorAll('path[fill=none]').length"
    assert browser.evaluate(lines) == 2
    ticks = f"[...{loss}.querySelectorAll('text')].map(node => node.textContent).join()"
    before = browser.evaluate(ticks)
    browser.evaluate("document.querySelectorAll('.bar input[type=checkbox]')[0].click()")
    logarithmic = browser.evaluate(ticks)
    assert logarithmic != before and "0.1" in logarithmic
    choice = "document.querySelector('.bar select')"
    browser.evaluate(f"{choice}.value = 'samples', {choice}.dispatchEvent(new Event('change'))")
    assert "300" in browser.evaluate(ticks).split(",")  # 40 steps of 8 samples
    browser.evaluate("document.querySelectorAll('.bar input[type=checkbox]')[2].click()")
    assert browser.evaluate(lines) == 1
    diff = browser.evaluate("[...document.querySelectorAll('table')][1].innerText")
    assert "optimizer.lr" in diff and "0.0005" in diff
    assert quiet(browser, page)


def test_clips_play_and_the_slider_goes_through_their_steps(make_run, page_of, browse):
    page = page_of(make_run("a", sampled=(10, 20, 30)))
    browser = browse(page)
    browser.evaluate("document.querySelector('video').scrollIntoView()")
    browser.wait(
        "[...document.querySelectorAll('video')].every(v => v.readyState === 4 && v.currentTime > 0)"
    )
    captions = "[...document.querySelectorAll('figcaption')].map(node => node.textContent).join()"
    assert browser.evaluate(captions) == "step 10,step 20,step 30,step 10,step 20,step 30"
    browser.evaluate("document.querySelector('.stepper button').click()")
    assert browser.evaluate(captions) == "step 10,step 20,step 10,step 20"
    prompts = browser.evaluate("[...document.querySelectorAll('.prompt')].map(node => node.textContent)")
    assert prompts == ["a red circle moves left", "a blue square moves up"]
    assert quiet(browser, page)


def test_clips_that_are_not_carried_or_damaged_are_named(make_run, page_of, browse):
    folder = make_run("a", sampled=(10,))
    browser = browse(page_of(folder, media=0))
    text = browser.evaluate("document.querySelector('figcaption').textContent")
    assert (
        text
        == "step 10: not embedded in this page; see samples/step_00000010/000-a-red-circle-moves-left.mp4"
    )
    for path in folder.glob("samples/*/*.mp4"):
        path.write_bytes(b"no video")
    browser = browse(page_of(folder))
    browser.wait("document.querySelector('figcaption').textContent.includes('does not decode')")


def test_a_prompt_that_holds_a_script_is_text(make_run, page_of, browse):
    page = page_of(make_run("a", sampled=(10,), prompts=(HOSTILE,)))
    browser = browse(page)
    assert browser.evaluate("document.querySelector('.prompt').textContent") == HOSTILE
    assert browser.evaluate("window.hacked === undefined && !document.querySelector('img, main script')")
    assert quiet(browser, page)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_in_both_schemes(make_run, page_of, browse, dark):
    page = page_of(make_run("a", sampled=(10,)))
    browser = browse(page, width=360, height=740, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    colour = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate(colour) == ("rgb(20, 22, 26)" if dark else "rgb(246, 247, 249)")
    assert quiet(browser, page)


def test_a_run_of_one_line_and_one_that_is_not_finite(make_run, page_of, browse):
    short, broken = make_run("short", steps=1, validated=False), make_run("broken", steps=3, validated=False)
    (broken / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n{"step": 2, "loss": "Infinity"}\n')
    page = page_of(short, broken)
    browser = browse(page)
    assert "2 not finite, marked" in browser.evaluate("document.querySelector('.card').textContent")
    assert browser.evaluate("document.querySelectorAll('.card svg path.bad').length") == 2
    browser.evaluate("document.querySelectorAll('.bar input[type=checkbox]')[0].click()")
    browser.evaluate("document.querySelectorAll('.bar input[type=checkbox]')[1].click()")
    assert quiet(browser, page)


def test_smoothing_is_an_exponential_mean_without_a_bias_to_its_start(make_run, page_of, browse):
    browser = browse(page_of(make_run("a")))
    values, weight = [4.0, 1.0, 3.0], 0.9
    mean = mass = 0.0
    expected = []
    for value in values:
        mean, mass = weight * mean + (1 - weight) * value, weight * mass + (1 - weight)
        expected.append(mean / mass)
    assert browser.evaluate(f"smooth({values}, {weight})") == pytest.approx(expected, rel=1e-12)
    assert browser.evaluate("smooth([2, null, 2], 0.5)") == [2, None, 2]

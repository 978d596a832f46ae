"""Each page in wide and narrow windows: no text is cut, overlaps another or is smaller than 12 pixels."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

from mm_core.builtin.configs.data import MediaSource
from mm_core.contracts import Clip
from mm_core.data.datasets.media_page import render as inspect_page
from mm_core.data.datasets.media_report import inspect
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.media.contact_sheet import write_contact_sheet
from mm_core.data.media.video_files import write_clips
from mm_core.report.align import render as align
from mm_core.report.align.compare import compare
from mm_core.report.align.records import read_record
from mm_core.report.page import render
from mm_core.report.reading import read_runs
from support import conversation_sets as sets
from tests.report.browser import Browser, find
from tests.telemetry.test_align import PLANTED, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium is installed"),
]
place = sets.place
ROOT = Path(__file__).parents[2]

LONG = "a red circle moves slowly to the left over a meadow, " * 12

FAULTS = """(() => {
  const faults = [], drawn = new Map(), width = document.documentElement.clientWidth;
  let seen = 0;
  if (document.documentElement.scrollWidth > width) faults.push("the page is wider than its window");
  const root = document.querySelector("article") || document.body;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const own = node.parentElement;
    const hidden = own.closest("script, noscript, option, title") || !own.checkVisibility();
    if (!node.data.trim() || hidden) continue;
    seen++;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), named = node.data.trim().slice(0, 60);
    const svg = own.ownerSVGElement;
    const size = parseFloat(getComputedStyle(own).fontSize) * (svg ? own.getScreenCTM().a : 1);
    if (size < 11.99) faults.push(`${size.toFixed(1)} pixels: ${named}`);
    const cut = (edge) => box.left < edge.left - 1 || box.right > edge.right + 1;
    if (svg) {
      if (cut(svg.getBoundingClientRect())) faults.push(`outside its drawing: ${named}`);
      const others = drawn.get(svg) || drawn.set(svg, []).get(svg);
      for (const [other, at] of others)
        if (box.left < at.right && at.left < box.right && Math.abs(box.top - at.top) < box.height - 3)
          faults.push(`on each other: ${other}, ${named}`);
      others.push([named, box]);
    }
    let scrolls = false;
    for (let each = own; each && each !== document.body; each = each.parentElement) {
      const flow = getComputedStyle(each).overflowX;
      const clips = !svg && (flow === "hidden" || flow === "clip");
      if (clips && cut(each.getBoundingClientRect())) faults.push(`cut: ${named}`);
      scrolls ||= flow === "auto" || flow === "scroll";
    }
    if (!scrolls && cut({ left: 0, right: width })) faults.push(`outside the window: ${named}`);
  }
  for (const shown of document.querySelectorAll("figure img, figure video"))
    if (getComputedStyle(shown).borderTopWidth !== "1px") faults.push("a picture without a border");
  for (const image of document.querySelectorAll("figure.sheet img"))
    if (image.clientWidth < image.naturalWidth) faults.push("the letters of a contact sheet are smaller");
  return { seen, faults };
})()"""


def report(folders, media: int = 10**7) -> str:
    return render(read_runs(folders), media)


def one_run(make_run, place, tmp_path) -> str:
    return report([make_run("a", sampled=(10, 20, 30, 40), prompts=(LONG, "a blue square"))])


def two_runs(make_run, place, tmp_path) -> str:
    return report([make_run("a", sampled=(20, 40)), make_run("b-" * 20, steps=25, lr=5e-4, sampled=(20,))])


def sheet(make_run, place, tmp_path) -> str:
    """A report whose clips are too large: it has the contact sheet alone."""
    folder = make_run("a", sampled=(10,), prompts=("x",))
    frames = torch.randint(0, 256, (8, 96, 160, 3), dtype=torch.uint8)
    noise = Clip(frames.permute(3, 0, 1, 2) / 127.5 - 1, 8.0, LONG)
    write_clips([noise] * 4, folder / "samples/step_00000010")
    path = folder / "samples/step_00000010/contact_sheet.png"
    write_contact_sheet([(frames.numpy() // 64, LONG)], path, "a, step 10")
    text = report([folder], 4 * -(-path.stat().st_size // 3))
    assert base64.b64encode(path.read_bytes()).decode() in text and "data:video/mp4" not in text
    return text


def inspected(make_run, place, tmp_path) -> str:
    folder = tmp_path / "pictures"
    folder.mkdir()
    sizes = [(640, 160), (90, 270), (64, 48), (2000, 100)]
    for number, size in enumerate(sizes * 4):
        Image.new("RGB", size, (200, 40, 16 * number)).save(folder / f"{number:02}-{'long-' * number}.png")
        (folder / f"{number:02}-{'long-' * number}.txt").write_text(LONG if number % 5 == 0 else "W" * 99)
    clip = torch.full((3, 8, 48, 640), 0.5)
    write_clips([Clip(clip, 8.0, "x")], folder)
    (folder / "contact_sheet.png").unlink()
    (path,) = folder.glob("*.mp4")
    path.with_suffix(".txt").write_text("a clip")
    media = MediaTextDataset([MediaSource(str(folder))], num_frames=5, height=48, width=64)
    splits = {"train": (media, inspect(media)), "validation": (sets.dataset(place), [])}
    return inspect_page("run", splits, {})


def compared(make_run, place, tmp_path) -> str:
    change, *_ = PLANTED["eps"]
    folders = train(tmp_path / "one"), train(tmp_path / "two", change)
    for number, folder in enumerate(folders):
        facts = json.loads((folder / "record.json").read_text())
        (folder / "record.json").write_text(json.dumps({**facts, "config": {"eps": f"{number}" * 99}}))
    result = compare(*map(read_record, folders))
    return align.page(result, [f"/runs/{'long/' * 20}{folder.name}" for folder in folders], "3 of 4 differ")


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("make", [one_run, two_runs, sheet, inspected, compared])
def test_nothing_is_cut_and_letters_can_be_read(make_run, place, tmp_path, make, width):
    page = tmp_path / "page.html"
    page.write_text(make(make_run, place, tmp_path), encoding="utf-8")
    browser = Browser(tmp_path / "profile", width=width, height=900)
    try:
        browser.open(page)
        browser.wait("[...document.querySelectorAll('video')].every(v => v.readyState === 4)")
        found = browser.evaluate(FAULTS)
        browser.evaluate(
            "document.querySelectorAll('input[type=checkbox]:not(:checked)').forEach(b => b.click())"
        )
        clicked = browser.evaluate(FAULTS)  # on a log scale, each bin on its own
        browser.picture(tmp_path / f"{make.__name__}-{width}.png", whole=True)
        errors = browser.errors
    finally:
        browser.close()
    assert found["seen"] > 20 and found["faults"] + clicked["faults"] == [] and errors == []
    with Image.open(tmp_path / f"{make.__name__}-{width}.png") as picture:
        assert picture.width == width and len(picture.convert("RGB").getcolors(2**24)) > 20


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the documentation, built."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    return folder


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("page", ["", "lora-for-comfyui", "your-own-dit", "launching", "prepare-data"])
def test_a_page_of_the_documentation_is_not_cut_and_can_be_read(site, tmp_path, page, width):
    browser = Browser(tmp_path / "profile", width=width, height=900)
    try:
        browser.open(site / page / "index.html")
        browser.wait("[...document.images].every(image => image.complete)")
        found = browser.evaluate(FAULTS)
        pictures = browser.evaluate("[...document.images].map(image => image.naturalWidth)")
    finally:
        browser.close()
    assert found["seen"] > 20 and found["faults"] == []
    assert all(pictures) and (len(pictures) >= 3) >= (page == "")

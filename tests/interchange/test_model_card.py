"""The model card of an export can be published."""

from __future__ import annotations

import pytest
import yaml

from mm_core.interchange.model_card import Card, render


def test_a_card_reads_as_markdown_and_its_front_matter_as_yaml():
    card = Card(
        title="shapes,\nstep 10",
        summary="`predictor` after 10 steps.",
        library="diffusers",
        licence="Apache-2.0",
        base_model="lab/model",
        tags=["mm_core", "text-to-video", "mm_core"],
        loading='Wan.from_pretrained("out")',
        facts=[("weights", "a | b")],
        settings={"task": {"shift": 5.0, "sizes": [1, 2]}},
        data=[("train", "core/video_text", "64", "annotations ab12")],
        metrics={"validation/loss": 0.123456789, "validation/psnr": "nan", "rows": 3},
        made_with=[("torch", "2.13.0")],
    )
    text = render(card)
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "diffusers",
        "license": "apache-2.0",
        "base_model": "lab/model",
        "tags": ["mm_core", "text-to-video"],
    }
    assert body.startswith("\n# shapes, step 10\n")
    assert '````python\nWan.from_pretrained("out")\n````' in body
    assert "| weights | a \\| b |" in body
    assert "| validation/loss | 0.123457 |\n| validation/psnr | nan |\n| rows | 3 |" in body
    config = body.split("````yaml\n")[1].split("````")[0]
    assert yaml.safe_load(config) == {"task": {"shift": 5.0, "sizes": [1, 2]}}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/ckpt/Wan2.2/vae", ".../vae"),
        ("/home/me/ckpt/", ".../ckpt"),
        ("~/ckpt/vae", ".../vae"),
        ("C:\\Users\\me\\vae", ".../vae"),
        ("file:///srv/vae", ".../vae"),
        ("--weights=/home/me/vae --fast", "--weights=.../vae --fast"),
        ("['/home/me/a', '/home/me/b']", "['.../a', '.../b']"),
        ("ckpt/Wan2.2/vae", "ckpt/Wan2.2/vae"),
        ("predictor.blocks.{*}", "predictor.blocks.{*}"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("1/2", "1/2"),
        ("${oc.env:CKPT}/vae", "${oc.env:CKPT}/vae"),
    ],
)
def test_paths_of_the_machine_stay_on_it(value, shown):
    text = render(Card("t", f"from {value} .", facts=[("a", value)], settings={"task": {"path": value}}))
    assert yaml.safe_load(text.split("````yaml\n")[1].split("````")[0]) == {"task": {"path": shown}}
    assert f"| a | {shown} |" in text and f"\nfrom {shown} .\n" in text


def test_secrets_stay_at_home():
    secrets = {"hub_token": "abc", "api_key": "${oc.env:KEY}", "deep": [{"password": "abc"}], "tokens": 3}
    secrets |= {"tokenizer": "umt5"}
    shown = yaml.safe_load(render(Card("t", "s", settings=secrets)).split("````yaml\n")[1].split("````")[0])
    assert shown == {
        "hub_token": "(withheld)",
        "api_key": "${oc.env:KEY}",
        "deep": [{"password": "(withheld)"}],
        "tokens": 3,
        "tokenizer": "umt5",
    }

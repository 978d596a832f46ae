"""Runs whose folders are named by the hub: trained, resumed without a network, pushed and pulled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from mm_core.interchange.import_weights import import_weights
from mm_core.plan import build_task
from support import warm
from support.hub import Hub, serving
from support.logs import losses
from support.runs import VIDEO, config_of

REPO = Path(__file__).parents[2]
CONFIGS = REPO / "plugins"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as running:
        yield running


def wan(folder: Path) -> dict[str, Any]:
    from mm_wan.testing import make_tiny_checkpoint

    make_tiny_checkpoint(folder / "model")
    document = yaml.safe_load((CONFIGS / "mm_wan/mm_wan/configs/t2v_tiny.yaml").read_text())
    del document["validation"], document["data"]["validation"]
    task = document["task"]
    task["predictor"]["from_pretrained"] = "MODEL"
    task["autoencoder"]["from_pretrained"] = "MODEL/vae"
    task["text_encoder"]["from_pretrained"] = "MODEL/text_encoder"
    return document | {"data": {"train": photos(folder), "loader": {"mode": "variable", "workers": 0}}}


def internvl(folder: Path) -> dict[str, Any]:
    from mm_internvl.testing import make_tiny_checkpoint, make_tiny_conversations

    make_tiny_checkpoint(folder / "model")
    make_tiny_conversations(folder / "digits")
    document = yaml.safe_load((CONFIGS / "mm_internvl/mm_internvl/configs/tiny.yaml").read_text())
    document["task"]["from_pretrained"] = document["data"]["train"]["processor"] = "MODEL"
    document["data"]["train"]["sources"] = [{"annotations": str(folder / "digits/conversations.jsonl")}]
    return document


def pipeline(kind: str) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        from mm_diffusers.testing import tiny_pipeline

        tiny_pipeline(folder / "model", kind)
        return {
            "run": {"name": "x"},
            "task": {"type": "diffusers", "pipeline": "MODEL", "text_encoder": {"dtype": "fp32"}},
            "data": {"train": photos(folder), "loader": {"mode": "variable", "workers": 0}},
            "optimizer": {"type": "adamw", "lr": 1e-3},
        }

    return make


def photos(folder: Path) -> dict[str, Any]:
    (folder / "photos").mkdir()
    for number in range(8):
        Image.new("RGB", (64, 64), (30 * number, 90, 40)).save(folder / f"photos/{number}.png")
        (folder / f"photos/{number}.txt").write_text(f"a photo of number {number}")
    sources = [{"annotations": str(folder / "photos")}]
    return {"type": "media_text", "sources": sources, "num_frames": 1, "max_height": 64, "max_width": 64}


MODELS = {
    "wan": wan,
    "internvl": internvl,
    "flux": pipeline("FluxPipeline"),
    "z_image": pipeline("ZImagePipeline"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_names_train_and_resume_offline_as_folders_do(model, hub, tmp_path):
    document = MODELS[model](tmp_path)
    document["train"] = {"steps": 3, "micro_batch_size": 1, "global_batch_size": 2}
    document |= {"checkpoint": {"every": 2}, "log": {"every": 1}}
    commit = hub.add("org/tiny", tmp_path / "model")
    online = {**os.environ, **hub.environment(tmp_path / "home")}
    offline = {**online, "HF_HUB_OFFLINE": "1"}
    found = {}
    for name, place in (("folder", str(tmp_path / "model")), ("named", "hub:org/tiny")):
        document["run"] = {"name": name, "dir": str(tmp_path), "seed": 5}
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump(document).replace("MODEL", place))
        trained(config, "--stop-after=2", env=online, code=75)
        if name == "named":
            hub.repos.clear()  # a resume needs nothing of it
        trained(config, env=offline)
        found[name] = losses(tmp_path / name)
    assert found["named"] == found["folder"] and len(found["named"]) == 3
    named = tmp_path / "named"
    assert "hub:org/tiny" not in (named / "config.yaml").read_text().replace(f"hub:org/tiny@{commit}", "")
    assert json.loads((named / "manifest.json").read_text())["hub"] == {"org/tiny@main": commit}


@pytest.mark.slow
def test_a_dry_run_names_what_it_would_fetch_and_plans_with_the_configs_alone(hub, tmp_path):
    document = wan(tmp_path) | {"train": {"steps": 1, "micro_batch_size": 1}}
    weights = sum(path.stat().st_size for path in (tmp_path / "model").rglob("*.safetensors"))
    commit = hub.add("org/tiny", tmp_path / "model")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(document).replace("MODEL", "hub:org/tiny"))
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    done = warm.mm("train", "--config", config, "--dry-run", "--json", "--strict", env=environment)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["missing_files"] == [] and plan["forecast"]["notes"] == []
    [row] = plan["hub"]
    assert (row["name"], row["commit"], row["bytes"]) == ("org/tiny@main", commit, weights)
    assert {module["name"]: module["parameters"] > 0 for module in plan["modules"]} == {
        "predictor": True,
        "autoencoder": True,
        "text_encoder": True,
    }
    assert not any(file.endswith("safetensors") for file in hub.gets), "configs only"
    shown = warm.mm("train", "--config", config, "--dry-run", env=environment).stdout
    assert f"to fetch from the hub: org/tiny@main, 3 files, {weights / 1e6:.2f} MB" in shown


@pytest.mark.slow
def test_an_export_is_pushed_in_one_commit_and_pulled_equal(hub, tmp_path):
    config = config_of(tmp_path, VIDEO)
    state = build_task(config).predictor.state_dict()
    save_file({name: torch.randn(tensor.shape) for name, tensor in state.items()}, tmp_path / "x.safetensors")
    saved, _ = import_weights(config, tmp_path / "x.safetensors")
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    words = ["export", "--run", saved, "--to", "safetensors", "--out", tmp_path / "out", "--push", "me/tuned"]
    refused = warm.mm(*words, env={**environment, "HF_TOKEN": ""})
    assert refused.returncode == 1 and "hf auth login" in refused.stderr and not (tmp_path / "out").exists()
    hub.role = "read"
    assert "this user's token may only read" in warm.mm(*words, env=environment).stderr
    hub.role = "write"
    stranger = warm.mm(*words[:-1], "them/tuned", env=environment).stderr
    assert "me is no member of them" in stranger and "me/NAME, us/NAME" in stranger
    done = warm.mm(*words, env=environment)
    assert done.returncode == 0, done.stderr
    assert "pushed: " in done.stdout and len(hub.pushed) == 1
    repo = hub.repos["me/tuned"]
    held = repo.commits[repo.branches["main"]]
    written = {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in tmp_path.glob("out/**/*")}
    assert {name: held[name] for name in written} == written and "README.md" in written
    assert b"init_from: {path: hub:me/tuned}" in held["README.md"]
    same = warm.mm("weights", "diff", "hub:me/tuned", tmp_path / "out", env=environment)
    assert same.returncode == 0, same.stdout + same.stderr
    assert b"hf_secret" not in b"".join(held.values()) and "hf_secret" not in done.stdout + done.stderr
    again = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    lost = warm.mm(*words[:-1], "me/other", env=again)
    assert lost.returncode == 1 and "Traceback" not in lost.stderr


@pytest.mark.slow
def test_hosts_that_found_different_commits_do_not_start(hub, tmp_path):
    config = hub_config(tmp_path, wan(tmp_path))
    found = []
    for rank in range(2):
        (tmp_path / "model/NOTES.md").write_text(str(rank))
        found.append(hub.add("org/tiny", tmp_path / "model"))
        fetched = [sys.executable, str(REPO / "tests/support/fetcher.py"), "hub:org/tiny"]
        environment = {**os.environ, **hub.environment(tmp_path / f"home{rank}")}
        subprocess.run(fetched, env=environment, check=True, capture_output=True)
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "mm_core.cli.main", "train", "--config", str(config)],
            env={
                **os.environ,
                **hub.environment(tmp_path / f"home{rank}"),
                "HF_HUB_OFFLINE": "1",
                **{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    shown = "".join(rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1], shown
    assert f"org/tiny@main: {found[0]} on rank 0; {found[1]} on rank 1" in shown, shown


@pytest.mark.slow
def test_a_resume_from_another_runs_checkpoint_reads_its_commit(hub, tmp_path):
    config = hub_config(tmp_path, wan(tmp_path))
    first = hub.add("org/tiny", tmp_path / "model")
    online = {**os.environ, **hub.environment(tmp_path / "home")}
    trained(config, "--stop-after=1", env=online, code=75)
    (tmp_path / "model/NOTES.md").write_text("newer")
    assert hub.add("org/tiny", tmp_path / "model") != first
    for name, path in (("of-run", "x"), ("of-checkpoint", "x/checkpoints/step_00000001")):
        trained(config, f"run.name={name}", "--resume", str(tmp_path / path), env=online)
        assert json.loads((tmp_path / name / "manifest.json").read_text())["hub"]["org/tiny@main"] == first


@pytest.mark.slow
def test_an_export_of_a_pipeline_fetches_the_parts_that_the_run_never_read(hub, tmp_path):
    document = wan(tmp_path)
    config = hub_config(tmp_path, document)
    commit = hub.add("org/tiny", tmp_path / "model")
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    trained(config, env=environment)
    shutil.rmtree(tmp_path / "home")  # as on another machine
    words = ["export", "--run", tmp_path / "x", "--to", "diffusers", "--out", tmp_path / "out"]
    done = warm.mm(*words, env=environment)
    assert done.returncode == 0, done.stderr
    for part in ("vae", "text_encoder"):
        kept = {file.name: file.read_bytes() for file in (tmp_path / "model" / part).iterdir()}
        assert {file.name: file.read_bytes() for file in (tmp_path / "out" / part).iterdir()} == kept
    assert f"org/tiny at {commit[:8]}" in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("label", "file"), [("peft", ""), ("diffusers", "style.safetensors")])
def test_a_lora_is_pushed_with_its_card(hub, tmp_path, label, file):
    document = wan(tmp_path)
    document["train"] = {"adapters": [{"rank": 2, "targets": ["to_q"]}]}
    config = hub_config(tmp_path, document)
    hub.add("org/tiny", tmp_path / "model")
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    trained(config, env=environment)
    out = tmp_path / "style" / file
    words = ["export", "--run", tmp_path / "x", "--to", f"lora/{label}", "--out", out, "--push", "us/style"]
    done = warm.mm(*words, env=environment)
    assert done.returncode == 0, done.stderr
    repo = hub.repos["us/style"]
    held = repo.commits[repo.branches["main"]]
    assert len(hub.pushed) == 1 and b"base_model: org/tiny" in held["README.md"]
    assert {file or "adapter_model.safetensors", "README.md"} <= held.keys()
    assert not any("/" in name for name in held)


def hub_config(folder: Path, document: dict[str, Any]) -> Path:
    """The config of a run of two steps whose model is `hub:org/tiny`."""
    document["run"] = {"name": "x", "dir": str(folder), "seed": 5}
    steps = {"steps": 2, "micro_batch_size": 1, "global_batch_size": 2}
    document["train"] = {**document.get("train", {}), **steps}
    config = folder / "x.yaml"
    config.write_text(yaml.safe_dump(document).replace("MODEL", "hub:org/tiny"))
    return config


def trained(config: Path, *options: str, env: dict[str, str], code: int = 0) -> None:
    done = warm.mm("train", "--config", config, *options, env=env)
    assert done.returncode == code, done.stdout + done.stderr

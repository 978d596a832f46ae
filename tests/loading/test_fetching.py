"""What is fetched from a hub, by real processes from a real server on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.hub import Hub, serving

FETCHER = Path(__file__).parents[1] / "support/fetcher.py"
WEIGHTS = os.urandom(300_000)
PIPELINE = {
    "model_index.json": b"{}",
    "flux1.safetensors": b"the same weights once more, in another layout",
    "README.md": b"# a model",
    "transformer/config.json": b'{"of": "transformer"}',
    "transformer/diffusion_pytorch_model.safetensors": WEIGHTS,
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"half",
    "transformer/diffusion_pytorch_model.bin": b"a pickle",
    "tokenizer/tokenizer.json": b"[]",
    "vae/config.json": b'{"of": "vae"}',
    "vae/diffusion_pytorch_model.safetensors": b"of the autoencoder",
}
READ = [
    "model_index.json",
    "tokenizer/tokenizer.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as running:
        yield running


def publish(hub: Hub, name: str, files: dict[str, bytes], branch: str = "main") -> str:
    from support.hub import Repo

    return hub.repos.setdefault(name, Repo()).commit(files, branch)


def start(hub: Hub, home: Path, *names: str, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **hub.environment(home), **more}
    command = [sys.executable, str(FETCHER), *names]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def fetched(hub: Hub, home: Path, *names: str, **more: str) -> dict[str, Any]:
    process = start(hub, home, *names, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    found: dict[str, Any] = json.loads(out)
    return found


def refused(hub: Hub, home: Path, *names: str, **more: str) -> str:
    process = start(hub, home, *names, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err, out + err
    return out


def test_a_pipeline_is_its_parts_without_variants_pickles_and_other_layouts(hub, tmp_path):
    commit = publish(hub, "org/pipe", PIPELINE)
    found = fetched(hub, tmp_path, "hub:org/pipe")["hub:org/pipe"]
    assert found["files"] == READ and found["commit"] == commit
    assert Path(found["path"]).name == commit
    hub.gets.clear()
    assert fetched(hub, tmp_path, "hub:org/pipe")["hub:org/pipe"] == found
    assert sum(hub.gets.values()) == hub.asked == 1, "the second start asks for the commit only"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("hub:org/pipe/vae", ["config.json", "diffusion_pytorch_model.safetensors"]),
        ("small:hub:org/pipe/tokenizer", ["tokenizer.json"]),
        ("hub:org/pipe/transformer/diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin"),
        ("hub:org/pipe@v1/vae", ["config.json", "diffusion_pytorch_model.safetensors"]),
    ],
)
def test_a_folder_or_file_in_a_repository(hub, tmp_path, name, files):
    publish(hub, "org/pipe", PIPELINE)
    publish(hub, "org/pipe", {**PIPELINE, "vae/config.json": b'{"version": 1}'}, "v1")
    [found] = fetched(hub, tmp_path, name).values()
    assert found["files"] == files
    assert hub.fetched("transformer/diffusion_pytorch_model.safetensors") == 0
    if "@v1" in name:
        assert (Path(found["path"]) / "config.json").read_bytes() == b'{"version": 1}'


def test_of_shards_and_one_file_the_set_that_the_library_loads(hub, tmp_path):
    shards = {
        f"{stem}-0000{n}-of-00002.safetensors": b"%d" % n for stem in ("model", "other") for n in (1, 2)
    }
    index = {"model.safetensors.index.json": b"{}"}
    publish(hub, "org/sharded", {"config.json": b"{}", "consolidated.safetensors": b"all", **index, **shards})
    [found] = fetched(hub, tmp_path, "hub:org/sharded").values()
    assert [f for f in found["files"] if f.endswith("safetensors")] == sorted(
        f for f in shards if "model" in f
    )
    publish(hub, "org/both", {"config.json": b"{}", "model.safetensors": b"all", **index, **shards})
    [found] = fetched(hub, tmp_path, "hub:org/both").values()
    assert [f for f in found["files"] if f.endswith("safetensors")] == ["model.safetensors"]


def test_experts_in_folders_of_their_own_are_both_fetched(hub, tmp_path):
    """As Wan-AI publishes A14B: no index of parts, and nothing that we read in the top folder but pickles."""
    expert = {"config.json": b"{}", "diffusion_pytorch_model.safetensors": b"one"}
    experts = {
        f"{which}_noise_model/{file}": content
        for which in ("high", "low")
        for file, content in expert.items()
    }
    publish(hub, "org/experts", {**experts, "VAE.pth": b"a pickle", "tokenizer/spiece.model": b"words"})
    [found] = fetched(hub, tmp_path, "hub:org/experts").values()
    assert found["files"] == sorted([*experts, "tokenizer/spiece.model"])


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (["style.safetensors", "style_fp16.safetensors", "style.bf16.safetensors"], ["style.safetensors"]),
        (["adapter_config.json", "adapter_model.safetensors", "model.safetensors"], None),
        (["adapter_config.json", "adapter_model.safetensors"], None),
        (["pytorch_lora_weights.safetensors", "pytorch_lora_weights_2.safetensors"], None),
    ],
)
def test_of_a_folder_without_an_index_what_belongs_together(hub, tmp_path, files, read):
    publish(hub, "org/files", {file: file.encode() for file in files})
    [found] = fetched(hub, tmp_path, "hub:org/files").values()
    assert found["files"] == (read or files)


def test_a_hub_that_lists_no_sizes_serves_too(hub, tmp_path):
    publish(hub, "org/pipe", PIPELINE)
    hub.sizes = dict.fromkeys(PIPELINE)
    assert fetched(hub, tmp_path, "hub:org/pipe")["hub:org/pipe"]["files"] == READ
    hub.gets.clear()
    assert fetched(hub, tmp_path, "hub:org/pipe")["hub:org/pipe"]["files"] == READ
    assert hub.fetched("vae/config.json") == 0, "what is there is not fetched twice"


def test_a_task_of_slurm_finds_its_commit_from_a_shell_of_its_own_and_beside_another_revision(hub, tmp_path):
    first = publish(hub, "org/pipe", PIPELINE)
    publish(hub, "org/pipe", PIPELINE, "v1")
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "RANK": "0"}
    for name in ("hub:org/pipe", "hub:org/pipe@v1"):
        fetched(hub, tmp_path, name, **step)
    publish(hub, "org/pipe", {**PIPELINE, "vae/config.json": b'{"new": 1}'})
    environment = {**os.environ, **hub.environment(tmp_path), **step, "RANK": "1"}
    words = f"{sys.executable} {FETCHER} hub:org/pipe; true"
    done = subprocess.run(["bash", "-c", words], env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout)["hub:org/pipe"]["commit"] == first
    note = next(tmp_path.rglob("launch.json"))
    os.utime(note, (time.time() - 3600,) * 2)  # a job that is started again an hour later
    assert fetched(hub, tmp_path, "hub:org/pipe", **step)["hub:org/pipe"]["commit"] != first


def test_eight_ranks_and_two_launchers_of_a_host_fetch_once(hub, tmp_path):
    publish(hub, "org/pipe", PIPELINE)
    hub.bytes_a_second = 600_000.0  # so that all of them are there before it ends
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
    ranks = [start(hub, tmp_path, "hub:org/pipe", RANK=str(rank), **launch) for rank in range(8)]
    launchers = [start(hub, tmp_path, "hub:org/pipe") for _ in range(2)]
    for process in (*ranks, *launchers):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        assert next(iter(json.loads(out).values()))["files"] == READ
    assert {file: hub.fetched(file) for file in READ if b"{}" not in PIPELINE[file]} == {
        file: 1 for file in READ if b"{}" not in PIPELINE[file]
    }
    assert hub.asked <= 4, "one rank and each launcher ask for the commit, and the download once"


def test_the_ranks_of_a_launch_read_one_commit_though_the_hub_changes(hub, tmp_path):
    first = publish(hub, "org/pipe", PIPELINE)
    launch = {"MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    assert fetched(hub, tmp_path, "hub:org/pipe", RANK="0", **launch)["hub:org/pipe"]["commit"] == first
    second = publish(hub, "org/pipe", {**PIPELINE, "vae/config.json": b'{"new": 1}'})
    assert fetched(hub, tmp_path, "hub:org/pipe", RANK="1", **launch)["hub:org/pipe"]["commit"] == first
    assert (
        fetched(hub, tmp_path, "hub:org/pipe", RANK="0", MASTER_PORT="1")["hub:org/pipe"]["commit"] == second
    )
    assert fetched(hub, tmp_path, "hub:org/pipe")["hub:org/pipe"]["commit"] == second


def test_one_that_was_killed_in_mid_download_is_started_again(hub, tmp_path):
    large = "transformer/diffusion_pytorch_model.safetensors"
    files = {**PIPELINE, large: WEIGHTS * 50}
    publish(hub, "org/pipe", files)
    hub.bytes_a_second = 8_000_000.0
    process = start(hub, tmp_path, "hub:org/pipe")
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.rglob("*.incomplete")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "it is not in the cache" in refused(hub, tmp_path, "hub:org/pipe", HF_HUB_OFFLINE="1")
    hub.bytes_a_second = None
    found = fetched(hub, tmp_path, "hub:org/pipe")["hub:org/pipe"]
    assert found["files"] == READ
    for file in READ:
        assert (Path(found["path"]) / file).read_bytes() == files[file]
    assert hub.fetched(large) == 2 and hub.fetched("vae/config.json") == 1, "what was complete stays"
    assert fetched(hub, tmp_path, "hub:org/pipe", HF_HUB_OFFLINE="1")["hub:org/pipe"] == found


def test_what_is_in_the_cache_serves_without_a_network(hub, tmp_path):
    first = publish(hub, "org/pipe", PIPELINE)
    fetched(hub, tmp_path, "hub:org/pipe")
    publish(hub, "org/pipe", {**PIPELINE, "vae/config.json": b'{"new": 1}'})
    for more in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        process = start(hub, tmp_path, "hub:org/pipe", **more)
        out, err = process.communicate(timeout=60)
        assert json.loads(out)["hub:org/pipe"]["commit"] == first
        assert (f"{first} in the cache is used" in err) == ("HF_ENDPOINT" in more)
    assert fetched(hub, tmp_path, f"hub:org/pipe@{first}", HF_ENDPOINT="http://127.0.0.1:9")


def test_a_plan_of_newer_files_does_not_hide_those_of_the_last_run(hub, tmp_path):
    first = publish(hub, "org/pipe", PIPELINE)
    fetched(hub, tmp_path, "hub:org/pipe")
    publish(hub, "org/pipe", {**PIPELINE, "vae/config.json": b'{"new": 1}'})
    fetched(hub, tmp_path, "small:hub:org/pipe")
    [found] = fetched(hub, tmp_path, "hub:org/pipe", HF_HUB_OFFLINE="1").values()
    assert found["commit"] == first and found["files"] == READ


def test_what_another_tool_has_fetched_serves_too(hub, tmp_path):
    publish(hub, "org/pipe", PIPELINE)
    code = "import huggingface_hub as h; h.snapshot_download('org/pipe', allow_patterns=['vae/*'])"
    environment = {**os.environ, **hub.environment(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    [found] = fetched(hub, tmp_path, "hub:org/pipe/vae", HF_HUB_OFFLINE="1").values()
    assert found["files"] == ["config.json", "diffusion_pytorch_model.safetensors"]


def test_errors_are_a_sentence_each(hub, tmp_path):
    publish(hub, "org/pipe", PIPELINE)
    publish(hub, "org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
    publish(hub, "org/comfy", {"split/vae/a.safetensors": b"1", "split/vae/b.safetensors": b"2"})
    publish(hub, "org/parts", {"high/model.safetensors": b"1", "low/model.safetensors": b"2"})
    for name, words in {
        "hub:org/pipe@v9": "org/pipe has no revision v9",
        "hub:org/absent": "the hub has no model org/absent, or it is private",
        "hub:org/pipe/tarnsformer": "no folder or file tarnsformer at main\n  accepted: hub:org/pipe/",
        "hub:org/pickled": "org/pickled has no safetensors in its top folder",
        "hub:org/parts": "accepted: hub:org/parts/high, hub:org/parts/low",
        "hub:org/comfy@main/split/vae": "2 models of one file each in split/vae/\n"
        "  accepted: hub:org/comfy/split/vae/a.safetensors, hub:org/comfy/split/vae/b.safetensors",
    }.items():
        assert words in refused(hub, tmp_path, name), name
    assert "it is not in the cache, and the hub cannot be reached" in refused(
        hub, tmp_path / "empty", "hub:org/pipe", HF_ENDPOINT="http://127.0.0.1:9"
    )
    for status, words in {401: "the hub refuses the token", 429: "the hub has had too many requests"}.items():
        hub.refuses = status
        assert f"not in the cache, and {words}" in refused(hub, tmp_path, "hub:org/pipe"), status
    hub.refuses = None
    with_secret = "http://me:hf_secret@127.0.0.1:9"
    assert "hf_secret" not in refused(hub, tmp_path / "empty", "hub:org/pipe", HF_ENDPOINT=with_secret)
    hub.repos["org/pipe"].gated = True
    assert "org/pipe is gated\n  hint: accept its terms" in refused(hub, tmp_path, "hub:org/pipe")


def test_a_private_model_needs_a_token_which_nobody_stores(hub, tmp_path):
    publish(hub, "org/pipe", PIPELINE)
    hub.repos["org/pipe"].private = True
    assert "or it is private" in refused(hub, tmp_path, "hub:org/pipe")
    process = start(hub, tmp_path, "hub:org/pipe", HF_TOKEN="hf_secret")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and hub.tokens == {"Bearer hf_secret"}
    held = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hf_secret" not in held and "hf_secret" not in out + err


def test_a_file_that_changes_in_between_is_an_error(hub, tmp_path):
    publish(hub, "org/pipe", PIPELINE)
    hub.swapped["vae/diffusion_pytorch_model.safetensors"] = b"shorter"
    assert "a file changed while it was fetched" in refused(hub, tmp_path, "hub:org/pipe")
    hub.swapped.clear()
    [found] = fetched(hub, tmp_path, "hub:org/pipe").values()
    assert (
        Path(found["path"]) / "vae/diffusion_pytorch_model.safetensors"
    ).read_bytes() == b"of the autoencoder"


def test_a_disk_that_is_too_small_is_found_before_the_download(hub, tmp_path):
    publish(hub, "org/pipe", PIPELINE)
    hub.sizes["transformer/diffusion_pytorch_model.safetensors"] = 10**18
    assert "6 files have 1000000000.00 GB, and " in refused(hub, tmp_path, "hub:org/pipe")
    assert hub.fetched("config.json") == 0

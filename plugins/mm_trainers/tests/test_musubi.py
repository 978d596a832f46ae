"""Scripts and TOML files of musubi-tuner: exactly what they become."""

import re

import pytest
import torch
from mm_trainers.musubi import MusubiTuner

from mm_core.cli.main import main
from mm_core.errors import ConfigError, MMError
from mm_core.interchange import to_yaml
from mm_core.testing.data.video_readers import write_clip

FLAGS = {
    "task": "t2v-1.3B",
    "dit": "wan.safetensors",
    "vae": "vae.pth",
    "t5": "t5.pth",
    "dataset_config": "data.toml",
    "mixed_precision": "bf16",
    "network_module": "networks.lora_wan",
    "network_dim": 32,
    "learning_rate": "2e-4",
    "timestep_sampling": "shift",
    "discrete_flow_shift": "3.0",
    "output_dir": "out",
    "output_name": "motion",
}
CLIPS = """\
[general]
resolution = [832, 480]
enable_bucket = true
bucket_no_upscale = true

[[datasets]]
video_directory = "clips"
target_frames = [17]
"""


@pytest.fixture
def folder(written):
    """A folder with a script of flags, changed by name (None: removed), and a TOML."""

    def write(
        changed=None, toml=CLIPS, name="wan_train_network.py", launcher="--num_cpu_threads_per_process 1"
    ):
        flags = {**FLAGS, **(changed or {})}
        shown = [f"--{key} {value}" for key, value in flags.items() if value is not None]
        command = f"accelerate launch {launcher} src/musubi_tuner/{name} \\\n"
        written("data.toml", toml)
        return written("train.sh", command + " \\\n".join(f"  {each}" for each in shown) + "\n").parent

    return write


def migrated(folder):
    (run,) = MusubiTuner().migrate([folder])
    return run


WAN = {
    "run.name": "motion",
    "run.dir": "out",
    "engine.type": "fsdp2",
    "engine.param_dtype": "bf16",
    "task.type": "text_to_video",
    "task.predictor.type": "wan/transformer",
    "task.predictor.preset": "wan2.1-t2v-1.3b",
    "task.predictor.from_pretrained": "wan.safetensors",
    "task.autoencoder.type": "wan/vae",
    "task.autoencoder.from_pretrained": "vae.pth",
    "task.autoencoder.dtype": "bf16",
    "task.text_encoder.type": "wan/umt5",
    "task.text_encoder.from_pretrained": "t5.pth",
    "task.text_encoder.tokenizer": "hub:google/umt5-xxl",
    "task.scheduler.type": "wan/flow_match",
    "task.scheduler.timesteps": "logit_normal",
    "task.scheduler.shift": 3.0,
    "task.scheduler.loss_weighting": "none",
    "task.latents": "mode",
    "task.caption_dropout": 0.0,
    "data.train.type": "media_text",
    "data.train.sources.0.annotations": "clips",
    "data.train.max_height": 480,
    "data.train.max_width": 832,
    "data.train.num_frames": 17,
    "data.train.fps": None,
    "data.loader.mode": "variable",
    "data.loader.upscale": False,
    "data.cache.dir": "cache",
    "data.cache.missing": "encode",
    "train.steps": 1600,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 1,
    "train.clip_grad_norm": 1.0,
    "train.base_dtype": "bf16",
    "train.adapters.0.kind": "lora",
    "train.adapters.0.targets": ["predictor.blocks.{*}"],
    "train.adapters.0.rank": 32,
    "train.adapters.0.alpha": 1.0,
    "optimizer.type": "adamw",
    "optimizer.lr": 2e-4,
    "optimizer.weight_decay": 0.01,
    "lr_schedule.type": "constant",
}


def test_a_small_run_becomes_all_that_the_tool_would_do_and_nothing_differs(folder, lists):
    run = migrated(folder())
    taken, dropped, differs = lists(run)
    assert (taken, differs) == (WAN, {})
    assert dropped == {"--num_cpu_threads_per_process": "of accelerate: `mm-train` starts the ranks"}
    assert run.lines["data.train.fps"].note == "every frame is taken, as theirs"


def test_ranks_accumulation_memory_and_schedule(folder, lists):
    changed = {
        **{"gradient_accumulation_steps": 2, "fp8_base": "", "fp8_scaled": "", "blocks_to_swap": 20},
        **{"optimizer_type": "adamw8bit", "optimizer_args": '"weight_decay=0.1" "betas=0.9,0.95"'},
        **{"max_train_epochs": 16, "max_train_steps": 9, "lr_scheduler": "cosine", "lr_warmup_steps": 0.1},
        **{
            "network_args": '"loraplus_lr_ratio=4"',
            "network_alpha": 16,
            "save_every_n_epochs": 1,
            "sdpa": "",
        },
    }
    toml = CLIPS.replace("[general]\n", "[general]\nbatch_size = 3\n")
    run = migrated(folder(changed, toml, launcher="--num_processes 4"))
    taken, dropped, differs = lists(run)
    assert (run.world, run.launch, differs) == (4, "mm-train --config {config} --nproc 4", {})
    assert dropped.keys() == {"--max_train_steps", "--save_every_n_epochs", "--sdpa"}
    changes = {key: value for key, value in taken.items() if WAN.get(key, "absent") != value}
    assert changes == {
        "train.micro_batch_size": 3,
        "train.global_batch_size": 24,
        "train.base_dtype": "fp8",
        "train.epochs": 16,
        "train.adapters.0.alpha": 16.0,
        "train.adapters.0.b_lr_scale": 4.0,
        "engine.base.stream": True,
        "engine.base.keep": 10,
        "engine.recompute_modules": "auto",
        "optimizer.type": "adamw_8bit",
        "optimizer.weight_decay": 0.1,
        "optimizer.betas": [0.9, 0.95],
        "lr_schedule.type": "cosine",
        "lr_schedule.warmup_fraction": 0.1,
    }
    assert WAN.keys() - taken.keys() == {"train.steps"}


def test_an_expert_is_known_by_its_bounds_and_the_squeezed_density_is_told(folder, lists):
    high = {"task": "t2v-A14B", "min_timestep": 875, "max_timestep": 1000}
    taken, dropped, differs = lists(migrated(folder(high)))
    assert (taken["task.predictor.train"], [*differs]) == ("high", ["--min_timestep"])
    assert "the expert's own share" in dropped["--min_timestep"]
    low = {"task": "i2v-A14B", "max_timestep": 900, "preserve_distribution_shape": ""}
    taken, _, differs = lists(migrated(folder(low)))
    assert (taken["task.predictor.train"], taken["task.predictor.preset"]) == ("low", "wan2.2-i2v-a14b")
    assert differs == {}
    both = {"task": "t2v-A14B", "dit_high_noise": "high.safetensors"}
    assert lists(migrated(folder(both)))[0]["task.predictor.train"] == "both"


def test_the_boundary_of_two_experts_is_a_share_and_counts_where_both_are_trained(folder, lists):
    both = {"task": "t2v-A14B", "dit_high_noise": "high.safetensors"}
    for given, share in ((900, 0.9), (0.85, 0.85)):
        taken, _, differs = lists(migrated(folder({**both, "timestep_boundary": given})))
        assert (taken["task.predictor.boundary"], differs) == (share, {})
    for alone in ({"task": "t2v-A14B"}, {}):
        taken, dropped, _ = lists(migrated(folder({**alone, "timestep_boundary": 900})))
        assert "task.predictor.boundary" not in taken and "both experts" in dropped["--timestep_boundary"]


def test_checkpoints_that_stay_are_counted_and_prompts_of_samples_are_told(folder, lists):
    flags = {"save_last_n_steps": 30, "sample_prompts": "prompts.txt"}
    taken, dropped, _ = lists(migrated(folder({**flags, "save_every_n_steps": 10})))
    assert taken["checkpoint.keep"] == 4  # of step 50: 20, 30, 40, 50
    assert "validation.samples.prompts" in dropped["--sample_prompts"]
    assert "without save_every_n_steps" in lists(migrated(folder(flags)))[1]["--save_last_n_steps"]


def test_bounds_that_count_from_clean_are_turned_round_before_the_shift(folder, lists):
    bounds = {"min_timestep": 200, "max_timestep": 750, "preserve_distribution_shape": ""}
    taken, _, differs = lists(migrated(folder(bounds)))
    first, last = (taken[f"task.scheduler.{end}_timestep_boundary"] for end in ("min", "max"))
    for share, time in ((first, 0.75), (last, 0.2)):  # the time of a level, after the shift of 3
        assert 3 * (1 - share) / (1 + 2 * (1 - share)) == pytest.approx(time, abs=1e-5)
    assert differs == {}


@pytest.mark.parametrize(
    ("flags", "density", "shift", "told"),
    [
        ({"timestep_sampling": "uniform"}, "uniform", 1.0, []),
        ({"timestep_sampling": "sigmoid"}, "logit_normal", 1.0, []),
        ({"timestep_sampling": None}, "uniform", 3.0, []),
        ({"timestep_sampling": "sigma", "weighting_scheme": "mode"}, "mode", 3.0, []),
        ({"timestep_sampling": "logsnr"}, "uniform", 1.0, ["--timestep_sampling"]),
        (
            {"timestep_sampling": "sigma", "weighting_scheme": "cosmap"},
            "uniform",
            3.0,
            ["--weighting_scheme"],
        ),
    ],
)
def test_densities_of_timesteps(folder, lists, flags, density, shift, told):
    taken, _, differs = lists(migrated(folder(flags)))
    assert (taken["task.scheduler.timesteps"], taken["task.scheduler.shift"]) == (density, shift)
    assert [*differs] == told


def test_several_data_sets_tables_and_rates(folder, lists):
    toml = """\
[[datasets]]
video_jsonl_file = "clips.jsonl"
target_frames = [1, 25, 46]
source_fps = 30.0
num_repeats = 2
batch_size = 2

[[datasets]]
video_directory = "more"
frame_extraction = "uniform"
target_frames = [17]
control_directory = "depth"
"""
    taken, _, differs = lists(migrated(folder(toml=toml)))
    source = {key: value for key, value in taken.items() if key.startswith("data.train.sources.0")}
    assert source == {
        "data.train.sources.0.annotations": "clips.jsonl",
        "data.train.sources.0.columns.path": "video_path",
        "data.train.sources.0.columns.caption": "caption",
        "data.train.sources.0.weight": 2.0,
    }
    assert (taken["data.train.num_frames"], taken["data.train.fps"]) == (45, 16.0)
    assert (taken["data.train.width"], taken["data.train.height"]) == (960, 544)
    assert differs.keys() == {
        "datasets.0.target_frames",
        "datasets.0.source_fps",
        "datasets.1.frame_extraction",
        "datasets.1.control_directory",
        "datasets.1.batch_size",
    }


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"colour": "blue"}, "--colour"),
        ({"dit_dtype": "fp16"}, "--dit_dtype"),
        ({"optimizer_type": "prodigy"}, "--optimizer_type"),
        ({"optimizer_args": "decouple=True"}, "--optimizer_args.decouple"),
        ({"network_args": "conv_dim=4"}, "--network_args.conv_dim"),
        ({"network_module": "lycoris.kohya"}, "--network_module"),
        ({"scale_weight_norms": 1.0}, "--scale_weight_norms"),
        ({"lr_scheduler": "rex"}, "--lr_scheduler"),
        ({"dataset_config": "absent.toml"}, None),  # the TOML that lies beside it is taken
    ],
)
def test_what_has_no_counterpart_is_in_the_third_list(folder, lists, flags, key):
    assert [*lists(migrated(folder(flags)))[2]] == ([key] if key else [])


def test_pipelines_of_diffusers_are_named_with_the_hub(folder, lists):
    changed = {"task": None, "timestep_sampling": "qwen_shift", "model_version": "edit-2511"}
    run = migrated(folder(changed, name="qwen_image_train_network.py"))
    taken, _, differs = lists(run)
    assert taken["task.pipeline"] == "hub:Qwen/Qwen-Image-Edit-2511"
    assert (taken["task.scheduler.type"], taken["task.scheduler.shift"]) == ("diffusers/schedule", "sampling")
    assert (taken["train.adapters.0.targets"], differs) == ("auto", {})
    assert any("a folder of Diffusers" in each for each in run.todo)
    whole = migrated(folder({"task": None, "network_module": None}, name="zimage_train.py"))
    assert not [key for key in lists(whole)[0] if key.startswith("train.adapters")]


def test_what_cannot_be_migrated_is_one_sentence(folder, written):
    for name, task, said in (
        ("fpack_train_network.py", None, "the model 'fpack' has no counterpart here"),
        ("flux_2_train_network.py", None, "the model 'flux_2' has no counterpart here"),
        ("wan_train_network.py", "t2v-14B-FC", "the task 't2v-14B-FC' has no counterpart here"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            migrated(folder({"task": task}, name=name))
    with pytest.raises(MMError, match="no script here starts a training"):
        MusubiTuner().migrate([written("alone.toml", CLIPS)])


def test_flags_behind_a_forgotten_backslash_are_told(folder, written, lists):
    script = folder() / "train.sh"
    written("train.sh", script.read_text().replace("--vae vae.pth \\\n", "--vae vae.pth\n"))
    _, _, differs = lists(migrated(script.parent))
    assert "does not end with a backslash" in differs["--t5"]


def test_the_command_takes_both_files_and_plans_the_run(folder, capsys):
    place = folder()
    assert main(["migrate", str(place / "data.toml"), str(place / "train.sh"), "--out", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "a run of musubi-tuner (motion)" in out
    assert "plan of run 'motion': 1 rank" in out
    text = (place / "run.yaml").read_text()
    assert "    shift: 3.0  # train.sh:12 --discrete_flow_shift: ours is 5\n" in text
    assert "    num_frames: 17  # data.toml:8 datasets.0.target_frames\n" in text


@pytest.mark.slow
def test_a_migrated_script_of_wan_trains_an_adapter_on_clips(folder, tmp_path, capsys):
    wan = pytest.importorskip("mm_wan.testing").make_tiny_checkpoint(tmp_path / "Wan")
    (tmp_path / "clips").mkdir()
    for number in range(2):
        frames = torch.rand(5, 32, 32, 3, generator=torch.Generator().manual_seed(number))
        write_clip(tmp_path / f"clips/{number}.mp4", (frames * 255).byte(), 16)
        (tmp_path / f"clips/{number}.txt").write_text("a red circle moves left")
    toml = CLIPS.replace("[832, 480]", "[32, 32]").replace("[17]", "[5]")
    flags = {"dit": wan / "transformer", "vae": wan / "vae", "t5": wan / "text_encoder"}
    place = folder({**flags, "max_train_steps": 2, "network_args": "loraplus_lr_ratio=4"}, toml)
    sizes = ["task.predictor.preset=null", f"task.text_encoder.tokenizer={wan / 'tokenizer'}"]
    (tmp_path / "run.yaml").write_text(to_yaml(migrated(place)))
    assert main(["train", "--config", "run.yaml", *sizes]) == 0
    assert "done: step 2 of 2; run folder out/motion" in capsys.readouterr().out

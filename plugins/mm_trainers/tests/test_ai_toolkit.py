"""Jobs of ai-toolkit: exactly what they become."""

import re

import pytest
import yaml
from mm_trainers.aitoolkit import AiToolkit

from mm_core.cli.main import main
from mm_core.errors import ConfigError


def job(written, adapted=True, **changed):
    """A job, with sections changed key by key."""
    process = {
        "type": "sd_trainer",
        "training_folder": "output",
        "network": {"type": "lora", "linear": 16, "linear_alpha": 8} if adapted else None,
        "datasets": [{"folder_path": "photos", "resolution": 512}],
        "train": {"steps": 100, "lr": 1e-4, "dtype": "bf16"},
        "model": {"name_or_path": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "arch": "wan21"},
    }
    for section, keys in changed.items():
        old = process.get(section)
        process[section] = {**(old or {}), **keys} if isinstance(keys, dict) else keys
    config = {"job": "extension", "config": {"name": "a style", "process": [process]}}
    return written("job.yaml", yaml.safe_dump(config))


def migrated(file):
    (run,) = AiToolkit().migrate([file])
    return run


WAN = {
    "run.name": "a_style",
    "run.dir": "output",
    "engine.type": "fsdp2",
    "engine.param_dtype": "bf16",
    "engine.recompute_modules": "auto",
    "task.type": "text_to_video",
    "task.predictor.type": "wan/transformer",
    "task.predictor.preset": "wan2.1-t2v-1.3b",
    "task.predictor.from_pretrained": "hub:Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "task.autoencoder.type": "wan/vae",
    "task.autoencoder.from_pretrained": "hub:Wan-AI/Wan2.1-T2V-1.3B-Diffusers/vae",
    "task.autoencoder.dtype": "bf16",
    "task.text_encoder.type": "wan/umt5",
    "task.text_encoder.from_pretrained": "hub:Wan-AI/Wan2.1-T2V-1.3B-Diffusers/text_encoder",
    "task.scheduler.type": "wan/flow_match",
    "task.scheduler.timesteps": "logit_normal",
    "task.scheduler.shift": 1.0,
    "task.scheduler.loss_weighting": "none",
    "task.latents": "sample",
    "task.caption_dropout": 0.0,
    "data.train.type": "media_text",
    "data.train.sources.0.annotations": "photos",
    "data.train.sources.0.caption": "",
    "data.train.max_height": 512,
    "data.train.max_width": 512,
    "data.train.num_frames": 1,
    "data.loader.mode": "variable",
    "train.steps": 100,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 1,
    "train.clip_grad_norm": 1.0,
    "train.base_dtype": "bf16",
    "train.adapters.0.kind": "lora",
    "train.adapters.0.targets": ["predictor.blocks.{*}"],
    "train.adapters.0.rank": 16,
    "train.adapters.0.alpha": 8.0,
    "optimizer.type": "adamw",
    "optimizer.lr": 1e-4,
    "optimizer.weight_decay": 0.01,
    "optimizer.eps": 1e-6,
    "lr_schedule.type": "constant",
    "checkpoint.every": 1000,
    "checkpoint.keep": 5,
}


def test_a_small_job_becomes_all_that_the_tool_would_do_and_nothing_differs(written, lists):
    assert lists(migrated(job(written))) == (WAN, {}, {})


def test_two_experts_trained_by_turns_are_told(written, lists):
    model = {"name_or_path": "pair", "arch": "wan22_14b:t2v", "model_kwargs": {"train_low_noise": True}}
    taken, _, differs = lists(migrated(job(written, model=model)))
    assert (taken["task.predictor.type"], taken["task.predictor.train"]) == ("wan/two_expert", "both")
    assert taken["train.adapters.0.targets"] == ["predictor.{*}.blocks.{*}"]
    assert [*differs] == ["train.switch_boundary_every"]
    model["model_kwargs"] = {"train_low_noise": False}
    taken, _, differs = lists(migrated(job(written, model=model)))
    assert (taken["task.predictor.train"], differs) == ("high", {})


def test_clips_captions_and_buckets_that_differ_are_told_by_key(written, lists):
    clips = {"folder_path": "clips", "num_frames": 40, "resolution": [512, 768], "caption_dropout_rate": 0.1}
    photos = {"folder_path": "photos", "num_repeats": 2, "shuffle_tokens": True, "keep_tokens": 1}
    taken, _, differs = lists(migrated(job(written, datasets=[clips, photos], trigger_word="ohwx")))
    assert taken["data.train.num_frames"] == 37  # what Wan's latents hold of 40
    assert taken["data.train.max_height"] == taken["data.train.max_width"] == 768
    assert taken["task.caption_dropout"] == 0.1
    assert taken["data.train.sources.1.weight"] == 2.0
    assert taken["data.train.sources.1.tags.shuffle"] is True
    assert [taken[f"data.train.sources.{i}.caption_prefix"] for i in (0, 1)] == ["ohwx ", "ohwx "]
    assert differs.keys() == {
        "datasets.0.caption_dropout_rate",
        "datasets.0.resolution",
        "datasets.0.num_frames",
    }
    assert "evenly spaced" in differs["datasets.0.num_frames"]


def test_frames_at_a_rate_begin_at_random(written, lists):
    clips = {"folder_path": "clips", "num_frames": 41, "shrink_video_to_frames": False, "fps": 16}
    taken, _, differs = lists(migrated(job(written, datasets=[clips])))
    assert (taken["data.train.fps"], taken["data.train.random_start"], differs) == (16, True, {})


def test_a_quantised_pipeline_with_an_average_and_samples(written, lists):
    changed = {
        "model": {
            "name_or_path": "black-forest-labs/FLUX.1-dev",
            "is_flux": True,
            "arch": None,
            "quantize": True,
        },
        "train": {"timestep_type": "shift", "ema_config": {"use_ema": True}, "batch_size": 2}
        | {"gradient_accumulation": 3, "optimizer": "adamw8bit", "cache_text_embeddings": True},
        "sample": {
            "prompts": ["[trigger] runs --w 64 --ctrl_img a.png"],
            "sample_every": 50,
            "sampler": "flowmatch",
        },
        "trigger_word": "ohwx",
    }
    taken, dropped, differs = lists(migrated(job(written, **changed)))
    assert differs == {}
    assert dropped == {"sample.sampler": "of samples during training alone"}
    assert taken["task.pipeline"] == "hub:black-forest-labs/FLUX.1-dev"
    assert (taken["task.scheduler.timesteps"], taken["task.scheduler.shift"]) == ("uniform", "sampling")
    assert (taken["train.base_dtype"], taken["train.global_batch_size"]) == ("fp8", 6)
    assert (taken["ema.decay"], taken["ema.ramp"], taken["data.cache.dir"]) == (0.999, False, "cache")
    assert taken["train.adapters.0.targets"] == [
        "predictor.transformer.transformer_blocks.{*}",
        "predictor.transformer.single_transformer_blocks.{*}",
    ]
    samples = {key: value for key, value in taken.items() if key.startswith(("validation.", "task.sample."))}
    assert samples == {
        "validation.every": 50,
        "validation.at_start": True,
        "validation.samples.prompts": ["ohwx runs"],
        "validation.samples.steps": 20,
        "validation.samples.guidance": 7.0,
        "task.sample.width": 512,
        "task.sample.height": 512,
    }


@pytest.mark.parametrize(
    ("changed", "key", "why"),
    [
        ({"train": {"colour": 1}}, "train.colour", "an unknown key of the tool"),
        ({"train": {"timestep_type": "weighted"}}, "train.timestep_type", "uniform is written in its place"),
        ({"train": {"optimizer": "Prodigy"}}, "train.optimizer", "adamw is written in its place"),
        ({"train": {"diff_output_preservation": True}}, "train.diff_output_preservation", "regularisation"),
        ({"train": {"loss_type": "mae"}}, "train.loss_type", "another loss"),
        ({"train": {"unload_text_encoder": True}}, "train.unload_text_encoder", "trigger word"),
        ({"model": {"quantize": True, "qtype": "uint3"}}, "model.qtype", "nf4 is written in its place"),
        ({"model": {"quantize": True, "qtype": "uint4|a.safetensors"}}, "model.qtype", "is not applied"),
        ({"datasets": [{"folder_path": "a", "is_reg": True}]}, "datasets.0.is_reg", "count as others"),
        ({"datasets": [{"folder_path": "a", "mask_path": "m"}]}, "datasets.0.mask_path", "no masks"),
        ({"network": {"type": "lorm"}}, "network.type", "lora is written in its place"),
    ],
)
def test_what_has_no_counterpart_is_in_the_third_list_with_its_reason(written, lists, changed, key, why):
    _, _, differs = lists(migrated(job(written, **changed)))
    assert [*differs] == [key]
    assert why in differs[key]


def test_other_adapters_schedules_and_full_training(written, lists):
    lokr = {"type": "lokr", "lokr_factor": 8, "network_kwargs": {"ignore_if_contains": ["blocks.0.attn1"]}}
    rate = {"lr_scheduler": "constant_with_warmup", "gradient_accumulation_steps": 4, "max_grad_norm": 0}
    taken, _, differs = lists(migrated(job(written, network=lokr, train=rate)))
    assert differs == {}
    assert (taken["train.adapters.0.kind"], taken["train.adapters.0.decompose_factor"]) == ("lokr", 8)
    assert taken["train.adapters.0.rank"] == taken["train.adapters.0.alpha"] == 10**9
    assert taken["train.adapters.0.exclude"] == ["predictor.blocks.0.attn1"]
    assert (taken["lr_schedule.warmup_steps"], taken["train.clip_grad_norm"]) == (1000, None)
    assert (taken["train.steps"], taken["train.global_batch_size"]) == (25, 4)
    taken, _, differs = lists(migrated(job(written, adapted=False, model={"quantize": True})))
    assert not [key for key in taken if key.startswith("train.adapters") or key == "train.base_dtype"]
    assert [*differs] == ["model.quantize"]


def test_a_rate_of_the_transformer_counts_more_than_the_common_one(written, lists):
    for lr in (1e-4, None):
        taken, dropped, differs = lists(migrated(job(written, train={"lr": lr, "unet_lr": 3e-5})))
        assert (taken["optimizer.lr"], [*dropped], differs) == (3e-5, ["train.lr"] * (lr is not None), {})


def test_models_that_are_not_here_are_named_in_one_sentence(written):
    for model, named in (
        ({"arch": "sdxl"}, "'sdxl'"),
        ({"arch": None, "is_xl": True}, "'sdxl'"),
        ({"arch": None}, "'sd1'"),
    ):
        with pytest.raises(ConfigError, match=f"the architecture {named} has no counterpart here"):
            migrated(job(written, model=model))
    with pytest.raises(ConfigError, match="a process of the type 'concept_slider' is no training"):
        migrated(job(written, type="concept_slider"))


def test_the_command_writes_a_config_that_is_planned_and_says_where_each_line_is_from(written, capsys):
    file = job(written, train={"timestep_type": "linear"})
    assert main(["migrate", str(file), "--out", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "a run of ai-toolkit (a_style)" in out
    assert "plan of run 'a_style': 1 rank" in out
    text = (file.parent / "run.yaml").read_text()
    assert re.search(r"    timesteps: uniform  # job.yaml:\d+ train.timestep_type\n", text)
    assert "    loss_weighting: none  # default of the tool: ours is gaussian\n" in text


@pytest.mark.slow
def test_a_migrated_job_of_pictures_trains(written, tmp_path, capsys):
    Image = pytest.importorskip("PIL.Image")
    tiny = pytest.importorskip("mm_diffusers.testing").tiny_pipeline(tmp_path / "z_image", "ZImagePipeline")
    for number in range(2):
        written(f"photos/{number}.txt", f"[trigger] is {number}")
        Image.new("RGB", (80, 64), (90 * number, 60, 30)).save(tmp_path / f"photos/{number}.png")
    changed = {
        "datasets": [{"folder_path": "photos", "resolution": 64, "cache_latents_to_disk": True}],
        "train": {"steps": 2, "ema_config": {"use_ema": True}, "timestep_type": "linear"},
        "model": {"name_or_path": str(tiny), "arch": "zimage"},
    }
    assert main(["migrate", str(job(written, **changed)), "--out", "run.yaml"]) == 0
    assert main(["train", "--config", "run.yaml"]) == 0
    assert "done: step 2 of 2; run folder output/a_style" in capsys.readouterr().out

"""Keys of MindSpeed-MM's files: exactly what each changes in the three lists."""

import json

import pytest
from folders import CHATS, CLIPS, ENGINE, ONE_FILE, QWEN, REMOVED, WAN, changed, write, write_one
from mm_mindspeed.migration import MindSpeedMM

from mm_core.config.load import load_config
from mm_core.interchange import Migrated, to_yaml


def migrated(folder) -> Migrated:
    (run,) = MindSpeedMM().migrate([folder])
    return run


def lists(run: Migrated):
    return (
        {key: line.value for key, line in run.lines.items()},
        {left.key for left in run.dropped},
        {left.key for left in run.differs},
    )


def valid(run: Migrated, folder) -> None:
    (folder / "run.yaml").write_text(to_yaml(run))
    load_config(folder / "run.yaml")


BATCH = {
    "train.micro_batch_size": 1,
    "train.global_batch_size": 2,
    "train.steps": 10,
    "train.clip_grad_norm": 1.0,
    "run.seed": 1234,
    "data.loader.workers": 2,
    "data.loader.sampler": "random",
    "optimizer.type": "adamw",
    "optimizer.lr": 1e-5,
    "optimizer.weight_decay": 0.01,
    "optimizer.betas.0": 0.9,
    "optimizer.betas.1": 0.999,
    "optimizer.eps": 1e-8,
    "lr_schedule.type": "constant",
    "engine.type": "fsdp2",
    "engine.sharding_size": "auto",
    "engine.param_dtype": "bf16",
    "engine.reduce_dtype": "fp32",
}
OF_WAN = {
    **BATCH,
    "task.type": "text_to_video",
    "task.caption_dropout": 0.1,
    "task.predictor.type": "wan/transformer",
    "task.predictor.preset": "wan2.1-t2v-1.3b",
    "task.scheduler.type": "wan/flow_match",
    "task.scheduler.num_train_timesteps": 1000,
    "task.scheduler.shift": 3.0,
    "task.scheduler.sigma_min": 0.003 / 1.002,
    "task.scheduler.extra_one_step": False,
    "task.scheduler.draw_per": "micro_batch",
    "task.scheduler.loss_weighting": "gaussian",
    "task.autoencoder.type": "wan/vae",
    "task.autoencoder.from_pretrained": "Wan/vae",
    "task.autoencoder.latent_channels": 16,
    "task.text_encoder.type": "wan/umt5",
    "task.text_encoder.from_pretrained": "Wan/text_encoder",
    "data.train.type": "media_text",
    "data.train.sources.0.annotations": "clips.json",
    "data.train.sources.0.folder": "clips",
    "data.train.num_frames": 17,
    "data.train.fps": 24,
    "data.train.height": 480,
    "data.train.width": 832,
}
OF_QWEN = {
    **BATCH,
    "task.type": "pretrained",
    "task.auto_class": "AutoModelForImageTextToText",
    "task.from_pretrained": "Qwen3-VL",
    "data.train.type": "conversations",
    "data.train.sources.0.annotations": "chats.json",
    "data.train.sources.0.folder": "data",
    "data.train.max_length": 2048,
}


def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("model", "data", "wanted"), [(WAN, CLIPS, OF_WAN), (QWEN, CHATS, OF_QWEN)], ids=["wan", "qwen"]
)
def test_a_folder_of_few_keys_has_every_default_written_out(model, data, wanted, tmp_path, monkeypatch):
    folder = in_folder(tmp_path, monkeypatch)
    run = migrated(write(folder, model, data))
    taken, dropped, differs = lists(run)
    name = taken.pop("run.name")
    assert name == "run_pretrain"
    assert taken == wanted
    assert (dropped, differs) == ({"loss_cfg.loss_type"} if model is QWEN else set(), set())
    assert run.launch.splitlines() == [
        "export HCCL_CONNECT_TIMEOUT=1200",
        "mm-train --config {config} --nproc 2",
    ]
    assert run.world == 2
    valid(run, folder)


P, D, L = "predictor.", "dataset_param.preprocess_parameters.", "dataloader_param."
OF_I2V = {"predictor.hidden_size": 5120, "predictor.num_layers": 40, "predictor.num_heads": 40}
OF_I2V |= {"predictor.ffn_dim": 13824, "predictor.in_dim": 36, "task": "i2v"}
I2V = {"task.predictor.preset": "wan2.1-i2v-14b-480p", "task.frames": ["first"]}
FEATURES = {"load_video_features": True, "load_text_features": True, "ae": REMOVED, "text_encoder": REMOVED}

CASES = [
    # name, keys of model.json, of data.json, flags, keys of the engine -> lines changed, dropped, differs
    (
        "scheduler",
        {"diffusion.shift": 5, "diffusion.sigma_min": 0.0, "diffusion.extra_one_step": True},
        {},
        {},
        {},
        {"task.scheduler.shift": 5.0, "task.scheduler.sigma_min": 0.0, "task.scheduler.extra_one_step": True},
        set(),
        set(),
    ),
    ("captions", {}, {D + "cfg": 0.0}, {}, {}, {"task.caption_dropout": 0.0}, set(), set()),
    ("clip off", {}, {}, {"clip-grad": 0.0}, {}, {"train.clip_grad_norm": None}, set(), set()),
    (
        "cosine",
        {},
        {},
        {"lr-decay-style": "cosine", "min-lr": 1e-6, "lr-warmup-iters": 5, "lr-warmup-init": 1e-7},
        {},
        {
            "lr_schedule.type": "cosine",
            "lr_schedule.min_lr": 1e-6,
            "lr_schedule.warmup_steps": 5,
            "lr_schedule.warmup_init": 1e-7,
        },
        set(),
        set(),
    ),
    ("constant", {}, {}, {"min-lr": 1e-6}, {}, {}, {"--min-lr"}, set()),
    (
        "fraction",
        {},
        {},
        {"lr-warmup-fraction": 0.1, "lr-warmup-iters": 0},
        {},
        {"lr_schedule.warmup_fraction": 0.1},
        {"--lr-warmup-iters"},
        set(),
    ),
    ("no style", {}, {}, {"lr-decay-style": REMOVED}, {}, {"lr_schedule.type": "linear"}, set(), set()),
    (
        "wsd",
        {},
        {},
        {"lr-decay-style": "WSD"},
        {},
        {"lr_schedule.type": REMOVED},
        set(),
        {"--lr-decay-style"},
    ),
    (
        "adam",
        {},
        {},
        {"adam-beta2": 0.95, "adam-eps": 1e-15, "weight-decay": 0.1, "seed": 42, "num-workers": 8},
        {},
        {
            "optimizer.betas.1": 0.95,
            "optimizer.eps": 1e-15,
            "optimizer.weight_decay": 0.1,
            "run.seed": 42,
            "data.loader.workers": 8,
        },
        set(),
        set(),
    ),
    (
        "run",
        {},
        {},
        {"save": "out", "save-interval": 7, "log-interval": 2, "distributed-timeout-minutes": 20},
        {},
        {"run.dir": "out", "checkpoint.every": 7, "log.every": 2, "run.stuck_after": 1200.0},
        set(),
        set(),
    ),
    (
        "parallel",
        {},
        {},
        {
            "tensor-model-parallel-size": 2,
            "pipeline-model-parallel-size": 4,
            "sequence-parallel": True,
            "context-parallel-size": 1,
            "context-parallel-algo": "ulysses_cp_algo",
        },
        {},
        {},
        {
            "--tensor-model-parallel-size",
            "--pipeline-model-parallel-size",
            "--sequence-parallel",
            "--context-parallel-size",
            "--context-parallel-algo",
        },
        set(),
    ),
    (
        "context",
        {},
        {},
        {"context-parallel-size": 2, "context-parallel-algo": "megatron_cp_algo"},
        {},
        {"engine.context_parallel.size": 2, "engine.context_parallel.kind": "ring"},
        set(),
        set(),
    ),
    (
        "hybrid",
        {},
        {},
        {"context-parallel-size": 2, "context-parallel-algo": "hybrid_cp_algo"},
        {},
        {"engine.context_parallel.size": 2},
        set(),
        {"--context-parallel-algo"},
    ),
    (
        "recompute",
        {},
        {},
        {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 12},
        {},
        {"engine.recompute_modules": ["predictor.blocks.{0-11}"]},
        set(),
        set(),
    ),
    (
        "recompute all",
        {},
        {},
        {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
        {},
        {"engine.recompute_modules": "auto"},
        set(),
        set(),
    ),
    (
        "recompute none",
        {},
        {},
        {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 0},
        {},
        {},
        set(),
        set(),
    ),
    (
        "aliased",
        {},
        {D + "train_pipeline": {"video": [{"trans_type": "CenterCropResizeVideo"}]}},
        {},
        {},
        {"data.train.interpolation": "bilinear"},
        set(),
        {D + "train_pipeline.video.0.param.antialias"},
    ),
    ("length", {}, {}, {"seq-length": 4096}, {}, {}, {"--seq-length"}, set()),
    (
        "state",
        {},
        {},
        {"no-load-optim": True, "no-save-rng": True, "ckpt-format": "torch_dcp", "bf16": True},
        {},
        {},
        {"--no-load-optim", "--no-save-rng", "--ckpt-format"},
        set(),
    ),
    (
        "lora",
        {},
        {},
        {"lora-r": 16, "lora-alpha": 32, "lora-target-modules": "proj_q,ffn.0 proj_out"},
        {},
        {
            "train.adapters.0.rank": 16,
            "train.adapters.0.alpha": 32.0,
            "train.adapters.0.targets": ["to_q", "ffn.net.0.proj", "to_out.0"],
        },
        set(),
        set(),
    ),
    ("no lora", {}, {}, {"lora-r": 16, "lora-alpha": 32}, {}, {}, {"--lora-r", "--lora-alpha"}, set()),
    (
        "lora of defaults",
        {},
        {},
        {"lora-target-modules": "proj_q"},
        {},
        {"train.adapters.0.rank": 8, "train.adapters.0.alpha": 16.0, "train.adapters.0.targets": ["to_q"]},
        set(),
        set(),
    ),
    (
        "joined lora",
        {},
        {},
        {"lora-r": 16, "lora-target-modules": "linear_qkv"},
        {},
        {"train.adapters.0.rank": 16, "train.adapters.0.alpha": 16.0, "train.adapters.0.targets": "auto"},
        set(),
        {"--lora-target-modules"},
    ),
    (
        "engine",
        {},
        {},
        {},
        {
            "sub_modules_to_wrap": ["predictor.blocks.{*}", "predictor.head"],
            "use_reentrant": True,
            "recompute_modules": ["predictor.blocks.{*}"],
            "reshard_after_forward": False,
            "offload_to_cpu": True,
            "num_to_forward_prefetch": 1,
            "ignored_modules": ["ae"],
            "align_fsdp_param_groups": True,
        },
        {
            "engine.sub_modules_to_wrap": ["predictor.blocks.{*}", "predictor.proj_out"],
            "engine.use_reentrant": True,
            "engine.recompute_modules": ["predictor.blocks.{*}"],
            "engine.reshard_after_forward": False,
            "engine.offload_to_cpu": True,
            "engine.num_to_forward_prefetch": 1,
        },
        {"align_fsdp_param_groups"},
        set(),
    ),
    (
        "classes",
        {},
        {},
        {},
        {"sub_modules_to_wrap": ["a.b.Layer"], "expert_parallel_size": 1},
        {"engine.sub_modules_to_wrap": "auto"},
        {"expert_parallel_size"},
        set(),
    ),
    (
        "unknown",
        {"predictor.new_key": 1},
        {L + "new": 2},
        {"new-flag": 3},
        {"new": 4},
        {},
        set(),
        {"predictor.new_key", L + "new", "--new-flag", "new"},
    ),
    (
        "pipeline",
        {},
        {},
        {"load": "w/Wan2.1/transformer/"},
        {},
        {"task.predictor.from_pretrained": "w/Wan2.1"},
        set(),
        set(),
    ),
    (
        "converted",
        {},
        {},
        {"load": "Wan/mm_convert"},
        {},
        {"task.predictor.from_pretrained": "Wan"},
        set(),
        set(),
    ),
    ("own weights", {}, {}, {"load": "ckpt/mine"}, {}, {"init_from.path": "ckpt/mine"}, set(), set()),
    ("of spaces", {}, {}, {"load": "my own"}, {}, {"init_from.path": "my own"}, set(), set()),
    ("no weights", {}, {}, {"load": ""}, {}, {}, set(), set()),
    ("beside the model", {}, {}, {"load": "Wan/mine"}, {}, {"init_from.path": "Wan/mine"}, set(), set()),
    (
        "autoencoder",
        {
            "ae.dtype": "bf16",
            "ae.do_sample": False,
            "ae.enable_tiling": True,
            "ae.tiling_param.tile_size": [34, 32],
            "ae.tiling_param.tile_stride": [18, 16],
        },
        {},
        {},
        {},
        {
            "task.autoencoder.dtype": "bf16",
            "task.autoencoder.do_sample": False,
            "task.autoencoder.tiling": True,
            "task.autoencoder.tiling_param.tile_sample_min_height": 272,
            "task.autoencoder.tiling_param.tile_sample_min_width": 256,
            "task.autoencoder.tiling_param.tile_sample_stride_height": 144,
            "task.autoencoder.tiling_param.tile_sample_stride_width": 128,
        },
        set(),
        set(),
    ),
    (
        "sizes",
        {"predictor.num_layers": 2, "predictor.eps": 1e-6},
        {},
        {},
        {},
        {
            "task.predictor.preset": REMOVED,
            "task.predictor.num_layers": 2,
            "task.predictor.num_attention_heads": 12,
            "task.predictor.attention_head_dim": 128,
            "task.predictor.ffn_dim": 8960,
            "task.predictor.in_channels": 16,
            "task.predictor.out_channels": 16,
            "task.predictor.eps": 1e-6,
        },
        set(),
        set(),
    ),
    *(
        (
            f"another {theirs}",
            {P + theirs: value},
            {},
            {},
            {},
            {
                "task.predictor.preset": REMOVED,
                "task.predictor.num_layers": 30,
                "task.predictor.num_attention_heads": 12,
                "task.predictor.attention_head_dim": 128,
                "task.predictor.ffn_dim": 8960,
                "task.predictor.in_channels": 16,
                "task.predictor.out_channels": 16,
                **ours,
            },
            set(),
            set(),
        )
        for theirs, value, ours in (
            ("text_dim", 512, {"task.predictor.text_dim": 512}),
            ("cross_attn_norm", False, {"task.predictor.cross_attn_norm": False}),
            (
                "num_heads",
                24,
                {"task.predictor.num_attention_heads": 24, "task.predictor.attention_head_dim": 64},
            ),
        )
    ),
    (
        "i2v",
        {**OF_I2V, "predictor.model_type": "i2v", "ae.i2v_processor.image_encoder": "Wan/image_encoder"},
        {},
        {},
        {},
        {
            **I2V,
            "task.image_encoder.type": "wan/clip_vision",
            "task.image_encoder.from_pretrained": "Wan/image_encoder",
        },
        set(),
        set(),
    ),
    (
        "flf2v",
        {**OF_I2V, "task": "flf2v", "predictor.model_type": "flf2v"},
        {},
        {},
        {},
        {
            "task.predictor.preset": "wan2.1-flf2v-14b-720p",
            "task.frames": ["first", "last"],
            "task.image_encoder.type": "wan/clip_vision",
            "task.image_encoder.from_pretrained": "Wan/image_encoder",
        },
        set(),
        set(),
    ),
    (
        "ti2v",
        {
            "task": "i2v",
            "predictor.hidden_size": 3072,
            "predictor.ffn_dim": 14336,
            "predictor.num_heads": 24,
            "predictor.in_dim": 48,
            "predictor.out_dim": 48,
            "predictor.seperated_timestep": True,
        },
        {},
        {},
        {},
        {
            "task.predictor.preset": "wan2.2-ti2v-5b",
            "task.frames": ["first"],
            "task.autoencoder.latent_channels": 48,
        },
        {"predictor.seperated_timestep"},
        set(),
    ),
    (
        "high",
        {
            **OF_I2V,
            "predictor.model_type": "wan2.2-i2v",
            "diffusion.shift": 5,
            "diffusion.min_timestep_boundary": 0.0,
            "diffusion.max_timestep_boundary": 0.358,
        },
        {},
        {},
        {"sub_modules_to_wrap": ["predictor.blocks.{*}"]},
        {
            "task.predictor.type": "wan/two_expert",
            "task.predictor.preset": "wan2.2-i2v-a14b",
            "task.frames": ["first"],
            "task.predictor.train": "high",
            "task.predictor.boundary": 0.9,
            "task.scheduler.shift": 5.0,
            "engine.sub_modules_to_wrap": ["predictor.{*}.blocks.{*}"],
        },
        {"diffusion.min_timestep_boundary", "diffusion.max_timestep_boundary"},
        set(),
    ),
    (
        "a share of the levels",
        {"diffusion.max_timestep_boundary": 0.5},
        {},
        {},
        {},
        {"task.scheduler.max_timestep_boundary": 0.5},
        set(),
        set(),
    ),
    (
        "both bounds",
        {
            **OF_I2V,
            "predictor.model_type": "wan2.2-i2v",
            "diffusion.min_timestep_boundary": 0.2,
            "diffusion.max_timestep_boundary": 0.5,
        },
        {},
        {},
        {},
        {
            "task.predictor.preset": "wan2.2-i2v-a14b",
            "task.frames": ["first"],
            "task.scheduler.min_timestep_boundary": 0.2,
            "task.scheduler.max_timestep_boundary": 0.5,
        },
        set(),
        set(),
    ),
    (
        "features",
        FEATURES,
        {"dataset_param.dataset_type": "feature"},
        {"load": "w/Wan/transformer"},
        {},
        {
            "data.cache.dir": "cache",
            "task.caption_dropout": 0.0,
            "task.predictor.from_pretrained": "w/Wan",
            "task.autoencoder.from_pretrained": "w/Wan/vae",
            "task.text_encoder.from_pretrained": "w/Wan/text_encoder",
            "task.text_encoder.tokenizer": "w/Wan/tokenizer",
            "data.train.sources.0.annotations": "data/annotation.json",
            "data.train.sources.0.folder": REMOVED,
        },
        set(),
        set(),
    ),
    (
        "preference",
        {"dpo.loss_beta": 2000, "patch.clip_grad_async": True},
        {},
        {},
        {},
        {},
        {"patch.clip_grad_async"},
        {"dpo.loss_beta"},
    ),
    ("muon", {"patch.muon_optimizer": True}, {}, {}, {}, {"optimizer.type": "muon"}, set(), set()),
    (
        "buckets",
        {},
        {D + "force_resolution": False, D + "max_hxw": 399360, D + "train_fps": 16},
        {},
        {},
        {
            "data.train.height": REMOVED,
            "data.train.width": REMOVED,
            "data.train.max_height": 480,
            "data.train.max_width": 832,
            "data.train.fps": 16,
            "data.loader.mode": "variable",
        },
        {D + "max_hxw"},
        {D + "force_resolution", D + "drop_short_ratio"},
    ),
    (
        "sizes of buckets",
        {},
        {
            D + "force_resolution": False,
            D + "max_hxw": 1000,
            D + "hw_aspect_thr": 5,
            D + "drop_short_ratio": 0.0,
        },
        {},
        {},
        {
            "data.train.height": REMOVED,
            "data.train.width": REMOVED,
            "data.train.max_height": 480,
            "data.train.max_width": 832,
            "data.loader.mode": "variable",
        },
        {D + "drop_short_ratio"},
        {D + "force_resolution", D + "max_hxw", D + "hw_aspect_thr"},
    ),
    ("short clips", {}, {D + "drop_short_ratio": 0.0}, {}, {}, {}, set(), {D + "drop_short_ratio"}),
    ("no short clips", {}, {D + "drop_short_ratio": 1.0}, {}, {}, {}, {D + "drop_short_ratio"}, set()),
    (
        "every frame",
        {},
        {D + "auto_interval": False, D + "frame_interval": 1, D + "train_fps": 16},
        {},
        {},
        {"data.train.fps": None},
        {D + "frame_interval"},
        set(),
    ),
    (
        "frames",
        {},
        {D + "auto_interval": True, D + "train_fps": 16},
        {},
        {},
        {"data.train.fps": 16},
        set(),
        set(),
    ),
    (
        "starts",
        {},
        {D + "video_processor_type": "OpensoraplanVideoProcessor"},
        {},
        {},
        {"data.train.random_start": True},
        set(),
        set(),
    ),
    (
        "other starts",
        {},
        {D + "video_processor_type": "CogVideoXProcessor"},
        {},
        {},
        {},
        set(),
        {D + "video_processor_type"},
    ),
    (
        "sequential",
        {},
        {L + "sampler_type": "SequentialSampler", L + "drop_last": False},
        {},
        {},
        {"data.loader.sampler": "sequential", "data.loader.drop_last": False},
        set(),
        set(),
    ),
    (
        "reading",
        {},
        {D + "video_reader_type": "DecordVideo", D + "frame_interval": 1, D + "speed_factor": 2.0},
        {},
        {},
        {"data.train.reader.type": "decord"},
        {D + "frame_interval"},
        {D + "speed_factor"},
    ),
    (
        "transforms",
        {},
        {
            D + "train_pipeline": {
                "video": [
                    {
                        "trans_type": "ResizeVideo",
                        "param": {"interpolation_mode": "bilinear", "antialias": True},
                    },
                    {"trans_type": "norm_fun", "param": {"mean": 0.5, "std": 0.5}},
                ]
            }
        },
        {},
        {},
        {"data.train.interpolation": "bilinear"},
        set(),
        set(),
    ),
    (
        "flips",
        {},
        {D + "train_pipeline": {"video": [{"trans_type": "RandomHorizontalFlipVideo"}]}},
        {},
        {},
        {},
        set(),
        {D + "train_pipeline.video"},
    ),
    (
        "tokenizer",
        {},
        {
            "dataset_param.tokenizer_config": {
                "from_pretrained": "Wan/tokenizer",
                "hub_backend": "hf",
                "model_max_length": 512,
            }
        },
        {},
        {},
        {"task.text_encoder.tokenizer": "Wan/tokenizer", "task.text_encoder.max_length": 512},
        {"dataset_param.tokenizer_config.hub_backend"},
        set(),
    ),
]


@pytest.mark.parametrize(
    ("model", "data", "flags", "engine", "lines", "dropped", "differs"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_a_key_of_a_wan_run_changes_these_lines_and_lists_alone(
    model, data, flags, engine, lines, dropped, differs, tmp_path, monkeypatch
):
    folder = in_folder(tmp_path, monkeypatch)
    files = write(folder, changed(WAN, model), changed(CLIPS, data), flags, {**ENGINE, **engine})
    run = migrated(files)
    taken, left, lost = lists(run)
    taken.pop("run.name")
    wanted = {key: value for key, value in {**OF_WAN, **lines}.items() if value is not REMOVED}
    assert taken == wanted
    assert (left, lost) == (dropped, differs)
    if not (lost & {"--lr-decay-style"}):
        valid(run, folder)


def test_the_length_of_conversations_of_a_script_is_its_flag(tmp_path, monkeypatch):
    run = migrated(write(in_folder(tmp_path, monkeypatch), QWEN, CHATS, {"seq-length": 4096}))
    assert run.lines["data.train.max_length"].value == 2048, "data.json has a length of its own"
    data = changed(CHATS, {B + "cutoff_len": REMOVED})
    run = migrated(write(in_folder(tmp_path, monkeypatch), QWEN, data, {"seq-length": 4096}))
    assert run.lines["data.train.max_length"].place == "pretrain.sh:11 --seq-length"


CHUNKS = {"loss_cfg.compute_mode", "loss_cfg.chunk_size", "loss_cfg.router_aux_loss_coef"}
B, A = "dataset_param.basic_parameters.", "dataset_param.attr."
LANGUAGE = [
    ("mean", {"loss_cfg.loss_type": "default"}, {}, {}, set(), {"loss_cfg.loss_type"}),
    ("absent loss", {"loss_cfg": REMOVED}, {}, {}, set(), {"loss_cfg.loss_type"}),
    (
        "chunks",
        {"loss_cfg.compute_mode": "chunk", "loss_cfg.chunk_size": 256},
        {},
        {"task.loss": "chunked", "task.chunk_tokens": 256},
        set(),
        set(),
    ),
    ("router", {"loss_cfg.router_aux_loss_coef": 0.1}, {}, {}, set(), {"loss_cfg.router_aux_loss_coef"}),
    (
        "frozen",
        {"image_encoder.vision_encoder.freeze": True, "image_encoder.vision_projector.freeze": True},
        {},
        {"train.freeze": ["model.model.visual"]},
        set(),
        set(),
    ),
    (
        "checks",
        {"text_decoder.num_layers": 999, "img_context_token_id": 5},
        {},
        {},
        {"text_decoder.num_layers", "img_context_token_id"},
        set(),
    ),
    (
        "usual rows",
        {},
        {A + "role_tag": "role", A + "images": "images", A + "system": None},
        {},
        {A + "role_tag", A + "images", A + "system"},
        set(),
    ),
    ("other rows", {}, {A + "role_tag": "from"}, {}, set(), {A + "role_tag"}),
    (
        "answers",
        {},
        {B + "train_on_prompt": True, B + "mask_history": False},
        {},
        {B + "mask_history"},
        {B + "train_on_prompt"},
    ),
    (
        "pictures",
        {},
        {D + "image_max_pixels": 1024, D + "video_maxlen": 64, D + "video_fps": 2.0},
        {"data.train.frames": 64},
        set(),
        {D + "image_max_pixels", D + "video_fps"},
    ),
    (
        "loader",
        {},
        {L + "shuffle": False, L + "pin_memory": True, L + "enable_preload": True},
        {"data.loader.sampler": "sequential", "data.loader.pin_memory": True},
        {L + "enable_preload"},
        set(),
    ),
    ("sound", {"audio_encoder.freeze": True}, {}, {}, set(), {"audio_encoder.freeze"}),
]


@pytest.mark.parametrize(
    ("model", "data", "lines", "dropped", "differs"),
    [case[1:] for case in LANGUAGE],
    ids=[case[0] for case in LANGUAGE],
)
def test_a_key_of_a_language_run_changes_these_lines_and_lists_alone(
    model, data, lines, dropped, differs, tmp_path, monkeypatch
):
    folder = in_folder(tmp_path, monkeypatch)
    run = migrated(write(folder, changed(QWEN, model), changed(CHATS, data)))
    taken, left, lost = lists(run)
    taken.pop("run.name")
    assert taken == {**OF_QWEN, **lines}
    said = (
        {"loss_cfg.loss_type"} if not {key for key in model if key.startswith("loss_cfg")} - CHUNKS else set()
    )
    assert (left, lost) == (dropped | said, differs)
    valid(run, folder)


OF_ONE_FILE = {
    **OF_QWEN,
    "train.global_batch_size": 4,
    "run.seed": 42,
    "optimizer.weight_decay": 0.0,
}
OF_ONE_FILE.pop("data.loader.workers")
T, F = "training.", "features."
NEWER = [
    ("few", {}, {}, set(), set()),
    (
        "rates",
        {
            T + "lr_decay_style": "cosine",
            T + "lr_warmup_ratio": 0.1,
            T + "lr_min": 1e-6,
            T + "lr_start": 1e-7,
        },
        {
            "lr_schedule.type": "cosine",
            "lr_schedule.warmup_fraction": 0.1,
            "lr_schedule.min_lr": 1e-6,
            "lr_schedule.warmup_init": 1e-7,
        },
        set(),
        set(),
    ),
    ("absent length", {"data." + B + "cutoff_len": REMOVED}, {"data.train.max_length": 1024}, set(), set()),
    ("clip off", {T + "clip_grad": 0.0}, {"train.clip_grad_norm": None}, set(), set()),
    (
        "lora",
        {
            T + "lora.enable": True,
            T + "lora.rank": 8,
            T + "lora.alpha": 16,
            T + "lora.target_modules": ["q_proj"],
            T + "lora.init_lora_weights": "pissa",
        },
        {
            "train.adapters.0.rank": 8,
            "train.adapters.0.alpha": 16.0,
            "train.adapters.0.targets": ["q_proj"],
            "train.adapters.0.init": "pissa",
        },
        set(),
        set(),
    ),
    (
        "lora of defaults",
        {T + "lora.enable": True},
        {
            "train.adapters.0.rank": 8,
            "train.adapters.0.alpha": 16.0,
            "train.adapters.0.targets": ["q_proj", "k_proj", "v_proj"],
        },
        set(),
        set(),
    ),
    ("no lora", {T + "lora.enable": False, T + "lora.rank": 8}, {}, {T + "lora.rank"}, set()),
    ("weights", {T + "load": "ckpt/mine"}, {"init_from.path": "ckpt/mine"}, set(), set()),
    ("the model's weights", {T + "load": "ckpt/mm/Qwen3-VL"}, {}, {T + "load"}, set()),
    (
        "muon",
        {T + "optimizer": "muon", T + "muon_momentum": 0.9, T + "ns_steps": 4},
        {"optimizer.type": "muon", "optimizer.momentum": 0.9, "optimizer.ns_steps": 4},
        set(),
        set(),
    ),
    ("swapped", {T + "optimizer": "adamw_swap"}, {}, set(), {T + "optimizer"}),
    ("fp8", {T + "quantization_plan": {"recipe_name": "mxfp8"}}, {}, set(), {T + "quantization_plan"}),
    (
        "frozen",
        {"model.freeze": ["model.visual"], "model.trust_remote_code": False},
        {"train.freeze": ["model.model.visual"], "task.trust_remote_code": False},
        set(),
        set(),
    ),
    (
        "chunks",
        {F + "enable_chunk_loss": True, F + "chunkloss_plan": {"apply_module": "lm_head", "chunk_size": 512}},
        {"task.loss": "chunked", "task.chunk_tokens": 512},
        {F + "chunkloss_plan.apply_module"},
        set(),
    ),
    (
        "offload",
        {F + "enable_activation_offload": True, F + "recompute": True},
        {"engine.offload.activations": "cpu"},
        {F + "recompute"},
        set(),
    ),
    (
        "ring",
        {
            "parallel.ring_attention_size": 2,
            "parallel.ulysses_parallel_size": 1,
            "parallel.context_parallel_size": 1,
            "parallel.tensor_parallel_size": 2,
        },
        {"train.global_batch_size": 2},
        {"parallel.ulysses_parallel_size", "parallel.context_parallel_size", "parallel.tensor_parallel_size"},
        {"parallel.ring_attention_size"},
    ),
    ("anchors", {"HF_PATH": "x"}, {}, {"HF_PATH"}, set()),
    ("sections", {"pruning": {"share": 0.5}}, {}, set(), {"pruning"}),
]


@pytest.mark.parametrize(
    ("changes", "lines", "dropped", "differs"), [case[1:] for case in NEWER], ids=[case[0] for case in NEWER]
)
def test_a_key_of_a_newer_run_changes_these_lines_and_lists_alone(
    changes, lines, dropped, differs, tmp_path, monkeypatch
):
    folder = in_folder(tmp_path, monkeypatch)
    run = migrated(write_one(folder, changed(ONE_FILE, changes)))
    taken, left, lost = lists(run)
    taken.pop("run.name")
    assert taken == {**OF_ONE_FILE, **lines}
    assert (left, lost) == (dropped | {"model.loss_cfg.loss_type"}, differs)
    if "muon" not in lines.values():
        valid(run, folder)


def test_clips_of_features_are_read_and_encoded_as_they_were_extracted(tmp_path, monkeypatch):
    folder = in_folder(tmp_path, monkeypatch)
    extracted = tmp_path / "feature_extract"
    extracted.mkdir()
    parts = {"ae": {"model_id": "wan_video_vae", "dtype": "bf16"}, "text_encoder": {"model_id": "UMT5"}}
    (extracted / "model_t2v.json").write_text(json.dumps(parts))
    reading = changed(CLIPS, {D + "cfg": 0.0, D + "num_frames": 33, L + "sampler_type": "SequentialSampler"})
    reading["dataset_param"]["preprocess_parameters"]["video_processor_type"] = "OpensoraplanVideoProcessor"
    (extracted / "data.json").write_text(json.dumps(reading))
    own = changed(CLIPS, {"dataset_param.dataset_type": "feature", L + "shuffle": True})
    run = migrated(write(folder, changed(WAN, FEATURES), own, {"load": "w/Wan/transformer"}))
    taken, dropped, differs = lists(run)
    assert taken["data.train.num_frames"] == 33 and taken["task.caption_dropout"] == 0.0
    assert "theirs drew the beginning once" in run.lines["data.train.random_start"].note
    assert taken["data.loader.sampler"] == "random", "the order is that of the training"
    assert taken["task.autoencoder.dtype"] == "bf16" and taken["data.cache.dir"] == "cache"
    assert taken["task.autoencoder.from_pretrained"] == "w/Wan/vae"
    assert (dropped, differs) == ({"dataset_param"}, set())
    valid(run, folder)


def test_weights_of_a_vision_language_run_are_begun_with_unless_they_are_the_models(tmp_path, monkeypatch):
    folder = in_folder(tmp_path, monkeypatch)
    run = migrated(write(folder, QWEN, CHATS, {"load": "mine", "no-load-optim": True}))
    assert run.lines["init_from.path"].value == "mine" and run.todo == []
    run = migrated(write(folder, QWEN, CHATS, {"load": "mm/Qwen3-VL"}))
    assert "init_from.path" not in run.lines and run.dropped[-1].key == "--load"


@pytest.mark.parametrize(
    ("load", "taken"), [("mine", "mine"), ("HunyuanVideo1.5/transformer/720p_t2v", None)]
)
def test_own_weights_of_hunyuan_video_are_begun_with(load, taken, tmp_path, monkeypatch):
    model = {"task": "t2v", "predictor": {"model_id": "hunyuanvideo15dit"}}
    flags = {"load": load, "no-load-optim": True}
    run = migrated(write(in_folder(tmp_path, monkeypatch), model, CLIPS, flags))
    assert getattr(run.lines.get("init_from.path"), "value", None) == taken


def test_what_is_frozen_stays_frozen_unless_adapters_are_trained(tmp_path, monkeypatch):
    folder, model = in_folder(tmp_path, monkeypatch), changed(QWEN, {"text_decoder.freeze": True})
    run = migrated(write(folder, model, CHATS, {"lora-r": 4}))
    assert run.lines["train.freeze"].value == ["model.model.language_model"]
    run = migrated(write(folder, model, CHATS, {"lora-r": 4, "lora-target-modules": "q_proj"}))
    assert "train.freeze" not in run.lines and run.lines["train.adapters.0.rank"].value == 4


def test_the_adapter_that_training_begins_at_names_its_targets_itself(tmp_path, monkeypatch):
    folder = in_folder(tmp_path, monkeypatch)
    content = changed(ONE_FILE, {T + "lora": {"enable": True, "pretrained_lora_path": "lora", "rank": 4}})
    run = migrated(write_one(folder, content))
    assert {key: line.value for key, line in run.lines.items() if key.startswith("train.adapters")} == {
        "train.adapters.0.from": "lora",
        "train.adapters.0.rank": 4,
    }
    valid(run, folder)


@pytest.mark.parametrize(
    ("latest", "flags", "said"),
    [
        ("release", {}, False),
        ("200", {}, True),
        ("200", {"no-load-optim": True}, True),
        ("200", {"finetune": True}, False),
        (None, {}, True),
        (None, {"no-load-optim": True}, False),
    ],
)
def test_a_save_of_a_training_that_theirs_would_resume_is_said(latest, flags, said, tmp_path, monkeypatch):
    folder = in_folder(tmp_path, monkeypatch)
    if latest is not None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/latest_checkpointed_iteration.txt").write_text(f"{latest}\n")
    run = migrated(write(folder, WAN, CLIPS, {"load": "mine", **flags}))
    assert run.lines["init_from.path"].value == "mine"
    assert [text for text in run.todo if "begins at step 0" in text] == run.todo and bool(run.todo) is said


def test_weights_beside_a_pipeline_count_as_those_of_a_training(tmp_path, monkeypatch):
    flags = {"load": "Wan/mine", "no-load-optim": True}
    (said,) = migrated(write(in_folder(tmp_path, monkeypatch), WAN, CLIPS, flags)).todo
    assert said.startswith("init_from.path: Wan/mine counts as weights of a training of your own")
    assert said.endswith("set task.predictor.from_pretrained: Wan in its place")


def test_a_yaml_given_alone_is_launched_as_the_script_that_names_it(tmp_path, monkeypatch):
    folder = in_folder(tmp_path, monkeypatch)
    (run,) = MindSpeedMM().migrate([write_one(folder, ONE_FILE) / "run_config.yaml"])
    assert (run.world, run.lines["train.global_batch_size"].value, run.todo) == (2, 4, [])
    (folder / "train.sh").unlink()
    (run,) = MindSpeedMM().migrate([folder / "run_config.yaml"])
    assert run.lines["train.global_batch_size"].value == 2
    assert run.todo[0].startswith("--nproc of the launch: no script that names run_config.yaml is here.")


def test_ranks_and_hosts_that_only_the_script_knows_are_to_be_set(tmp_path, monkeypatch):
    folder = write_one(in_folder(tmp_path, monkeypatch), ONE_FILE)
    script = folder / "train.sh"
    unknown = "--nproc_per_node $(ls /dev | wc -l) --nnodes ${PET_NNODES}"
    launch = script.read_text()
    script.write_text(launch.replace("--nproc_per_node", "--nproc-per-node"))
    assert (migrated(folder).world, migrated(folder).todo) == (2, [])
    script.write_text(launch.replace("--nproc_per_node 2", unknown))
    ranks, hosts = migrated(folder).todo
    assert ranks.startswith("--nproc of the launch: $(ls /dev | wc -l) is known only where the script runs.")
    assert hosts.startswith("--nnodes of the launch: ${PET_NNODES} is known only where the script runs.")


def test_ranks_that_share_samples_count_once_in_the_global_batch(tmp_path, monkeypatch):
    content = changed(ONE_FILE, {"parallel.ulysses_parallel_size": 2})
    run = migrated(write_one(in_folder(tmp_path, monkeypatch), content))
    line = run.lines["train.global_batch_size"]
    assert (line.value, line.note) == (2, "1 x 2 accumulated x 1 rank, as 2 of 2 share their samples")

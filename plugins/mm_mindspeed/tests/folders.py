"""Small folders of MindSpeed-MM runs, written from keys and values."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

FLAGS = {
    "mm-model": "model.json",
    "mm-data": "data.json",
    "fsdp2-config-path": "fsdp2.yaml",
    "micro-batch-size": 1,
    "global-batch-size": 2,
    "lr": 1e-5,
    "lr-decay-style": "constant",
    "train-iters": 10,
}
WAN: dict[str, Any] = {
    "task": "t2v",
    "predictor": {
        "model_id": "wandit",
        "hidden_size": 1536,
        "num_layers": 30,
        "num_heads": 12,
        "ffn_dim": 8960,
        "in_dim": 16,
        "out_dim": 16,
    },
    "diffusion": {"model_id": "wan_flow_match_scheduler"},
    "ae": {"model_id": "wan_video_vae", "from_pretrained": "Wan/vae"},
    "text_encoder": {"model_id": "UMT5", "from_pretrained": "Wan/text_encoder"},
}
CLIPS: dict[str, Any] = {
    "dataset_param": {
        "dataset_type": "t2v",
        "basic_parameters": {"data_path": "clips.json", "data_folder": "clips"},
        "preprocess_parameters": {"num_frames": 17, "max_height": 480, "max_width": 832},
    }
}
QWEN: dict[str, Any] = {
    "model_id": "qwen3_vl",
    "init_from_hf_path": "Qwen3-VL",
    "loss_cfg": {"loss_type": "per_token_loss"},
}
CHATS: dict[str, Any] = {
    "dataset_param": {
        "dataset_type": "huggingface",
        "basic_parameters": {"dataset": "chats.json", "dataset_dir": "data", "cutoff_len": 2048},
    }
}
ENGINE: dict[str, Any] = {"sharding_size": "auto", "param_dtype": "bf16", "reduce_dtype": "fp32"}
ONE_FILE: dict[str, Any] = {
    "parallel": {"fully_shard_parallel_size": "auto", "fsdp_plan": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
    "model": {"model_id": "qwen3_vl", "model_name_or_path": "Qwen3-VL", "loss_cfg": {"loss_type": "per_token_loss"}},
    "data": CHATS,
    "features": {},
    "training": {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "lr": 1e-5, "train_iters": 10},
    "tools": {},
}  # fmt: skip


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with values at dotted keys; None removes one."""
    copy = deepcopy(base)
    for key, value in changes.items():
        *above, last = key.split(".")
        inner = copy
        for part in above:
            inner = inner.setdefault(part, {})
        if value is REMOVED:
            inner.pop(last)
        else:
            inner[last] = value
    return copy


REMOVED = object()


def write(
    folder: Path, model: Any, data: Any, flags: dict[str, Any] | None = None, engine: Any = None
) -> Path:
    """Writes a folder with a launch script, model.json, data.json and the YAML of the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in {**FLAGS, **(flags or {})}.items() if value is not REMOVED}
    files = {"mm-model": model, "mm-data": data}
    for name, content in files.items():
        (folder / str(given[name])).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(engine or ENGINE), encoding="utf-8")
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items()]
    block = " \\\n    ".join(words)
    script = f'export HCCL_CONNECT_TIMEOUT=1200\nARGS="\n    {block} \\\n"\ntorchrun --nproc_per_node 2 pretrain_x.py $ARGS\n'
    (folder / "pretrain.sh").write_text(script, encoding="utf-8")
    return folder


def write_one(folder: Path, content: Any) -> Path:
    """Writes a folder with the one YAML of a newer run, and its launch script."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    script = "torchrun --nproc_per_node 2 mindspeed_mm/fsdp/train/trainer.py run_config.yaml\n"
    (folder / "train.sh").write_text(script, encoding="utf-8")
    return folder

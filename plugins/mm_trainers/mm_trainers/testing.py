"""A small run of each tool for tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

_AI_TOOLKIT = """\
job: extension
config:
  name: style
  process:
    - type: sd_trainer
      training_folder: output
      network: {type: lora, linear: 16, linear_alpha: 16}
      datasets: [{folder_path: photos, caption_ext: txt, caption_dropout_rate: 0.05, resolution: 512}]
      train: {steps: 10, lr: 1e-4, dtype: bf16, noise_scheduler: flowmatch, timestep_type: sigmoid}
      model: {name_or_path: Wan-AI/Wan2.1-T2V-1.3B-Diffusers, arch: wan21}
"""
_MUSUBI = """\
NAME=motion
accelerate launch --num_processes 1 --mixed_precision bf16 src/musubi_tuner/wan_train_network.py \\
    --task t2v-1.3B --dit wan.safetensors --vae vae.safetensors --t5 t5.safetensors \\
    --dataset_config data.toml --mixed_precision bf16 --gradient_checkpointing \\
    --network_module networks.lora_wan --network_dim 16 --learning_rate 1e-4 --max_train_steps 10 \\
    --timestep_sampling shift --discrete_flow_shift 3.0 --output_dir out --output_name $NAME
"""
_DATASETS = """\
general = {resolution = [832, 480], enable_bucket = true}
[[datasets]]
video_directory = "clips"
target_frames = [17]
"""
_LLAMA_FACTORY = """\
{model_name_or_path: Qwen/Qwen3-VL-4B-Instruct, template: qwen3_vl, stage: sft, do_train: true, bf16: true,
 finetuning_type: lora, lora_rank: 8, dataset: chats, output_dir: saves/chats,
 per_device_train_batch_size: 1, learning_rate: 1.0e-4}
"""
_INFO = '{"chats": {"file_name": "chats.json", "formatting": "sharegpt"}}'
_ARGUMENTS = (
    '{"output_dir": "out/chats", "per_device_train_batch_size": 2, "learning_rate": 1e-05, "bf16": true}'
)
_STAGE = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'


def _write(files: Mapping[str, str], folder: Path) -> list[Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


ai_toolkit = partial(_write, {"style.yaml": _AI_TOOLKIT})
musubi_tuner = partial(_write, {"data.toml": _DATASETS, "train.sh": _MUSUBI})
llama_factory = partial(_write, {"sft.yaml": _LLAMA_FACTORY, "data/dataset_info.json": _INFO})
training_arguments = partial(_write, {"arguments.json": _ARGUMENTS, "ds.json": _STAGE})

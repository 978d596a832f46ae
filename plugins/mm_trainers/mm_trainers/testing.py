"""A small run of each tool for tests."""

from __future__ import annotations

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
    --network_module networks.lora_wan --network_dim 16 --learning_rate 1e-4 \\
    --timestep_sampling shift --discrete_flow_shift 3.0 \\
    --max_train_steps 10 --output_dir out --output_name $NAME
"""
_DATASETS = """\
[general]
resolution = [832, 480]
enable_bucket = true

[[datasets]]
video_directory = "clips"
target_frames = [17]
"""


def ai_toolkit(folder: Path) -> list[Path]:
    """Writes a job of ai-toolkit: a LoRA of Wan 2.1 1.3B on pictures."""
    return [_written(folder / "style.yaml", _AI_TOOLKIT)]


def musubi_tuner(folder: Path) -> list[Path]:
    """Writes a run of musubi-tuner: a LoRA of Wan 2.1 1.3B on clips."""
    return [_written(folder / "data.toml", _DATASETS), _written(folder / "train.sh", _MUSUBI)]


def _written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file

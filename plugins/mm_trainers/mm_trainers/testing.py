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
_LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-VL-4B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
dataset: chats
template: qwen3_vl
output_dir: saves/chats
per_device_train_batch_size: 1
learning_rate: 1.0e-4
bf16: true
"""
_INFO = '{"chats": {"file_name": "chats.json", "formatting": "sharegpt"}}'
_ARGUMENTS = (
    '{"output_dir": "out/chats", "per_device_train_batch_size": 2, "learning_rate": 1e-05, "bf16": true}'
)


def ai_toolkit(folder: Path) -> list[Path]:
    """Writes a job of ai-toolkit: a LoRA of Wan 2.1 1.3B on pictures."""
    return [_written(folder / "style.yaml", _AI_TOOLKIT)]


def musubi_tuner(folder: Path) -> list[Path]:
    """Writes a run of musubi-tuner: a LoRA of Wan 2.1 1.3B on clips."""
    return [_written(folder / "data.toml", _DATASETS), _written(folder / "train.sh", _MUSUBI)]


def llama_factory(folder: Path) -> list[Path]:
    """Writes a run of LLaMA-Factory: a LoRA of Qwen3-VL 4B."""
    (folder / "data").mkdir()
    info = _written(folder / "data" / "dataset_info.json", _INFO)
    return [_written(folder / "sft.yaml", _LLAMA_FACTORY), info]


def training_arguments(folder: Path) -> list[Path]:
    """Writes TrainingArguments of Transformers, and a JSON of DeepSpeed."""
    stage = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    return [_written(folder / "arguments.json", _ARGUMENTS), _written(folder / "ds.json", stage)]


def _written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file

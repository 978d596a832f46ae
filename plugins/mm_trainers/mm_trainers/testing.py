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


def ai_toolkit(folder: Path) -> list[Path]:
    """Writes a job of ai-toolkit: a LoRA of Wan 2.1 1.3B on pictures."""
    return [_written(folder / "style.yaml", _AI_TOOLKIT)]


def _written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file

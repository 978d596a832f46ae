"""A small run of MindSpeed-MM, and a small Wan, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_FILES = {
    "model.json": """{"task": "t2v", "predictor": {"model_id": "wandit", "hidden_size": 1536,
 "num_layers": 30, "num_heads": 12, "ffn_dim": 8960, "in_dim": 16, "out_dim": 16},
"diffusion": {"model_id": "wan_flow_match_scheduler"},
"ae": {"model_id": "wan_video_vae", "from_pretrained": "Wan/vae"},
"text_encoder": {"model_id": "UMT5", "from_pretrained": "Wan/text_encoder"}}
""",
    "data.json": """{"dataset_param": {"dataset_type": "t2v",
"basic_parameters": {"data_path": "clips.json", "data_folder": "clips"},
"preprocess_parameters": {"num_frames": 17, "max_height": 480, "max_width": 832}}}
""",
    "pretrain.sh": """NPUS=2
MBS=1
GBS=$(($NPUS*$MBS))
ARGS="--mm-model FOLDER/model.json --mm-data FOLDER/data.json --load FOLDER/Wan/transformer/ --save out \\
    --micro-batch-size ${MBS} --global-batch-size $GBS --train-iters 10 --lr 1e-5 --lr-decay-style constant"
torchrun --nproc_per_node $NPUS pretrain_sora.py $ARGS
""",
}


def examples(folder: Path) -> list[Path]:
    """Writes the folder of a run of Wan 2.1 1.3B."""
    for name, text in _FILES.items():
        (folder / name).write_text(text.replace("FOLDER", str(folder)), encoding="utf-8")
    return [folder]


def tiny_wan(folder: Path) -> nn.Module:
    """Diffusers' Wan transformer of one block, with random weights."""
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    sizes |= {"text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "num_layers": 1, "rope_max_seq_len": 32}
    model: nn.Module = WanTransformer3DModel(**sizes)
    return model

"""The weight format `mindspeed/wan`: Wan's transformer in MindSpeed-MM's checkpoints, both ways.

Names are those of its converter (checkpoint/sora_model/wan_converter.py of
https://github.com/Ascend/MindSpeed-MM, 57069cd), between Diffusers' and its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from mm_core.checkpoint import Dcp, DcpTensors
from mm_core.contracts import TaskModule
from mm_core.errors import CheckpointError, plural
from mm_core.weights import (
    AdapterLayout,
    Below,
    Companions,
    KeyMap,
    Layout,
    Rename,
    StoredTensors,
    Written,
    open_saved,
)
from mm_mindspeed.names import LATEST, RELEASE

CLASS = "WanTransformer3DModel"
_FIRST = "patch_embedding.weight"
_RANK, _FILE = "mp_rank_00", "model_optim_rng"

_ATTENTION = {
    "to_q": "proj_q",
    "to_k": "proj_k",
    "to_v": "proj_v",
    "to_out.0": "proj_out",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
_IMAGE = {"add_k_proj": "k_img", "add_v_proj": "v_img", "norm_added_k": "k_norm_img"}
_EMBEDDER = {
    "text_embedder": "text_embedding",
    "time_embedder.linear_1": "time_embedding.0",
    "time_embedder.linear_2": "time_embedding.2",
    "time_proj": "time_projection.1",
    "image_embedder.norm1": "img_emb.proj.0",
    "image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "image_embedder.ff.net.2": "img_emb.proj.3",
    "image_embedder.norm2": "img_emb.proj.4",
}
KEYS = KeyMap(
    (
        *(
            Rename(f"blocks.{{i}}.{ours}.{one}.{{p}}", f"blocks.{{i}}.{theirs}.{other}.{{p}}")
            for ours, theirs, layers in (
                ("attn1", "self_attn", _ATTENTION),
                ("attn2", "cross_attn", {**_ATTENTION, **_IMAGE}),
            )
            for one, other in layers.items()
        ),
        Rename("blocks.{i}.norm2.{p}", "blocks.{i}.norm3.{p}"),
        Rename("blocks.{i}.ffn.net.0.proj.{p}", "blocks.{i}.ffn.0.{p}"),
        Rename("blocks.{i}.ffn.net.2.{p}", "blocks.{i}.ffn.2.{p}"),
        Rename("blocks.{i}.scale_shift_table", "blocks.{i}.modulation"),
        *(
            Rename(f"condition_embedder.{one}.{{p...}}", f"{other}.{{p...}}")
            for one, other in _EMBEDDER.items()
        ),
        Rename("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
        Rename("proj_out.{p}", "head.head.{p}"),
        Rename("scale_shift_table", "head.modulation"),
    )
)
"""Names of Diffusers' WanTransformer3DModel -> names in MindSpeed-MM's checkpoints."""


class MindSpeedWan:
    """The weight format `mindspeed/wan`: a folder that MindSpeed-MM's Wan models load and save.

    Read: `release` or the newest `iter_...` of a folder, or such a folder itself, as one file of Megatron
    (`mp_rank_00/model_optim_rng.pt`) or as torch_dcp. Written: `release/mp_rank_00`.
    """

    def recognises(self, path: Path) -> bool:
        """Whether a folder is one of Megatron's, or torch_dcp with MindSpeed-MM's names of Wan."""
        if (path / LATEST).is_file() or any((path / each / _RANK).is_dir() for each in ("", RELEASE)):
            return True
        return Dcp().recognises(path) and any(
            ".self_attn.proj_q." in name for name in DcpTensors(path).shapes
        )

    def folders(self, path: Path) -> Sequence[str]:
        """The folder of the newest save: `release`, `iter_0000100`; [""] if it is the path itself."""
        if not (path / LATEST).is_file():
            return [RELEASE] if (path / RELEASE / _RANK).is_dir() else [""]
        newest = (path / LATEST).read_text(errors="replace").strip()
        return [newest if newest == RELEASE else f"iter_{newest:0>7}"]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the tensors of Wan's transformer in a save.

        Raises:
            CheckpointError: it is divided among ranks of tensor or pipeline parallelism, or holds no Wan.
        """
        saved = path / (folder or next(iter(self.folders(path))))
        ranks = sorted(found.name for found in saved.glob("mp_rank_*"))
        if len(ranks) > 1:
            raise CheckpointError(
                f"this save is divided among {plural(len(ranks), 'rank')} of tensor or pipeline parallelism",
                where=str(saved),
                hint="join it first with MindSpeed-MM's own `mm-convert WanConverter resplit`",
            )
        file = saved / _RANK / f"{_FILE}.pt"
        stored = DcpTensors(saved) if Dcp().recognises(saved) else open_saved(file)
        starts = [name.removesuffix(_FIRST) for name in stored.shapes if name.endswith(_FIRST)]
        if not starts:
            raise CheckpointError(f"this save holds no Wan: no tensor is called {_FIRST}", where=str(saved))
        return Below(stored, min(starts, key=len))

    def layout(self, name: str, component: nn.Module) -> Layout | Sequence[Layout] | None:
        """How a Wan transformer, or each expert of a pair that is trained, is stored."""
        folder = f"{RELEASE}/{_RANK}"
        layout = Layout(KEYS, folder, _FILE, nested="model", library="mindspeed-mm")
        if _is_wan(component):
            return layout
        experts = {path: child for path, child in component.named_children() if _is_wan(child)}
        if not experts or len(list(component.parameters())) != sum(
            len(list(child.parameters())) for child in experts.values()
        ):
            return None
        if len(experts) == 1:
            return [replace(layout, part=next(iter(experts)))]
        return [replace(layout, part=path, folder=f"{path}/{folder}") for path in experts]

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """None: MindSpeed-MM reads LoRAs in Wan-AI's names (`--to lora/comfyui`)."""
        return None

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """The file that names the save to load."""
        tops = [one.folder.removesuffix(f"{RELEASE}/{_RANK}") for one in written]
        return Companions(texts={f"{top}{LATEST}": RELEASE for top in tops})


def _is_wan(module: nn.Module) -> bool:
    return any(kind.__name__ == CLASS for kind in type(module).__mro__)

"""The layouts of LoRA files that other programs load: ComfyUI, kohya's scripts, Diffusers and PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from torch import nn

from mm_core.modules.adapter_layers import without_adapters
from mm_core.weights.adapters.files import PART
from mm_core.weights.fitting import Formats
from mm_core.weights.formats.format import AdapterLayout
from mm_core.weights.formats.libraries import PEFT_ADAPTER, Safetensors, peft_layout

LAYOUTS: Mapping[str, AdapterLayout] = {
    "lora/comfyui": AdapterLayout("", "diffusion_model.", alphas=True, additions=True),
    "lora/kohya": AdapterLayout("", "lora_unet_", factors=("lora_down", "lora_up"), flat=True, alphas=True),
    "lora/diffusers": AdapterLayout("", "transformer.", metadata_key="lora_adapter_metadata"),
    "lora/peft": peft_layout(AdapterLayout("").keys),
}
"""Name after `--to` -> the layout, without the file's name and the names of a model's modules."""

PUBLISHERS = ("lora/comfyui", "lora/kohya")
"""The layouts that use the names of the model's publisher."""


@dataclass(frozen=True)
class LoraFormat(Safetensors):
    """The weight format of LoRA files: the adapter layouts of a component's own format, as one of `LAYOUTS`.

    Attributes:
        label: name in `LAYOUTS`.
        formats: weight formats; the first that stores the component's adapter names its modules.
        file: name of the file; a part's name is added to it.
        texts: texts for the header of each file.
    """

    label: str
    formats: Formats
    file: str
    texts: Mapping[str, str]

    def adapter(self, name: str, component: nn.Module) -> Sequence[AdapterLayout]:  # type: ignore[override]
        """The layout of each file of a component's adapter; () where no format stores it."""
        with without_adapters(component):
            tried = (form.adapter(name, component) for form in self.formats.values())
            own: AdapterLayout | Sequence[AdapterLayout] = next((one for one in tried if one), ())
        return [self._laid_out(one) for one in ((own,) if isinstance(own, AdapterLayout) else own)]

    def _laid_out(self, own: AdapterLayout) -> AdapterLayout:
        usual = LAYOUTS[self.label]
        keys = own.others[0] if own.others and self.label in PUBLISHERS else own.keys
        prefix, keys = own.programs.get(self.label, (usual.module_prefix, keys))
        stem = PurePath(self.file).stem
        file = f"{stem}_{own.part}.safetensors" if own.part else f"{stem}.safetensors"
        if self.label == "lora/peft":
            file = str(PurePath(own.part) / PEFT_ADAPTER)
        texts = {**self.texts, PART: own.part} if own.part else self.texts
        return replace(usual, file=file, module_prefix=prefix, keys=keys, part=own.part, texts=texts)

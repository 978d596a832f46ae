"""The built-in weight formats: plain safetensors, and the folders of Diffusers and Transformers."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mm_core.contracts import SupportsWeightsFrom, TaskModule
from mm_core.errors import CheckpointError
from mm_core.modules.adapter_layers import without_adapters
from mm_core.weights.formats.format import AdapterLayout, Companions, Layout, StoredTensors, Written
from mm_core.weights.formats.key_map import KeyMap, Shape
from mm_core.weights.formats.known_class import difference, known_class
from mm_core.weights.formats.transformers_names import keys_as_loaded, keys_as_saved, keys_of
from mm_core.weights.stored import INDEX, open_stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mm_core.weights.formats.known_class import LibraryModel

PEFT_ADAPTER = "adapter_model.safetensors"
PIPELINE = "model_index.json"
"""Lists the parts of a pipeline of Diffusers: folder -> library and class."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
)
"""Files beside a Transformers model that configure its tokenizer and processors."""


class Safetensors:
    """The weight format of plain safetensors files, with the component's own tensor names."""

    def recognises(self, path: Path) -> bool:
        """Whether a path is a safetensors file, an index of such files, or a folder with one."""
        if path.is_file():
            return path.name.endswith((".safetensors", INDEX))
        if any(found.name != PEFT_ADAPTER for found in path.glob("*.safetensors")):
            return True
        return any(path.glob(f"*{INDEX}"))  # its files may be missing: reading reports that

    def folders(self, path: Path) -> Sequence[str]:
        """The folders with safetensors weights: always [""], the path itself."""
        return [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the tensors of a safetensors file or folder."""
        return open_stored(path / folder)

    def layout(self, name: str, component: nn.Module) -> Layout:
        """The layout of any component in plain safetensors files: its own names."""
        return Layout()

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout:
        """The layout of an adapter beside plain safetensors files: PEFT's."""
        return peft_layout(KeyMap())

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """Further files of an export to plain safetensors: none."""
        return Companions()


class Diffusers:
    """The weight format of folders for Diffusers' `from_pretrained`: one model, or a pipeline of models."""

    stem = "diffusion_pytorch_model"

    def recognises(self, path: Path) -> bool:
        """Whether a path is a Diffusers folder, with model_index.json or `_class_name` in config.json."""
        return path.is_dir() and (
            bool(read_mapping(path / PIPELINE)) or "_class_name" in read_mapping(path / "config.json")
        )

    def folders(self, path: Path) -> Sequence[str]:
        """The folders with weights in a Diffusers pipeline; [""] for a single model's folder."""
        if not (path / PIPELINE).is_file():
            return [""]
        return [name for name in pipeline_parts(path) if any((path / name).glob("*.safetensors"))]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the stored tensors of one Diffusers model."""
        return _open_model(path / folder, self.stem, "*.bin")

    def layout(self, name: str, component: nn.Module) -> Layout | None:
        """The layout of a Diffusers model, or of a component that wraps one; None for any other."""
        found = wrapped_model(component, "diffusers", "ModelMixin")
        if found is None:
            return None
        prefix, model = found
        kind = known_class(model, "diffusers", sys.modules["diffusers"].ModelMixin)
        document = json.loads(model.to_json_string()) | {"_class_name": kind.__name__}
        return Layout(
            KeyMap(prefix=prefix),
            stem=self.stem,
            texts={"config.json": json.dumps(document, indent=2, sort_keys=True) + "\n"},
            library="diffusers",
            loading=_from_pretrained("diffusers", model, kind),
            refusal=lambda: difference(model, kind),
        )

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """The layout of an adapter file for Diffusers' `load_lora_adapter` and `load_lora_weights`."""
        found = wrapped_model(component, "diffusers", "ModelMixin")
        if found is None:
            return None
        return AdapterLayout(
            "pytorch_lora_weights.safetensors",
            "transformer.",
            KeyMap(prefix=found[0]),
            metadata_key="lora_adapter_metadata",
            library="diffusers",
            loading='pipeline.load_lora_weights("{folder}", weight_name="pytorch_lora_weights.safetensors")',
        )

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """The other parts of the Diffusers pipeline that training started from: see `pipeline_around`."""
        return pipeline_around(written)


class Transformers:
    """The weight format of folders for Transformers' `from_pretrained`, tokenizer files included."""

    stem = "model"

    def recognises(self, path: Path) -> bool:
        """Whether a path is a Transformers folder: its config.json has a `model_type`."""
        return path.is_dir() and "model_type" in read_mapping(path / "config.json")

    def folders(self, path: Path) -> Sequence[str]:
        """The folders with weights of a Transformers model: always [""], the path itself."""
        return [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the stored tensors of a Transformers model."""
        return _open_model(path / folder, self.stem, "pytorch_model*.bin")

    def layout(self, name: str, component: nn.Module) -> Layout | None:
        """The layout of a Transformers model, or of a component that wraps one; None for any other."""
        found = wrapped_model(component, "transformers", "PreTrainedModel")
        if found is None:
            return None
        prefix, model = found
        config = copy.deepcopy(model.config)
        kind = known_class(model, "transformers", sys.modules["transformers"].PreTrainedModel)
        config.architectures = [kind.__name__]
        document = json.loads(config.to_json_string())
        # Transformers would load the model in this dtype instead of that of the files.
        for key in ("dtype", "torch_dtype"):
            document.pop(key, None)
        texts = {"config.json": json.dumps(document, indent=2) + "\n"}
        if model.can_generate() and model.generation_config is not None:
            texts["generation_config.json"] = model.generation_config.to_json_string()
        return Layout(
            keys_as_saved(model, prefix),
            stem=self.stem,
            texts=texts,
            library="transformers",
            loading=_from_pretrained("transformers", model, kind),
            refusal=lambda: difference(model, kind),
            reading=lambda stored: keys_as_loaded(model, stored),
        )

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """The layout of an adapter of a Transformers model: PEFT's, with the tensor names in memory."""
        found = wrapped_model(component, "transformers", "PreTrainedModel")
        if found is None:
            return None
        prefix, model = found

        def reading(shapes: Mapping[str, Shape]) -> KeyMap:
            """By the names of other versions of the library."""
            with without_adapters(component):
                return keys_of(model, shapes)

        return replace(peft_layout(KeyMap(prefix=prefix)), reading=reading)

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """Tokenizer and processor files to copy from the folders of the trained Transformers models.

        If a model's config.json names Python files, those are copied too.
        """
        copies: dict[str, Path] = {}
        for name in task.trainable:
            found = wrapped_model(task.get_submodule(name), "transformers", "PreTrainedModel")
            folder = _origin(found[1]) if found is not None else None
            if found is None or folder is None:
                continue
            code = sorted(folder.glob("*.py")) if getattr(found[1].config, "auto_map", None) else []
            files = [*(folder / name for name in TOKENIZER_FILES), *code]
            copies |= {path.name: path for path in files if path.is_file()}
        return Companions(copies=copies)


def _open_model(place: Path, stem: str, pickles: str) -> StoredTensors:
    """Opens a model's folder; files matching `pickles` are refused if there are no safetensors files."""
    pickled = sorted(found.name for found in place.glob(pickles))
    if pickled and not any(place.glob("*.safetensors")):
        raise only_pickled(place, pickled)
    return open_stored(place, stem)


def _origin(model: PreTrainedModel) -> Path | None:
    """The folder that a Transformers model was built from, by its weights or by its config."""
    if isinstance(model, SupportsWeightsFrom) and model.weights_from is not None:
        return Path(model.weights_from.path)
    return Path(model.config.name_or_path) if model.config.name_or_path else None


def pipeline_parts(top: Path) -> dict[str, str]:
    """The parts listed in a Diffusers pipeline's folder, with their classes; {} for any other folder.

    A part's own config.json takes precedence for its class.
    """
    found = {}
    for name, kind in read_mapping(top / PIPELINE).items():
        # The folder is untrusted: a name may point outside it.
        plain = Path(name).name == name and name not in ("", "..")
        part = isinstance(kind, list) and [type(each) for each in kind] == [str, str]  # or a list of settings
        if plain and part:
            found[name] = str(read_mapping(top / name / "config.json").get("_class_name", kind[-1]))
    return found


def pipeline_around(written: Sequence[Written]) -> Companions:
    """The Diffusers pipeline that exported weights started from: its index and other parts, to be copied.

    Each exported part goes into its folder in the pipeline; one that is not part of it goes into a folder
    with the component's name. Empty if no part started from a pipeline, or if parts started from different
    ones.
    """
    homes = {(one.component, one.part): _pipeline_of(one) for one in written}
    tops = {home[0] for home in homes.values() if home is not None}
    if len(tops) != 1:
        return Companions()
    top = tops.pop()
    places = {
        (one.component, one.part): home[1] if home is not None else one.folder or one.component
        for one, home in zip(written, homes.values(), strict=True)
    }
    copies = {name: top / name for name in (PIPELINE, *pipeline_parts(top)) if name not in places.values()}
    kind = read_mapping(top / PIPELINE).get("_class_name")
    # It goes into Python that a reader may run.
    kind = kind if isinstance(kind, str) and kind.isidentifier() else "DiffusionPipeline"
    loading = f'from diffusers import {kind}\n\npipeline = {kind}.from_pretrained("{{folder}}")'
    return Companions(copies=copies, places=places, loading=loading)


def _pipeline_of(part: Written) -> tuple[Path, str] | None:
    """(pipeline's folder, folder in it) of the model that a part started from, if it has the same class.

    The origin may be a pipeline, the folder of one of its models, or a file in that.
    """
    wanted = json.loads(part.texts.get("config.json", "{}")).get("_class_name", "")
    for origin in (origin.absolute() for origin in part.sources):
        alike = [name for name, kind in pipeline_parts(origin).items() if kind == wanted]
        named = [name for name in (part.folder, part.component, part.part) if name in alike]
        # The parts of one component may have the same class: only their folders differ.
        if named or (len(alike) == 1 and not part.part):
            return origin, (named or alike)[0]
        # A link is followed no further than its name: `transformer` in the pipeline's own folder.
        for folder in (origin, origin.parent):
            if pipeline_parts(folder.parent).get(folder.name) == wanted:
                return folder.parent, folder.name
    return None


def peft_layout(keys: KeyMap) -> AdapterLayout:
    """The layout of an adapter as PEFT writes it, for a model with the stored names of `keys`."""
    return AdapterLayout(
        PEFT_ADAPTER,
        "base_model.model.",
        keys,
        config="adapter_config.json",
        library="peft",
        loading='from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(model, "{folder}")',
    )


def only_pickled(folder: Path, names: Sequence[str]) -> CheckpointError:
    """The error for a folder whose weights are only pickle files, which can run code."""
    return CheckpointError(
        f"the weights here are pickle files, which can run code: {', '.join(names[:3])}",
        where=str(folder),
        accepted="safetensors files",
        hint="get the model as safetensors; or, if you trust it, convert it with its own library",
    )


def wrapped_model(component: nn.Module, library: str, base: str) -> tuple[str, LibraryModel] | None:
    """The Diffusers or Transformers model in a component, as (prefix of its tensor names, model).

    It is the component itself, or the only model of the library in it if that has all its tensors; else None.
    The library is not imported here: a component with such a model has imported it already.
    """
    kind = getattr(sys.modules.get(library), base, None)
    if kind is None:
        return None
    if isinstance(component, kind):
        return "", component
    held = [(name, child) for name, child in component.named_modules() if isinstance(child, kind)]
    found = [(name, m) for name, m in held if not any(name.startswith(f"{outer}.") for outer, _ in held)]
    if len(found) != 1:
        return None
    prefix = f"{found[0][0]}."
    names = [*dict(component.named_parameters()), *dict(component.named_buffers())]
    return (prefix, found[0][1]) if all(name.startswith(prefix) for name in names) else None


def _from_pretrained(library: str, model: LibraryModel, kind: type[LibraryModel]) -> str:
    """Python that loads the model; its class may be in the library, a package or the folder itself."""
    where, name = kind.__module__, kind.__name__
    if where.partition(".")[0] != "transformers_modules":
        source = library if where.partition(".")[0] == library else where
        return f'from {source} import {name}\n\nmodel = {name}.from_pretrained("{{folder}}")'
    listed = {str(code).rpartition(".")[2]: auto for auto, code in (model.config.auto_map or {}).items()}
    auto = listed.get(name, "")
    # It goes into Python that a reader may run.
    auto = auto if auto.isidentifier() else "AutoModel"
    loading = f'{auto}.from_pretrained("{{folder}}", trust_remote_code=True)  # runs its Python files'
    return f"from {library} import {auto}\n\nmodel = {loading}"


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Reads a small JSON object, such as config.json, of an untrusted model folder; {} for anything else."""
    try:
        # Opening a pipe would block forever.
        if not path.is_file() or path.stat().st_size > 10_000_000:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

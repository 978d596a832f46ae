"""The formats that the core ships: plain safetensors, Diffusers' and Transformers' folders."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mm_core.contracts import SupportsWeightsFrom, TaskModule
from mm_core.errors import CheckpointError
from mm_core.weights.formats.format import AdapterLayout, Companions, Layout, StoredTensors, Written
from mm_core.weights.formats.key_map import KeyMap
from mm_core.weights.formats.known_class import difference, known_class
from mm_core.weights.formats.transformers_names import keys_as_loaded, keys_as_saved
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
"""Files beside a Transformers model that say how its inputs are made."""


class Safetensors:
    """`model.safetensors`, or shards and their index, under the names of the component itself."""

    def recognises(self, path: Path) -> bool:
        """A safetensors file, an index of such, or a folder that holds any."""
        if path.is_file():
            return path.name.endswith((".safetensors", INDEX))
        if any(found.name != PEFT_ADAPTER for found in path.glob("*.safetensors")):
            return True
        return any(path.glob(f"*{INDEX}"))  # whose files may be elsewhere, which reading says

    def folders(self, path: Path) -> Sequence[str]:
        """The top."""
        return [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """The tensors of the file or folder."""
        return open_stored(path / folder)

    def layout(self, name: str, component: nn.Module) -> Layout:
        """Any component, as it is."""
        return Layout()

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout:
        """PEFT's layout."""
        return peft_layout(KeyMap())

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """None."""
        return Companions()


class Diffusers:
    """A folder that Diffusers' `from_pretrained` loads: a model's, or a pipeline's with one a model."""

    stem = "diffusion_pytorch_model"

    def recognises(self, path: Path) -> bool:
        """A folder with model_index.json, or with a config.json that names a `_class_name`."""
        return path.is_dir() and (
            (path / PIPELINE).is_file() or "_class_name" in read_mapping(path / "config.json")
        )

    def folders(self, path: Path) -> Sequence[str]:
        """A pipeline's folders with weights; [""] for a model's folder."""
        if not (path / PIPELINE).is_file():
            return [""]
        return [name for name in pipeline_parts(path) if any((path / name).glob("*.safetensors"))]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """The tensors of one model."""
        return _open_model(path / folder, self.stem, "*.bin")

    def layout(self, name: str, component: nn.Module) -> Layout | None:
        """A Diffusers model, or a component that is a wrapper of one."""
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
        """What `load_lora_adapter` and `load_lora_weights` read."""
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
        """Where what is written began with a pipeline, that pipeline around it: see `pipeline_around`."""
        return pipeline_around(written)


class Transformers:
    """A folder that Transformers' `from_pretrained` loads, with tokenizer and processor files."""

    stem = "model"

    def recognises(self, path: Path) -> bool:
        """A folder with a config.json that names a `model_type`."""
        return path.is_dir() and "model_type" in read_mapping(path / "config.json")

    def folders(self, path: Path) -> Sequence[str]:
        """The top."""
        return [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """The tensors of the model."""
        return _open_model(path / folder, self.stem, "pytorch_model*.bin")

    def layout(self, name: str, component: nn.Module) -> Layout | None:
        """A Transformers model, or a component that is a wrapper of one."""
        found = wrapped_model(component, "transformers", "PreTrainedModel")
        if found is None:
            return None
        prefix, model = found
        config = copy.deepcopy(model.config)
        kind = known_class(model, "transformers", sys.modules["transformers"].PreTrainedModel)
        config.architectures = [kind.__name__]
        document = json.loads(config.to_json_string())
        # It would be loaded in this dtype, whatever that of its files is.
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
        """PEFT's layout, whose names are those in memory."""
        found = wrapped_model(component, "transformers", "PreTrainedModel")
        return None if found is None else peft_layout(KeyMap(prefix=found[0]))

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """Tokenizer and processor files of the folders that the trained models were made of, and the Python
        files where config.json names some."""
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
    """The tensors of a model's folder. pickles: pattern of files that are refused where nothing else is."""
    pickled = sorted(found.name for found in place.glob(pickles))
    if pickled and not any(place.glob("*.safetensors")):
        raise only_pickled(place, pickled)
    return open_stored(place, stem)


def _origin(model: PreTrainedModel) -> Path | None:
    """The folder that a model of Transformers was made of, by its files or by its config alone."""
    if isinstance(model, SupportsWeightsFrom) and model.weights_from is not None:
        return Path(model.weights_from.path)
    return Path(model.config.name_or_path) if model.config.name_or_path else None


def pipeline_parts(top: Path) -> dict[str, str]:
    """The parts that a pipeline's folder lists, with their classes; {} for any other folder. A part's own
    config.json has the last word on its class."""
    found = {}
    for name, kind in read_mapping(top / PIPELINE).items():
        # Nobody vouches for the folder: a name may lead elsewhere.
        plain = Path(name).name == name and name not in ("", "..")
        if plain and isinstance(kind, list) and kind and kind[0] is not None:
            found[name] = str(read_mapping(top / name / "config.json").get("_class_name", kind[-1]))
    return found


def pipeline_around(written: Sequence[Written]) -> Companions:
    """The pipeline that what is written began with: its index and its other parts as they are, and each
    written part in its folder. What is no part of it gets a folder of the component's name. Nothing, where
    no part began with a pipeline, or several did with different ones."""
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
    """(pipeline's folder, folder in it) of the model of this class that a part began with: a pipeline, the
    folder of one of its models, or a file in that."""
    wanted = json.loads(part.texts.get("config.json", "{}")).get("_class_name", "")
    for origin in (origin.absolute() for origin in part.origins):
        alike = [name for name, kind in pipeline_parts(origin).items() if kind == wanted]
        named = [name for name in (part.folder, part.component, part.part) if name in alike]
        # The parts of one component may be of one class: only their folders tell them apart.
        if named or (len(alike) == 1 and not part.part):
            return origin, (named or alike)[0]
        # A link is followed no further than its name: `transformer` in the pipeline's own folder.
        for folder in (origin, origin.parent):
            if pipeline_parts(folder.parent).get(folder.name) == wanted:
                return folder.parent, folder.name
    return None


def peft_layout(keys: KeyMap) -> AdapterLayout:
    """What PEFT writes, and loads into a model whose names are those of `keys`."""
    return AdapterLayout(
        PEFT_ADAPTER,
        "base_model.model.",
        keys,
        config="adapter_config.json",
        library="peft",
        loading='from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(model, "{folder}")',
    )


def only_pickled(folder: Path, names: Sequence[str]) -> CheckpointError:
    """The error for a folder whose weights are pickles alone."""
    return CheckpointError(
        f"the weights here are pickles, which can run code: {', '.join(names[:3])}",
        where=str(folder),
        accepted="safetensors files",
        hint="ask for the model as safetensors, or convert it in its own library, where you trust it",
    )


def wrapped_model(component: nn.Module, library: str, base: str) -> tuple[str, LibraryModel] | None:
    """(prefix of its names, model): the component itself where it is a model of `library`, or the only
    one in it, where that holds all its tensors. The library is not imported: nobody can hold a model of a
    library that was never imported."""
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
    """Python that loads the model; its class may be the library's, a package's or in the folder itself."""
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
    """A small JSON object of a folder that nobody vouches for; {} for anything else."""
    try:
        # A pipe under this name would be waited for for ever.
        if not path.is_file() or path.stat().st_size > 10_000_000:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

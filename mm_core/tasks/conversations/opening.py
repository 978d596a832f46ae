"""Opening the processor of a Transformers folder: its image processor, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mm_core.errors import CheckpointError, PluginError, TrustError, first_line
from mm_core.plugin.trust.remote_code import RemoteCode, code_folder
from mm_core.weights import read_mapping

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "config.json")


def open_processor(folder: str, trust_remote_code: RemoteCode = False) -> Any | None:
    """Opens the processor of a model that sees images; None if the folder has none.

    Without torchvision, most processors cannot be built, since no video processor can: such a processor is
    built with its image processor and tokenizer alone.

    Args:
        folder: of the model.
        trust_remote_code: whether the folder's Python files may run.

    Raises:
        CheckpointError: the processor cannot be built.
        TrustError: the folder's Python files are not the ones that were trusted.
    """
    import transformers
    from transformers import AutoProcessor

    if not any((Path(folder) / name).is_file() for name in _FILES[:2]):
        return None
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise CheckpointError(
            f"Transformers {transformers.__version__} does not show where a processor puts images in a text",
            where=folder,
            accepted="transformers>=5.0",
            hint="pip install -U transformers",
        )
    try:
        with code_folder(Path(folder), trust_remote_code) as place:
            options = {"local_files_only": True, "trust_remote_code": bool(trust_remote_code)}
            try:
                return AutoProcessor.from_pretrained(place, **options)
            except ImportError as fault:
                if "torchvision" not in str(fault).lower():
                    raise
                return _images_only(_class_of(place)).from_pretrained(place, **options)
    except TrustError:
        raise
    except Exception as fault:  # the error for files that cannot be parsed has no common class
        vision = "torchvision" in str(fault).lower()
        raise CheckpointError(
            f"the processor cannot be opened: {first_line(fault)}",
            where=folder,
            accepted="a folder that Transformers' AutoProcessor can open",
            hint="its image processor needs torchvision: pip install torchvision" if vision else None,
        ) from fault


def check_support() -> None:
    """Checks that the installed Transformers separates packed conversations.

    Raises:
        PluginError: packed conversations would attend to each other.
    """
    from transformers import __version__, masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        raise PluginError(
            f"Transformers {__version__} does not separate packed conversations",
            where="data.packing",
            accepted="transformers>=4.54",
            hint="pip install -U transformers, or set packing: false",
        )


def _class_of(folder: Path) -> type[Any]:
    """The processor's class, named in one of the folder's files, or that of the model's type."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    named = (read_mapping(folder / name).get("processor_class") for name in _FILES)
    name = next((each for each in named if isinstance(each, str)), None)
    found: type[Any] = (
        getattr(transformers, name) if name else PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder))]
    )
    return found


def _images_only(cls: type[Any]) -> type[Any]:
    """The processor class without its video processor, which torchvision alone can build."""
    from transformers import AutoImageProcessor, AutoTokenizer

    parts = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}

    class ImagesOnly(cls):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: object) -> object:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

        @classmethod
        def _get_arguments_from_pretrained(
            cls, folder: str, processor_dict: object = None, **options: object
        ) -> list[object]:
            names = cls.get_attributes()
            return [
                parts[name].from_pretrained(folder, **options) if name in parts else None for name in names
            ]

    ImagesOnly.__name__ = ImagesOnly.__qualname__ = cls.__name__
    return ImagesOnly

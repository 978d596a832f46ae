"""InternVL's class in Transformers, which from here on also makes sense of OpenGVLab's own folders.

Importing this module makes `internvl_chat` known to Transformers' `AutoConfig`: the config.json of an
`InternVLChatModel` becomes an `InternVLConfig`, and none of the folder's Python files is run. So
`auto_class: mm_internvl.model:InternVLForConditionalGeneration` takes both layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, InternVLConfig, InternVLForConditionalGeneration
from transformers import PretrainedConfig as _Config

from mm_internvl.opengvlab_config import MODEL_TYPE, from_original

__all__ = ["InternVLForConditionalGeneration", "OriginalConfig"]


class OriginalConfig(_Config):  # type: ignore[misc]  # mypy reads no types of Transformers
    """Reads config.json of `InternVLChatModel`. There are no objects of it: it makes an `InternVLConfig`."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The same model as an `InternVLConfig`. ContractError as of `from_original`."""
        name = kwargs.get("name_or_path") or config_dict.get("_name_or_path") or ""
        folder = Path(name) if name and Path(name).is_dir() else None
        return InternVLConfig.from_dict(from_original(config_dict, folder), **kwargs)


AutoConfig.register(MODEL_TYPE, OriginalConfig, exist_ok=True)

"""InternVL's class in Transformers, extended to read OpenGVLab's own folders.

Importing this module registers `internvl_chat` with Transformers' `AutoConfig`: the config.json of an
`InternVLChatModel` becomes an `InternVLConfig`, and none of the folder's Python files is executed. So
`auto_class: mm_internvl.model:InternVLForConditionalGeneration` accepts both layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, InternVLConfig, InternVLForConditionalGeneration
from transformers import PretrainedConfig as _Config

from mm_internvl.opengvlab_config import MODEL_TYPE, from_original

__all__ = ["InternVLForConditionalGeneration", "OriginalConfig"]


class OriginalConfig(_Config):  # type: ignore[misc]  # mypy reads no types of Transformers
    """Reads config.json of OpenGVLab's `InternVLChatModel`. It has no instances: it creates an
    `InternVLConfig`."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Converts config.json of `InternVLChatModel` to an `InternVLConfig` for the same model.

        Raises:
            ContractError: as for `from_original`.
        """
        name = kwargs.get("name_or_path") or config_dict.get("_name_or_path") or ""
        folder = Path(name) if name and Path(name).is_dir() else None
        return InternVLConfig.from_dict(from_original(config_dict, folder), **kwargs)


AutoConfig.register(MODEL_TYPE, OriginalConfig, exist_ok=True)

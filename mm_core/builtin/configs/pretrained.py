"""Config of the built-in task `pretrained`, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mm_core.schema.fields import InputPath, Range


@dataclass(frozen=True)
class PretrainedConfig:
    """Config of the task `pretrained`: training of any Transformers model with the model's own loss."""

    from_pretrained: InputPath  # the model's folder: config.json, safetensors and tokenizer files
    auto_class: str  # AutoModelForCausalLM or another class of Transformers; or module:Class
    weights: Literal["files", "random"] = "files"  # random: only config.json of the folder is read
    new_modules: tuple[str, ...] = ()  # patterns of modules missing in the files: they start at random
    labels: tuple[str, ...] = ()  # names of a classifier's classes, from 0; empty: as in config.json
    overrides: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json to change
    attn_implementation: str | None = None  # sdpa, packed_sdpa, flash_attention_2, ..; null: the library's
    loss: Literal["auto", "chunked", "plain"] = "auto"  # chunked: never stores the logits of all tokens
    chunk_tokens: Annotated[int, Range(ge=1)] = 512  # tokens per chunk of a chunked loss
    max_new_tokens: Annotated[int, Range(ge=1)] | None = None  # tokens that evaluations generate per answer
    trust_remote_code: bool | Literal["known"] = False  # true: Python files in the folder are run

    def __post_init__(self) -> None:
        if ":" not in self.auto_class and not self.auto_class.startswith("Auto"):
            raise ValueError(
                f"auto_class {self.auto_class!r} is neither an auto class of Transformers, e.g."
                " AutoModelForCausalLM, nor module:Class"
            )
        if repeated := sorted({name for name in self.labels if self.labels.count(name) > 1}):
            raise ValueError(f"labels: {repeated[0]!r} is listed twice; give each class its own name")
        if self.labels:
            if (count := self.overrides.get("num_labels", len(self.labels))) != len(self.labels):
                raise ValueError(
                    f"overrides: num_labels is {count}, but labels lists {len(self.labels)};"
                    " remove num_labels"
                )
            if named := sorted({"id2label", "label2id"} & self.overrides.keys()):
                raise ValueError(
                    f"overrides: labels already sets the names of the classes; remove {named[0]}"
                )

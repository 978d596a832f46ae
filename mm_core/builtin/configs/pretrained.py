"""Config of the built-in task `pretrained`: torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mm_core.schema.fields import Range


@dataclass(frozen=True)
class PretrainedConfig:
    """Training of any Transformers model with the model's own loss."""

    from_pretrained: str  # the model's folder: config.json and safetensors, tokenizer files beside them
    auto_class: str  # AutoModelForCausalLM, ... as Transformers has them; or module:Class
    weights: Literal["files", "random"] = "files"  # random: of the folder, only config.json is read
    new_modules: tuple[str, ...] = ()  # patterns of what begins at random: a head that the files lack
    labels: tuple[str, ...] = ()  # names of a classifier's classes, from 0; none: as config.json has them
    overrides: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json to change
    attn_implementation: str | None = None  # sdpa, packed_sdpa, flash_attention_2, ..; none: the library's
    loss: Literal["auto", "chunked", "plain"] = "auto"  # chunked: never holds the logits of all tokens
    chunk_tokens: Annotated[int, Range(ge=1)] = 512  # tokens whose logits a chunked loss holds at a time
    max_new_tokens: Annotated[int, Range(ge=1)] | None = None  # evaluations also answer, greedily, so long
    trust_remote_code: bool | Literal["known"] = False  # true: Python files of the folder are run

    def __post_init__(self) -> None:
        if ":" not in self.auto_class and not self.auto_class.startswith("Auto"):
            raise ValueError(
                f"auto_class {self.auto_class!r} is neither an auto class, such as AutoModelForCausalLM,"
                " nor module:Class"
            )
        if repeated := sorted({name for name in self.labels if self.labels.count(name) > 1}):
            raise ValueError(f"labels: {repeated[0]!r} is there twice")
        if self.labels:
            if (count := self.overrides.get("num_labels", len(self.labels))) != len(self.labels):
                raise ValueError(
                    f"overrides: num_labels is {count}, and labels names {len(self.labels)} classes;"
                    " leave num_labels out"
                )
            if named := sorted({"id2label", "label2id"} & self.overrides.keys()):
                raise ValueError(f"overrides: labels names the classes already; leave {named[0]} out")

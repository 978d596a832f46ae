"""Building blocks of config dataclasses, without torch: component references, ranges, dtype names."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from mm_core.errors import PluginError, did_you_mean

_DTYPES = {
    "bf16": ("bf16", "bfloat16", "brain"),
    "fp16": ("fp16", "float16", "half", "f16", "16"),
    "fp32": ("fp32", "float32", "float", "single", "full", "f32", "32"),
}
"""Our name of a dtype -> its names elsewhere."""

_KEYS = {
    "from_pretrained": (
        *("model", "model_id", "model_name", "model_path", "repo_id"),
        *("model_name_or_path", "name_or_path", "pretrained_model_name_or_path"),
    ),
    "type": ("name", "model_id", "class_name", "_class_name", "target", "_target_"),
    "lr": ("learning_rate",),
    "steps": ("max_steps", "max_train_steps", "num_steps", "iterations"),
    "epochs": ("num_epochs", "max_epochs", "num_train_epochs", "max_train_epochs"),
    "micro_batch_size": ("batch_size", "train_batch_size", "per_device_train_batch_size"),
    "clip_grad_norm": ("max_grad_norm", "gradient_clip_val", "clip_grad"),
    "adapters": ("lora", "lora_rank", "lora_alpha", "network_dim", "network_alpha", "network_module"),
}
"""Our name of a key -> its names elsewhere."""


def key_hint(word: str, known: Collection[str]) -> str | None:
    """The hint for an unknown key: ours of the same meaning, or of a similar name; None: there is none.

    Args:
        word: the unknown key.
        known: the keys that a section takes.
    """
    ours = next((ours for ours, others in _KEYS.items() if word in others and ours in known), None)
    return did_you_mean(word, known) if ours is None else f"this key is {ours!r} here"


def part_hint(word: str, value: object) -> str | None:
    """The hint for a key of a component without `type`, whose name elsewhere it may be; None: it is none.

    A `model_id` is a type in MindSpeed-MM, and with a slash a name on the hub.
    """
    known = ("type",) if word == "model_id" and "/" not in str(value) else ("from_pretrained", "type")
    found = key_hint(word, known)
    return f"{word!r}: {found}" if found else None


def yaml_key(name: str) -> str:
    """The YAML key of a typed field: the field `async_` has the key `async`, a reserved word in Python."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


DType = Literal["fp32", "bf16", "fp16"]
"""Names of floating-point dtypes in a YAML."""


def dtype_hint(word: str, choices: Sequence[str]) -> str | None:
    """A hint for a dtype name that the type check does not accept; None if the field is not a dtype.

    Names of dtypes resemble each other, so the most similar name is often a different dtype.

    Args:
        word: what was written.
        choices: the accepted names.
    """
    if not set(choices) & _DTYPES.keys():
        return None
    plain = word.strip().lower().removeprefix("torch.")
    meant = next((name for name, others in _DTYPES.items() if plain in others), None)
    if meant in choices:
        return f"did you mean {meant!r}?"
    return f"{meant} is not supported here" if meant is not None else None


@dataclass(frozen=True)
class Kind:
    """Marks a typed field as a component of a kind: `Annotated[ComponentConfig, Kind("predictor")]`."""

    name: str


@dataclass(frozen=True)
class Range:
    """Bounds of a number in a typed field: `Annotated[int, Range(ge=1)]`. Unset bounds are open.

    A float field takes finite numbers only, except where `infinite` is true or its default is infinite.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    infinite: bool = False

    def __str__(self) -> str:
        signs = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        words = " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)
        return f"{words} or infinite".strip() if self.infinite else words

    def admits(self, value: float) -> bool:
        """Whether a checked number is within the bounds of its field."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


Verdict = Literal["safe", "allow", "refused"]
"""Whether a run may resume after a change: always, with `--allow KEY`, or never."""


@dataclass(frozen=True)
class Resume:
    """Marks a typed field with the verdict on its change when a run resumes, and the reason that is shown:
    `Annotated[int, Resume("safe", "changes the speed")]`.

    Raises:
        PluginError: there is no such verdict.
    """

    verdict: Verdict
    why: str

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict):
            accepted = ", ".join(get_args(Verdict))
            raise PluginError(f"a mark Resume has the verdict {self.verdict!r}", accepted=accepted)


@dataclass(frozen=True)
class Reads:
    """The mark of an `InputPath`."""


@dataclass(frozen=True)
class FromTask:
    """The mark of a dataset's field that is the value of a key of the task where the config leaves it out.

    Attributes:
        key: of the task's options.
    """

    key: str


InputPath = Annotated[str, Reads()]
"""The type of a field with the path of a file or folder that the run reads. While nothing is there,
`mm validate` and `--dry-run` list it as missing."""

Scale = Annotated[float, Range(ge=0)]
Guidance = Scale | tuple[Scale, ...]
"""A scale of classifier-free guidance, or one per expert of the predictor, from noise to clean."""


@dataclass(frozen=True)
class ComponentConfig:
    """A checked reference to a component: a YAML mapping with `type:` after checking.

    Attributes:
        kind: the kind of component, e.g. `optimizer`.
        type: the qualified name, e.g. `core/adamw`.
        options: one value per field of the component's config, with defaults filled in; nested components are
            ComponentConfigs too.
        derived: names of options that another setting filled in, such as a folder for all parts of a task; a
            stored config leaves them out, so that a change of that setting still reaches them.
    """

    kind: str
    type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    derived: tuple[str, ...] = ()  # not stored

"""The adapters of a run as plain values in its checkpoints: their modules, ranks and scales.

So a resumed run does not need the files that its adapters started from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import TaskModule
from mm_core.errors import CheckpointError
from mm_core.weights.adapters.files import AdapterScale
from mm_core.weights.adapters.inject import Structure, scales_of
from mm_core.weights.adapters.kinds import PEFT_TYPES


def record_of(task: TaskModule, adapters: Sequence[AdapterConfig]) -> list[dict[str, object]]:
    """The record of a task's adapters (LoRA, DoRA) for a checkpoint: one row per adapter, in config order.

    Args:
        task: with its adapters in place.
        adapters: adapter sections of the config.

    Returns:
        Rows with name, train, dropout, and `layers`: rank, alpha, dora, rslora, kind (LoRA if absent),
        blocks (sizes of a LoKr's matrices; the nearest factors if absent) and the `modules` (paths in the
        task) that share these.
    """
    roots = task.trainable
    found = {root: scales_of(task.get_submodule(root)) for root in roots}
    rows: list[dict[str, object]] = []
    for adapter in adapters:
        layers: dict[AdapterScale, list[str]] = {}
        for root in roots:
            for module, scale in found[root].get(adapter.name, {}).items():
                layers.setdefault(scale, []).append(f"{root}.{module}")
        alike = [{**_values(scale), "modules": modules} for scale, modules in layers.items()]
        own = {"name": adapter.name, "train": adapter.train, "dropout": adapter.dropout}
        rows.append({**own, "layers": alike})
    return rows


def _values(scale: AdapterScale) -> dict[str, object]:
    values = asdict(scale)
    if scale.kind == "lora":
        del values["kind"]  # as in older checkpoints, which a resume compares with this
    if scale.blocks is None:
        del values["blocks"]
    return values


def structure_in(rows: Any, where: Path) -> Structure:
    """Reads the record of adapters in a checkpoint (`record_of`) for `add_adapters`; {} without adapters.

    Raises:
        CheckpointError: values that `record_of` does not write.
    """
    found: dict[str, Mapping[str, AdapterScale]] = {}
    try:
        for row in rows or ():
            held: dict[str, AdapterScale] = {}
            for layer in row["layers"]:
                rank, alpha = _whole(layer["rank"]), float(layer["alpha"])
                kind = layer.get("kind", "lora")  # older checkpoints have LoRAs only
                if kind not in PEFT_TYPES:
                    raise ValueError(f"{kind!r} is no kind of adapter")
                sizes = layer.get("blocks")
                a, b, c, d = map(_whole, sizes or (1, 1, 1, 1))
                blocks = None if sizes is None else (a, b, c, d)
                scale = AdapterScale(
                    rank, alpha, layer["dora"] is True, layer["rslora"] is True, kind, blocks
                )
                held |= dict.fromkeys(map(str, layer["modules"]), scale)
            found[str(row["name"])] = held
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise CheckpointError(
            "this checkpoint's record of its adapters cannot be read",
            where=str(where),
            hint="load it with the version of mm-core that wrote it, or a newer one",
        ) from None
    return found


def _whole(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a rank")
    return value

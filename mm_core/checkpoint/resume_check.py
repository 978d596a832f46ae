"""What has changed since a checkpoint was saved, and whether the run may still resume from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mm_core.checkpoint.files.layout import Document
from mm_core.errors import CheckpointError, plural
from mm_core.schema.fields import Resume, Verdict
from mm_core.schema.nodes import leaves

_NONE: Mapping[str, Resume] = MappingProxyType({})

_RATE = "changes what is learned"
_ORDER = "changes which samples come when"
_SPEED = "changes speed, memory or what is shown"
_STATE = "the saved state does not fit; init_from loads the weights only"
_RULES: Mapping[str, tuple[Verdict, str]] = {
    "config": ("allow", _RATE),
    "config.run.name": ("safe", _SPEED),
    "config.run.dir": ("safe", _SPEED),
    "config.run.stuck_after": ("safe", _SPEED),
    "config.run.deterministic": ("safe", "changes results by rounding alone"),
    "config.run.float32_matmul": ("safe", "changes results by rounding alone"),
    "config.task.type": ("refused", _STATE),
    "config.task.predictor.type": ("refused", _STATE),
    "config.task.sample": ("safe", _SPEED),
    "config.task.trust_remote_code": ("safe", "which code may run"),
    "config.task.max_new_tokens": ("safe", "changes only answers in evaluations"),
    "config.data.train": ("allow", _ORDER),
    "config.data.train.trust_remote_code": ("safe", "which code may run"),
    "config.data.train.annotations": ("safe", "its fingerprint is compared instead"),
    "config.data.train.file": ("safe", "its fingerprint is compared instead"),
    "config.data.train.tokenizer": ("allow", _RATE),
    "config.data.train.folder": ("safe", "a path; the videos are assumed to be the same"),
    "config.data.train.reader": ("safe", "changes pixels by rounding alone"),
    "config.data.validation": ("safe", "held-out data does not affect training"),
    "config.data.test": ("safe", "held-out data does not affect training"),
    "config.data.cache": ("safe", "the features are the same"),
    "config.data.cache.variants": ("allow", _ORDER),
    "config.data.loader": ("safe", _SPEED),
    "config.data.loader.mode": ("allow", _ORDER),
    "config.data.loader.sampler": ("allow", _ORDER),
    "config.data.loader.buckets": ("allow", _ORDER),
    "config.data.loader.buckets_per_step": ("allow", _ORDER),
    "config.data.loader.rests": ("allow", _ORDER),
    "config.data.loader.upscale": ("allow", _ORDER),
    "config.data.loader.group_frame": ("allow", _ORDER),
    "config.data.loader.group_resolution": ("allow", _ORDER),
    "config.data.loader.drop_last": ("allow", _ORDER),
    "config.data.loader.group_by_length": ("allow", _ORDER),
    "config.train.steps": ("safe", "a schedule that decays is computed for the new length"),
    "config.train.epochs": ("safe", "a schedule that decays is computed for the new length"),
    "config.train.micro_batch_size": ("safe", "the global batch is unchanged; dropout draws other masks"),
    "config.train.global_batch_size": ("allow", _ORDER),
    "config.train.freeze": ("refused", _STATE),
    "config.train.also_train": ("refused", _STATE),
    "config.train.adapters": ("allow", "adapters may be scaled differently; new targets have no saved state"),
    "config.train.non_finite": ("safe", "updates are unchanged; only when the run ends changes"),
    "config.train.base_dtype": ("allow", "changes the precision"),
    "config.engine.type": ("safe", "states are loaded by name, and other names are refused"),
    "config.optimizer.type": ("refused", _STATE),
    "config.init_from": ("safe", "a resumed run loads its own weights"),
    "config.ema.device": ("safe", _SPEED),
    "config.validation": ("safe", _SPEED),
    "config.checkpoint": ("safe", _SPEED),
    "config.log": ("safe", _SPEED),
    "config.profile": ("safe", _SPEED),
    "config.callbacks": ("safe", "callbacks change nothing"),
    "config.plugins": ("safe", "the components' versions are compared instead"),
    "hub": ("safe", "its names are compared in the config"),
    "plugins": ("allow", "another version may compute different results"),
    "plugins.mm-core": ("safe", "see its changelog"),
    "data": ("safe", "held-out data does not affect training"),
    "data.train": ("allow", "the samples are not the same"),
    "devices": ("safe", "changes results by rounding alone"),
    "versions": ("safe", "changes results by rounding alone"),
    "libraries": ("safe", "may compute different results: see its changelog"),
    "world": ("safe", "the global batch is unchanged"),
}
"""Prefix of a manifest key -> verdict and reason; the longest matching prefix applies. The mark of a config's
field replaces its rule."""


@dataclass(frozen=True)
class ResumeDifference:
    """One change of the run since its checkpoint was saved: the key, both values, verdict and reason."""

    key: str
    before: object
    after: object
    verdict: Verdict
    why: str


def differences_of(
    before: Document, after: Document, marks: Mapping[str, Resume] = _NONE
) -> list[ResumeDifference]:
    """The differences between a checkpoint's manifest and the current run's, the most important first.

    A key that only one manifest has is not a difference, since versions add keys; a section that was switched
    on or off is one.

    Args:
        before: the manifest in the checkpoint (see `run_manifest`).
        after: the manifest of the run as it is now.
        marks: of the fields of the run's config, from `resume_marks`.
    """
    resolved = all(manifest.get("adapters") for manifest in (before, after))
    old, new = (dict(leaves(_by_name(manifest, resolved))) for manifest in (before, after))
    keys = [key for key in old if key in new and not _same(old[key], new[key])]
    for here, there in ((old, new), (new, old)):
        keys += [
            key for key, value in here.items()
            if value is None and key not in there and any(other.startswith(f"{key}.") for other in there)
        ]  # fmt: skip
    differences = []
    for key in keys:
        verdict, why = rule(key, marks)
        if key == "config.train.micro_batch_size" and new.get("config.data.loader.mode") == "variable":
            verdict, why = "allow", _ORDER  # it decides how many samples a step of buckets has
        shown = key.removeprefix("config.")
        absent = "on" if key not in old or key not in new else None
        differences.append(ResumeDifference(shown, old.get(key, absent), new.get(key, absent), verdict, why))
    differences += [*_unknown_data(before, after), *_environment(before, after, marks)]
    order = ("refused", "allow", "safe")
    return sorted(differences, key=lambda found: (order.index(found.verdict), found.key))


def _unknown_data(before: Document, after: Document) -> list[ResumeDifference]:
    """Training data of a run whose checkpoint was made without data, by `mm import`."""
    known, now = before.get("data"), after.get("data", {}).get("train")
    if known is None or "train" in known or now is None:
        return []
    why = "the checkpoint was made without data"
    return [ResumeDifference("data.train", "not known", plural(now.get("rows", 0), "row"), "safe", why)]


def _environment(before: Document, after: Document, marks: Mapping[str, Resume]) -> list[ResumeDifference]:
    """Keys that name the same environment variable as before, whose value has changed."""
    old, new = (manifest.get("environment", {}) for manifest in (before, after))
    return [
        ResumeDifference(key, "from the environment", "another value", *rule(f"config.{key}", marks))
        for key in old
        if key in new and old[key] != new[key]
    ]


def rule(key: str, marks: Mapping[str, Resume] = _NONE) -> tuple[Verdict, str]:
    """Verdict and reason for a changed manifest key: whether a run with this change may resume.

    Args:
        key: the manifest key.
        marks: of the fields of the run's config, from `resume_marks`.
    """
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        if parts[0] == "config" and (mark := marks.get(".".join(parts[1:count]))) is not None:
            return mark.verdict, mark.why
        if (found := _RULES.get(".".join(parts[:count]))) is not None:
            return found
    return "allow", "no rule for this key"


def check_resume(
    before: Document,
    after: Document,
    allow: Sequence[str] = (),
    *,
    marks: Mapping[str, Resume] = _NONE,
    report: bool = True,
) -> list[str]:
    """Checks whether a changed run may resume from its checkpoint; returns lines about safe changes.

    Args:
        before: the manifest in the checkpoint.
        after: the manifest of the run as it is now.
        allow: keys, prefixes of keys, or `all`: changes that are intended.
        marks: of the fields of the run's config, from `resume_marks`.
        report: whether to return the lines; [] otherwise, and if nothing has changed.

    Raises:
        CheckpointError: a change is refused or needs `--allow`; the message contains the table of changes.
    """
    if not before:
        return (
            ["the checkpoint has no manifest: changes since it was saved were not checked"] if report else []
        )
    differences = differences_of(before, after, marks)
    refused = [found for found in differences if found.verdict == "refused"]
    unmet = [found for found in differences if found.verdict == "allow" and not allowed(found.key, allow)]
    table = render_table(differences)
    if refused or unmet:
        flags = " ".join(f"--allow {found.key}" for found in unmet)
        hints = [
            *(["choose another run.name, with init_from to load the weights only"] if refused else []),
            *([f"if the change is intended, add {flags}"] if unmet and not refused else []),
        ]
        keys = ", ".join(found.key for found in (*refused, *unmet))
        raise CheckpointError(
            f"the run has changed since the checkpoint: {keys}\n{table}", hint="; ".join(hints)
        )
    return ["changed since the checkpoint:", *table.splitlines()] if report and differences else []


def allowed(key: str, allow: Sequence[str]) -> bool:
    """Whether `--allow` names the changed manifest key, a section that contains it, or `all`."""
    return any(given == "all" or key == given or key.startswith(f"{given}.") for given in allow)


def render_table(differences: Sequence[ResumeDifference]) -> str:
    """A table of the changes since the checkpoint, one line per change, in columns."""
    verdicts = {"allow": "needs --allow", "refused": "refused", "safe": "safe"}
    rows = [
        (found.key, f"{_short(found.before)} -> {_short(found.after)}", verdicts[found.verdict], found.why)
        for found in differences
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def _by_name(manifest: Document, resolved: bool) -> Document:
    """The manifest with its list of components replaced by versions by distribution, independent of order.

    Args:
        manifest: the manifest of a run or checkpoint.
        resolved: compare adapters by the layers that they are on, not by the patterns in the config.
    """
    versions = {str(row.get("distribution")): row.get("version") for row in manifest.get("plugins", ())}
    known = ("config", "data", "devices", "versions", "libraries", "world")
    found = {**{key: manifest[key] for key in known if key in manifest}, "plugins": versions}
    if resolved:
        config = manifest.get("config", {})
        train = {**config.get("train", {}), "adapters": manifest["adapters"]}
        found["config"] = {**config, "train": train}
    return found


def _same(one: object, other: object) -> bool:
    return bool(one == other) or json.dumps(one) == json.dumps(other)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

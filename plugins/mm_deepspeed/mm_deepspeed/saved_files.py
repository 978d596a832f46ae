"""Files of a DeepSpeed folder that one `save_checkpoint` wrote, apart from what earlier ones left there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mm_core.errors import CheckpointError
from mm_core.weights import load_tensors

MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_(\d+)_optim_states\.pt")
_OTHER = re.compile(r"(?:layer_\d+|expp_rank_\d+|expert_\d+_mp_rank_).*\.pt")  # pipeline stages, experts
_PARTS = "zero_pp_rank_0_mp_rank_00_"
_FIRST_MODEL = ("mp_rank_00_model_states.pt", f"{_PARTS}model_states.pt")
_FIRST_OPTIMIZER = (f"{_PARTS}optim_states.pt", f"bf16_{_PARTS}optim_states.pt")
_FORM = "a folder global_stepN as save_checkpoint of DeepSpeed 0.19 writes it, or its parent"
MIXED = "copy the files of one save into a folder of their own"
_ALIKE = ("global_steps", "skipped_steps", "global_samples", "dp_world_size", "param_shapes")
"""What the model states of all ranks record alike."""


class _StandIn:
    """Takes the place of a class of DeepSpeed in a pickle and does nothing but hold its arguments."""

    def __init__(self, *args: object) -> None:
        self.args = args


_STAND_INS = {
    f"deepspeed.{name}": _StandIn
    for name in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
}


@dataclass(frozen=True)
class Saved:
    """What the files of one save contain.

    Attributes:
        stage: of ZeRO; 0 where the model states contain all weights, and there are no masters.
        models: model states, of each rank at stage 3, else of rank 0.
        optimizers: optimizer states of each rank; none at stage 0.
        steps: those that the model states record without skipped ones, and those that the optimizer took;
            None where one of them is not recorded.
    """

    stage: int
    models: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]
    steps: tuple[float, float] | None


def refused(folder: Path, what: str, hint: str = MIXED) -> CheckpointError:
    """The error for a folder of DeepSpeed that cannot be read."""
    return CheckpointError(what, where=str(folder), accepted=_FORM, hint=hint)


def read_saved(folder: Path) -> Saved:
    """Reads the files of one save. Files of further ranks, which a save of more ranks left, are not read.

    Raises:
        CheckpointError: a file is missing or damaged; files of two saves are mixed; or the model is split by
            tensors, pipeline stages or experts.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        match = MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if _OTHER.fullmatch(name) or (match and int(match[1])):
            raise _split(folder, name)
    first = _first(folder, names, MODEL, _FIRST_MODEL, "model")
    if first is None:
        raise refused(folder, "there are no model states of DeepSpeed here", "")
    model = _mapping(load_tensors(first, _STAND_INS))
    others = model.get("checkpoint_parallel_dimensions") or {}
    if any(size not in (None, 1) for size in (model.get("mp_world_size"), *others.values())):
        raise _split(folder, f"{first.name} is one part of it")
    if model.get("num_experts") or model.get("ds_autoep_layers"):
        raise _split(folder, f"{first.name} has no experts")
    optimizer = _first(folder, names, _OPTIMIZER, _FIRST_OPTIMIZER, "optimizer")
    if model.get("param_shapes") is None:
        if optimizer:
            raise refused(folder, f"{first.name} was saved without ZeRO, but {optimizer.name} with it")
        return Saved(0, [model], [], None)
    if optimizer is None:
        raise refused(folder, "the files of optimizer states are missing", "copy all files of the folder")
    return _of_ranks(folder, first, model, optimizer)


def _of_ranks(folder: Path, first: Path, model: Mapping[str, Any], optimizer: Path) -> Saved:
    """The states of all ranks of a save with ZeRO, by the files of its rank 0."""
    own = _optimizer_states(optimizer)
    stage, world = _stage(optimizer, own), _world(optimizer, own)
    parts = first.name.startswith("zero")
    if parts != (stage == 3):
        raise refused(folder, f"{first.name} is not of ZeRO {stage}, but {optimizer.name} is")
    optimizers = _complete(optimizer, world, "optimizer")
    models = _complete(first, world, "model") if parts else [first]
    states = [model, *(_mapping(load_tensors(path, _STAND_INS)) for path in models[1:])]
    loaded = [own, *(_optimizer_states(path) for path in optimizers[1:])]
    facts = [
        {"partition_count": _world(path, found), "zero_stage": _stage(path, found), **_taken(found)}
        for path, found in zip(optimizers, loaded, strict=True)
    ]
    _check_alike(optimizers, facts)
    _check_alike(models, [{key: state.get(key) for key in _ALIKE} for state in states])
    if model.get("dp_world_size", world) != world:
        ranks = [{"number of ranks": world}, {"number of ranks": model["dp_world_size"]}]
        _check_alike([optimizer, first], ranks)
    steps, counted = facts[0]["step"], model.get("global_steps")
    known = steps is not None and counted is not None
    return Saved(stage, states, loaded, (counted - model.get("skipped_steps", 0), steps) if known else None)


def _first(
    folder: Path, names: Sequence[str], pattern: re.Pattern[str], firsts: Sequence[str], kind: str
) -> Path | None:
    """The file of rank 0, None where no rank has one. CheckpointError for those of two kinds of run."""
    found = [name for name in firsts if name in names]
    if len(found) > 1:
        raise refused(folder, f"files of two saves are mixed: {found[0]} and {found[1]}")
    if not found and any(pattern.fullmatch(name) for name in names):
        raise _missing(folder, f"the {kind} states of rank 0")
    return folder / found[0] if found else None


def _complete(first: Path, world: int, kind: str) -> list[Path]:
    """The files of all ranks, named like that of rank 0."""
    found = []
    for rank in range(world):  # ends at the first that is missing, whatever the file's number of ranks is
        path = first.with_name(first.name.replace("pp_rank_0_", f"pp_rank_{rank}_"))
        if not path.is_file():
            raise _missing(first.parent, f"the {kind} states of rank {rank} of {world}")
        found.append(path)
    return found


def _check_alike(paths: Sequence[Path], facts: Sequence[Mapping[str, Any]]) -> None:
    """CheckpointError where ranks record different things of what is the same in one save."""
    for path, other in zip(paths[1:], facts[1:], strict=True):
        for key, value in facts[0].items():
            if other[key] != value:
                both = f"{key} is {_short(value)} in {paths[0].name} and {_short(other[key])} in {path.name}"
                raise refused(path.parent, f"files of two saves are mixed: {both}")


def _optimizer_states(path: Path) -> Mapping[str, Any]:
    return _mapping(_mapping(load_tensors(path, _STAND_INS))["optimizer_state_dict"])


def _stage(path: Path, state: Mapping[str, Any]) -> int:
    stage = state.get("zero_stage", 1)  # files bf16_* of stage 1 do not name it
    stage = stage.args[0] if isinstance(stage, _StandIn) else stage
    if type(stage) is not int or stage not in (1, 2, 3):
        raise refused(path, f"zero_stage is {_short(stage)}, not 1, 2 or 3", "copy the file again")
    return stage


def _world(path: Path, state: Mapping[str, Any]) -> int:
    """Number of ranks between which the optimizer's states are divided."""
    count = state["partition_count"]
    counts = count if isinstance(count, (list, tuple)) else [count]
    if not counts or any(type(each) is not int or each < 1 for each in counts):
        raise refused(
            path, f"partition_count is {_short(count)}, not a number of ranks", "copy the file again"
        )
    if len(set(counts)) > 1:
        raise _split(path, f"partition_count is {_short(count)}")
    return int(counts[0])


def _taken(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer records of its steps, alike on all ranks: their number, and the options of groups."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups = list(base.get("param_groups", ())) if isinstance(base, Mapping) else []
    states = base.get("state", {}).values() if isinstance(base, Mapping) else base or ()
    counts = list(_steps([state, *groups, *states]))
    options = [
        {key: value for key, value in group.items() if type(value) in (int, float)} for group in groups
    ]
    return {"step": max(counts, default=None), "param_groups": options}


def _steps(states: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    for key in ("step", "base_optimizer_state_step"):
        for found in (state[key] for state in states if isinstance(state, Mapping) and key in state):
            yield float(found.item() if isinstance(found, torch.Tensor) else found)


def _mapping(found: object) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"a {type(found).__name__} in place of a mapping")
    return found


def _split(where: Path, why: str) -> CheckpointError:
    what = f"the model is split by tensors, pipeline stages or experts: {why}"
    return refused(
        where, what, "join its parts with the program that trained it, and save them as safetensors"
    )


def _missing(where: Path, what: str) -> CheckpointError:
    return refused(
        where, f"{what} are missing", "copy the files of all ranks, also those that other machines wrote"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

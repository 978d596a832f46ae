"""What ranks share, and what that takes: communication by kind and link, checkpoints, the start of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mm_core.config.sections import RunConfig
from mm_core.device.machines import Machine, size_text
from mm_core.errors import plural
from mm_core.plan import RunPlan
from mm_core.plan.planning import state_tensors
from mm_core.training.forecast.calibration import Factors
from mm_core.training.forecast.meter import Work
from mm_core.training.forecast.seconds import COMPILED, of_call, published, sent_bytes

STORAGE = 2e9
"""Bytes a second that a host reads from shared storage, or writes there."""

PROCESS, JOINING = 20.0, 0.02
"""Seconds that a host's processes take to import their libraries, and, for each rank, to find the others."""

_BESIDE = 5  # files of a checkpoint that no rank but the first writes: checksums, facts, config, ...
_KINDS = {
    "gather": "all-gather",
    "scatter": "reduce-scatter",
    "reduce": "all-reduce",
    "alltoall": "all-to-all",
}


@dataclass(frozen=True)
class Sent:
    """What a rank sends in a step.

    Attributes:
        kind: of the collectives.
        link: `link` between the devices of a host, `network` also between hosts.
        bytes: that leave the rank.
        seconds: that they take, whether hidden or not; 0: the device's speed is not known.
    """

    kind: str
    link: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
        bytes: in all.
        files: their largest number.
        rank_bytes: of a rank's share of the training state, which it copies to the host if it saves in the
            background.
        waits: seconds that training stops for.
        writes: seconds until the checkpoint is complete.
    """

    bytes: int
    files: int
    rank_bytes: int
    waits: float
    writes: float


@dataclass(frozen=True)
class Scale:
    """What the ranks of a run share.

    Attributes:
        sent: by kind and link, that of the most seconds first.
        busy: seconds of a step that each part is busy, that which limits it first; empty: unknown.
        checkpoint: of any step but the first.
        start: seconds before the first step, by what takes them; empty for one rank.
    """

    sent: tuple[Sent, ...]
    busy: dict[str, float]
    checkpoint: Saved
    start: dict[str, float]

    def render(self) -> list[str]:
        """As text."""
        lines = []
        for each in self.sent:
            if each.bytes < 1 << 20:
                continue
            where = "between hosts" if each.link == "network" else "within a host"
            taken = f", {each.seconds:.3g} s" if each.seconds else ""
            lines.append(f"  a rank sends {size_text(each.bytes)} by {each.kind} {where}{taken}")
        if self.busy:
            (first, most), *others = self.busy.items()
            rest = "".join(f", {name} {seconds:.3g} s" for name, seconds in others)
            lines.append(f"  limited by {first}, busy for {most:.3g} s{rest}")
        saved = self.checkpoint
        lines.append(
            f"a checkpoint: {size_text(saved.bytes)} in {plural(saved.files, 'file')},"
            f" {size_text(saved.rank_bytes)} a rank; training waits {saved.waits:.2g} s, it is complete"
            f" after {saved.writes:.3g} s"
        )
        if self.start:
            parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.start.items())
            lines.append(f"the start takes about {sum(self.start.values()):.0f} s: {parts}")
        return lines


def scale_of(
    config: RunConfig,
    plan: RunPlan,
    machine: Machine,
    step: Mapping[Work, float],
    factors: Factors | None = None,
) -> Scale:
    """What the ranks of a run share on a machine.

    Args:
        config: the run's.
        plan: of the run.
        machine: runs it.
        step: how often each operator of a step runs; empty: unknown.
        factors: what was measured for the device.
    """
    timed = bool(step) and (machine.device.timed or factors is not None)
    sent: dict[tuple[str, str], tuple[float, float]] = {}
    for work, count in step.items():
        if work.kind == "communication" and work.group > 1:
            kind = next((text for part, text in _KINDS.items() if part in work.name), work.name)
            link = "link" if work.span <= machine.ranks else "network"
            size, seconds = sent.get((kind, link), (0.0, 0.0))
            taken = of_call(work, machine, factors) if timed else 0.0
            sent[kind, link] = size + count * sent_bytes(work), seconds + count * taken
    rows = [Sent(*key, round(size), seconds) for key, (size, seconds) in sent.items()]
    rows.sort(key=lambda each: (-each.seconds, -each.bytes))
    busy = _busy(step, rows, plan, machine, factors) if timed else {}
    return Scale(tuple(rows), busy, _saved(config, plan, machine), _start(plan, machine))


def _busy(
    step: Mapping[Work, float],
    sent: Sequence[Sent],
    plan: RunPlan,
    machine: Machine,
    factors: Factors | None,
) -> dict[str, float]:
    """Seconds that each part is busy, that which limits a step first: the device does one thing after the
    other, and so do the links, beside it."""
    compiled = getattr(plan.engine, "compiled", ())
    device = dict.fromkeys(("compute", "memory"), 0.0)
    for work, count in step.items():
        if work.kind != "communication":
            share = COMPILED if compiled and work.kind == "elementwise" else 1.0
            flops = published(work, machine.device) > published(work._replace(flops=0), machine.device)
            device["compute" if flops else "memory"] += count * share * of_call(work, machine, factors)
    links = {name: sum(each.seconds for each in sent if each.link == name) for name in ("link", "network")}
    host = sum(step.values()) * (machine.device.call if factors is None else factors.call)
    groups = sorted((device, links, {"host": host}), key=lambda group: -sum(group.values()))
    found = [own for group in groups for own in sorted(group.items(), key=lambda own: -own[1])]
    return {name: seconds for name, seconds in found if seconds}


def _saved(config: RunConfig, plan: RunPlan, machine: Machine) -> Saved:
    engine, section = plan.engine, config.checkpoint
    own = [module for module in plan.modules if module.trainable]
    trained = sum(module.trained for module in own)
    whole = section.frozen or (section.frozen is None and not config.train.adapters)
    stored = sum(module.parameters for module in own) if whole else trained
    size = round(4 * (stored + trained * (state_tensors(config) + bool(plan.ema_bytes))))
    share = engine.parameter_bytes + engine.optimizer_bytes + plan.ema_bytes
    copied = share / machine.device.to_host if machine.device.to_host else 0.0
    written = size / machine.hosts / STORAGE
    waits = copied if section.async_ else written
    return Saved(size, engine.world + _BESIDE, share, waits, copied * section.async_ + written)


def _start(plan: RunPlan, machine: Machine) -> dict[str, float]:
    """Each rank reads its shards; what all ranks have whole, a host reads once."""
    engine = plan.engine
    if engine.world == 1:
        return {}
    shards = engine.world // engine.mesh.get("replicate", 1)
    here = min(machine.ranks, shards)
    trained = sum(module.parameters for module in plan.modules if module.trainable)
    size = 4 * trained * here / shards
    for part in engine.frozen:
        size += (part.device_bytes + part.host_bytes) * (here if part.placement == "sharded" else 1)
    return {"processes": PROCESS, "ranks": JOINING * engine.world, "weights": size / STORAGE}

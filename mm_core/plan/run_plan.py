"""The plan of a run as data, and as `mm-train --dry-run` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mm_core.contracts import EnginePlan, StepFlops
from mm_core.errors import plural
from mm_core.plan.bucketing import BucketFact
from mm_core.plan.model_states import StageBytes, table


@dataclass(frozen=True)
class ComponentFact:
    """One component in the plan of a run: its place in the config, and the package that provides it."""

    key: str  # key path in the config
    type: str
    distribution: str
    version: str


@dataclass(frozen=True)
class ModuleFact:
    """One sub-module of the task in the plan of a run."""

    name: str
    trainable: bool
    parameters: int  # number of elements; 0 for a frozen module whose size is not known yet
    trained: int  # number of elements that the optimizer changes


@dataclass(frozen=True)
class MissingFile:
    """A file or folder in the plan of a run that does not exist."""

    path: str
    component: str  # the task's component, or the dataset, that names it: data.train
    needed: Literal["to train", "to begin", "to sample"]

    @property
    def of_weights(self) -> bool:
        """Whether it contains weights, without which a component can be built from the config beside them."""
        return self.path.endswith(".safetensors") and Path(self.path).with_name("config.json").is_file()

    @property
    def of_data(self) -> bool:
        """Whether a dataset names the file."""
        return self.component.startswith("data.")


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run for a number of ranks. Sizes are in samples; bytes are any rank's largest share."""

    name: str
    engine: EnginePlan
    components: tuple[ComponentFact, ...]
    modules: tuple[ModuleFact, ...]
    steps: int  # 0: unknown while the data are missing
    micro_batch_size: int
    global_batch_size: int
    accumulation: int
    model_states: tuple[StageBytes, ...] = ()
    ema_bytes: int = 0
    ema_on_host: bool = False
    buckets: tuple[BucketFact, ...] = ()  # of the loader's mode `variable`, the largest first
    flops: StepFlops | None = None  # of one step over all ranks; None: unknown
    missing: tuple[MissingFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """The types of the task and its components."""
        return " ".join(each.type for each in self.components if each.key.split(".")[0] == "task")

    @property
    def missing_files(self) -> tuple[str, ...]:
        """The paths of all missing files that the planned run needs."""
        return tuple(file.path for file in self.missing)

    @property
    def files_to_start(self) -> tuple[str, ...]:
        """The paths of the missing files without which the run does not start."""
        return tuple(file.path for file in self.missing if file.needed != "to sample")

    @property
    def device_bytes(self) -> dict[str, int]:
        """The planned bytes on a rank's device between steps, by category."""
        found = device_bytes(self.engine)
        if self.ema_bytes and not self.ema_on_host:
            found["average"] = self.ema_bytes
        return found | {part.name: part.device_bytes for part in self.engine.parts}

    @property
    def host_bytes(self) -> dict[str, int]:
        """The planned bytes in a rank's host memory, by category, without frozen components."""
        return host_bytes(self.engine) | (
            {"average": self.ema_bytes} if self.ema_bytes and self.ema_on_host else {}
        )

    def to_mapping(self) -> dict[str, Any]:
        """The plan of a run as plain values, for `--dry-run --json`."""
        return {
            **asdict(self),
            "missing_files": list(self.missing_files),
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
        }

    def render(self) -> str:
        """The plan of a run as text, as `mm-train --dry-run` prints it."""
        engine = self.engine
        mesh = " x ".join(f"{name} {size}" for name, size in engine.mesh.items())
        lines = [f"plan of run {self.name!r}: {plural(engine.world, 'rank')} ({mesh})", ""]
        width = max(len(c.key) for c in self.components)
        kind_width = max(len(c.type) for c in self.components)
        lines += ["components"]
        lines += [
            f"  {c.key:<{width}}  {c.type:<{kind_width}}  {c.distribution} {c.version}"
            for c in self.components
        ]
        lines += ["", "modules"]
        for module in self.modules:
            state = "trained" if module.trainable else "frozen"
            missing = self._missing_of(module.name)
            lines += [f"  {module.name:<{width}}  {state:<8} {_count(module, bool(missing))}", *missing]
        named = {module.name for module in self.modules}
        for component in dict.fromkeys(f.component for f in self.missing if f.component not in named):
            lines += [f"  {component}", *self._missing_of(component)]
        lines += ["", "sharding"]
        for label, paths in engine.details.items():
            origin = f"  (by {engine.decided_by[label]})" if paths and engine.decided_by.get(label) else ""
            lines.append(f"  {label:<11} {len(paths):>4}  {_abridged(paths)}{origin}".rstrip())
        for frozen in engine.parts:
            by = f", {plural(len(frozen.blocks), 'block')} one at a time" if frozen.blocks else ""
            lines.append(f"  {'frozen':<11}       {frozen.name} {frozen.placement}{by}")
        lines += [
            "",
            "batches",
            *(self._in_buckets() if self.buckets else self._in_batches()),
            "",
            *self._memory(),
        ]
        if self.model_states:
            lines += ["", *table(self.model_states)]
        if self.flops is not None:
            lines += ["", "FLOPs per step, all ranks"]
            lines += [f"  {label:<11} {_flop(count):>24}" for label, count in asdict(self.flops).items()]
        lines += ["", *(f"note: {sentence}" for sentence in self.notes)] if self.notes else []
        return "\n".join(lines)

    def _in_batches(self) -> list[str]:
        ranks = plural(self.engine.data_parallel, "data-parallel rank")
        return [
            f"  {plural(self.global_batch_size, 'sample')} per step = {self.micro_batch_size} per micro-batch"
            f" x {self.accumulation} accumulated x {ranks}",
            f"  {plural(self.steps, 'step')} = {plural(self.steps * self.global_batch_size, 'sample')}"
            if self.steps
            else "  (steps known once the data are present)",
        ]

    def _in_buckets(self) -> list[str]:
        """The buckets with the samples of an epoch."""
        ranks = plural(self.engine.data_parallel, "data-parallel rank")
        lines = [
            f"  {plural(self.steps, 'step')} of {plural(self.accumulation, 'micro-batch')} x {ranks}; the"
            " samples of a micro-batch are of one bucket",
            "  frames  height  width  per micro-batch  samples per epoch  padded  dropped",
        ]
        return lines + [
            f"  {each.num_frames:>6}  {each.height:>6}  {each.width:>5}  {each.micro_batch_size:>15}"
            f"  {each.samples:>17,}  {each.padded:>6}  {each.dropped:>7}"
            for each in self.buckets
        ]

    def _missing_of(self, component: str) -> list[str]:
        return [
            f"    missing: {f.path} (needed {f.needed})" for f in self.missing if f.component == component
        ]

    def _memory(self) -> list[str]:
        engine = self.engine
        lines = ["memory per rank, without activations", *_table(self.device_bytes)]
        if engine.gathered_bytes:
            lines.append(
                f"  the trained modules need up to {_gib(engine.gathered_bytes)} more while they compute"
            )
        if self.host_bytes:
            lines += ["  in host memory", *(f"  {line}" for line in _table(self.host_bytes))]
        for frozen in engine.parts:
            if frozen.host_bytes:
                lines.append(f"  {frozen.name} keeps {_gib(frozen.host_bytes)} in host memory")
            if frozen.call_bytes:
                lines.append(f"  {frozen.name} needs up to {_gib(frozen.call_bytes)} more while it computes")
        known = {frozen.name for frozen in engine.frozen}
        if unknown := [m.name for m in self.modules if not m.trainable and m.name not in known]:
            lines.append(f"  not counted: {', '.join(unknown)}")
        return lines


def device_bytes(engine: EnginePlan) -> dict[str, int]:
    """The planned bytes of the trained modules on a rank's device between steps, by category."""
    found = {"parameters": engine.parameter_bytes - engine.offloaded_bytes}
    if not engine.offloaded_bytes:
        found |= {"gradients": engine.gradient_bytes}
        found |= {} if engine.optimizer_on_host else {"optimizer": engine.optimizer_bytes}
    return found


def host_bytes(engine: EnginePlan) -> dict[str, int]:
    """The planned bytes of the trained modules in a rank's host memory, by category."""
    if engine.offloaded_bytes:
        return {
            "parameters": engine.offloaded_bytes,
            "gradients": engine.gradient_bytes,
            "optimizer": engine.optimizer_bytes,
        }
    if engine.optimizer_on_host:
        return {"optimizer": engine.optimizer_bytes, "copies": 2 * engine.gradient_bytes}
    return {}


def _table(sizes: Mapping[str, int]) -> list[str]:
    """One line per size, and their sum."""
    sizes = {**sizes, "total": sum(sizes.values())}
    width = max(11, *map(len, sizes))
    return [f"  {label:<{width}} {size:>18,} bytes  {_gib(size)}" for label, size in sizes.items()]


def _count(module: ModuleFact, missing: bool) -> str:
    size = f"{plural(module.parameters, 'parameter')}"
    if module.trainable and module.trained < module.parameters:
        return f"{module.trained:>15,} of {size}"
    if module.parameters:
        return f"{size:>26}"
    return (
        "       (size known once files are present)" if missing else "       (size known once it is loaded)"
    )


def _flop(count: float) -> str:
    return f"{count / 1e12:,.6g} TFLOP" if count >= 1e9 or not count else f"{count / 1e6:,.6g} MFLOP"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"


def _abridged(paths: tuple[str, ...]) -> str:
    return ", ".join(paths) if len(paths) <= 4 else f"{paths[0]}, {paths[1]}, ... {paths[-1]}"

"""Attaches a recorder to a training run of ours, and feeds the run what another one has recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import Batch, Engine, Loss, Randomness, Task
from mm_core.errors import MMError, did_you_mean, plural, some
from mm_core.modules.flat_shards import FlatShard
from mm_core.modules.full_tensors import keep_local_part
from mm_core.modules.shards import gathered
from mm_core.report.align.records import Names
from mm_core.schema.nodes import rebuilt
from mm_core.telemetry.align.recorder import Recorder, flatten
from mm_core.weights.stored import load_tensors


class RunRecorder(Recorder):
    """A recorder around what the training loop calls: a task's `prepare`, and an engine's steps. Parameters,
    gradients and optimizer state are those of the engine, sharded or not.

    Args:
        out: the folder.
        engine: the run's engine, prepared.
        task: the run's task.
        like: what is fed instead of the task's own inputs.
        modules: patterns of modules whose tensors are stored too, such as `predictor.blocks.0.*`.
        options: of `Recorder`.
    """

    def __init__(
        self,
        out: Path,
        engine: Engine,
        task: Task,
        like: Recorded | None = None,
        modules: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.engine, self.like, self.patterns, self.shares = engine, like, modules, engine.data_ranks
        super().__init__(out, _roots(task), **options)
        self.grad_scale = 1 / self.shares.count  # the engine averages over the shares of the data
        self.index, self.inside = 0, False

        def replace(owner: object, name: str, around: Callable[..., Any]) -> None:
            setattr(owner, name, partial(around, getattr(owner, name)))

        replace(task, "prepare", self._prepared)
        replace(engine, "micro_step", self._micro_stepped)
        replace(engine, "grad_norm", self._normed)
        replace(engine, "step", self._ended)
        replace(engine, "discard", self._ended)

    def _row(self, kind: str, tensor: Tensor, **facts: Any) -> None:
        super()._row(kind, tensor, **facts)
        if any(fnmatch(facts.get("module", ""), pattern) for pattern in self.patterns):
            file = f"tensor_{self.rank}_{self.step}_{self.micro}_{len(self._rows)}.pt"
            torch.save(tensor.detach().cpu().clone(), self.out / file)
            self._rows[-1]["file"] = file

    def parameters(self) -> Mapping[str, Tensor]:
        """The engine's weights by name, buffers included."""
        state: Mapping[str, Tensor] = self.engine.state_dict()["model"]
        return state

    def gather(self, tensor: Tensor) -> Tensor:
        """The unsharded tensor; a collective if it is sharded."""
        return gathered(tensor)

    def _prepared(self, prepare: Callable[..., Any], batch: Batch, rng: Randomness) -> Any:
        inputs = prepare(batch, rng)
        if not self.inside:  # a search for what is not finite
            return inputs
        micro = self.index * self.shares.count + self.shares.rank
        if self.like is not None:
            inputs = self.like.inputs(inputs, self.step, micro)
        self.inputs(micro, **dict(flatten(inputs)))
        return inputs

    def _micro_stepped(
        self, micro_step: Callable[..., Loss], compute: Callable[[], Loss], *, last: bool, scale: float
    ) -> Loss:
        def computed() -> Loss:
            loss = compute()
            self.loss(loss.total.detach() * (scale / self.shares.count))
            return loss

        self.inside = True
        loss = micro_step(computed, last=last, scale=scale)
        self.inside, self.index = False, self.index + 1
        return loss

    def _normed(self, grad_norm: Callable[[], float]) -> float:
        norm, self.index = grad_norm(), 0
        held = dict(self.engine.named_parameters())
        self._named("gradient", {name: p.grad for name, p in held.items() if p.grad is not None})
        self._named("grad_norm", {"grad_norm": torch.tensor(norm)})
        return norm

    def _ended(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)
        self.after_update(self.engine.state_dict()["optimizer"])


def _roots(task: Task) -> dict[str, nn.Module]:
    return {root: attrgetter(root)(task) for root in task.trainable}


def check_patterns(task: Task, patterns: Sequence[str]) -> None:
    """Checks that each pattern of modules to store matches one.

    Args:
        task: the run's task.
        patterns: such as `predictor.blocks.0.*`.

    Raises:
        MMError: there is no such module.
    """
    roots = _roots(task).items()
    known = [f"{root}.{path}".rstrip(".") for root, model in roots for path, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in known):
            accepted, hint = f"{some(known)}; `*` is any text", did_you_mean(pattern, known)
            what = f"no module of this run has the name {pattern!r}"
            raise MMError(what, where="--modules", accepted=accepted, hint=hint)


class Recorded:
    """Inputs and initial weights in the record of another run, to feed this one.

    Args:
        folder: the record.
        names: the map from that run's names to this one's.

    Raises:
        MMError: the folder has no inputs of any step.
    """

    def __init__(self, folder: Path, names: Names) -> None:
        self.folder, self.names = folder, names
        self.fed: set[str] = set()
        if not list(folder.glob("inputs_*.pt")):
            what = "the folder holds no recorded inputs"
            raise MMError(what, where=str(folder), hint="record that run first: mm align record --out FOLDER")

    def _stored(self, path: Path) -> dict[str, Tensor]:
        """The tensors in a file of the record, by our names."""
        stored: Any = load_tensors(path)
        return {self.names.ours(name): tensor for name, tensor in stored.items()}

    def weights(self, engine: Engine) -> str:
        """Copies the recorded initial weights into the engine; returns a sentence about it."""
        path = self.folder / "weights.pt"
        if not path.exists():
            return f"{path} does not exist: this run keeps its own initial weights"
        found, state = self._stored(path), engine.state_template(())["model"]
        both = [name for name in state if name in found]
        odd = [name for name in both if state[name].shape != found[name].shape]
        if odd or not both:
            shown = f"{odd[0]} has the shape {list(found[odd[0]].shape)} there" if odd else "no name is ours"
            what = f"the recorded weights do not fit this model: {shown}"
            raise MMError(what, where=str(path), hint="map the names with --map THEIRS=OURS")
        with torch.no_grad():
            for name in both:
                full, held = found[name], state[name]
                if isinstance(held, FlatShard):
                    held.share.copy_(full.reshape(-1)[held.start : held.start + held.share.numel()])
                else:
                    keep_local_part(held, full.to(held.dtype))
        rest = len(state) - len(both)
        return f"{plural(len(both), 'weight')} from {path}; {rest} of this model are not in it"

    def inputs(self, inputs: Any, step: int, micro: int) -> Any:
        """The inputs of a micro-batch with the recorded tensors in the place of those with the same names.

        Raises:
            MMError: the record has no such step, or a tensor has another shape.
        """
        path = self.folder / f"inputs_{step}_{micro}.pt"
        if not path.exists():
            what = f"the record has no micro-batch {micro} in step {step}"
            raise MMError(what, where=str(path), hint="record as many steps as that run has, or fewer")
        return self._put(inputs, self._stored(path), "")

    def _put(self, value: Any, stored: Mapping[str, Tensor], path: str) -> Any:
        def put(part: object, key: str) -> object:
            return self._put(part, stored, f"{path}.{key}" if path else key)

        if isinstance(value, dict):
            return {key: put(part, key) for key, part in value.items()}
        if not isinstance(value, Tensor):
            return value if isinstance(value, list | tuple) else rebuilt(value, put)
        # A script of others knows `latents`, not `given.latents`.
        name = path if path in stored else path.rpartition(".")[2]
        if name not in stored:
            return value
        new = stored[name]
        if (new.dim(), new.shape[:1]) != (value.dim(), value.shape[:1]):  # lengths of texts may differ
            what = (
                f"input {name!r} has the shape {list(new.shape)} in the record, and {list(value.shape)} here"
            )
            raise MMError(what, where=str(self.folder), hint="give both runs samples of the same sizes")
        self.fed.add(path)
        return new.to(value.device, value.dtype)

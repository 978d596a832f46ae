"""The config section `validation`: held-out loss, metrics and sampled clips of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mm_core.config.sections import RunConfig, ValidationSection
from mm_core.contracts import (
    Batch,
    Clip,
    Evaluation,
    Metric,
    Randomness,
    SampleRequest,
    SupportsCheckRequest,
    Task,
    TaskModule,
)
from mm_core.data.loading.streams import BatchStream
from mm_core.data.rows.prompts import Prompt, with_images
from mm_core.errors import ContractError, DataError, MMError, PeerError, plural
from mm_core.evaluation.batches import EvaluatedEngine, EvaluationData, StreamedEvaluation
from mm_core.evaluation.sample_inputs import with_inputs
from mm_core.evaluation.sampled_clips import (
    complete_request,
    gather_previews,
    no_clips,
    share_of,
    write_own,
)
from mm_core.plan.samples import Samples
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned
from mm_core.plugin.registry import Registry
from mm_core.runtime.ranks import Ranks, gather_rows, sum_rows

if TYPE_CHECKING:
    from mm_core.optim.ema import EMA


class EvaluationStopped(Exception):
    """The evaluation was abandoned because a stop was requested; raised on all ranks at the same point."""


_Failure = tuple[str, int, str, bool]
"""Fields of a `FailureRecord`: id, index, reason, and whether another row replaces it."""


def _shown(failures: Sequence[_Failure]) -> str:
    named = "; ".join(f"{name}: {reason}" for name, _, reason, _ in failures[:5])
    return named + (f"; and {len(failures) - 5} more" if len(failures) > 5 else "")


def _ignore(*_: object) -> None:
    """A callback that does nothing."""


class Validator:
    """Evaluates a run on held-out rows, and samples clips, with the same result on all ranks.

    All ranks create it and call its methods together.

    Args:
        config: of the run.
        ranks: of the run.
        task: the run's task.
        engine: that holds the task.
        dataset: the held-out rows; None if only clips are sampled.
        run_dir: the run's folder; clips are written to `samples/step_N` in it.
        split: `validation`, `test` or `train`: the dataset's key under `data`, and the prefix of metrics.
        settings: None uses `config.validation`, and every row of a test set.
        metrics: further metrics, with names for error messages.
        ema: averaged weights, which are evaluated as well, and used for sampling.
        stop: whether this rank should stop; called before every batch and forward.
        enter: called with `validation` at the same points, as a heartbeat.
        note: receives messages for the user (on every rank; only rank 0's should be shown).
        seen: receives every batch of this rank with its evaluation.
        log: receives the metrics of sampled clips.
        show: receives previews of sampled clips, on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        task: TaskModule,
        engine: EvaluatedEngine,
        dataset: Samples | None,
        *,
        run_dir: Path,
        split: str = "validation",
        settings: ValidationSection | None = None,
        metrics: Sequence[tuple[str, Metric]] = (),
        ema: EMA | None = None,
        stop: Callable[[], bool] = lambda: False,
        enter: Callable[[str], None] = _ignore,
        note: Callable[[str], None] = _ignore,
        seen: Callable[[Batch, Evaluation], None] = _ignore,
        log: Callable[[int, Mapping[str, float]], None] = _ignore,
        show: Callable[[int, Sequence[Clip], Path], None] = _ignore,
    ) -> None:
        self.settings = settings if settings is not None else default_settings(config.validation, split)
        self.split, self.run_dir, self.has_rows = split, run_dir, dataset is not None
        self._sizes = config.task, config.data.train
        self._task, self._engine, self._ema, self._metrics = task, engine, ema, metrics
        self._stop, self._enter, self._note, self._seen = stop, enter, note, seen
        self._log, self._show = log, show
        self._ranks, self._leads = ranks, engine.data_ranks.leads
        self._rng = Randomness(config.run.seed)
        self._reported: set[tuple[str, int]] = set()
        self._data: EvaluationData | StreamedEvaluation | None = None
        if dataset is not None and dataset.stream is not None:
            stream = BatchStream(
                dataset.stream,
                transform=task.batch_transform(),
                rng=self._rng,
                share=engine.data_ranks,
                rows=config.train.micro_batch_size,
                whole=False,
                workers=config.data.loader.workers,
                pin_memory=config.data.loader.pin_memory and engine.device.type != "cpu",
                ranks=ranks.count,
                note=note,
            )
            self._data = StreamedEvaluation(stream, self.settings.rows)
        elif dataset is not None:
            self._data = EvaluationData(
                dataset,
                where=f"data.{split}",
                rows=self.settings.rows,
                micro_batch_size=config.train.micro_batch_size,
                ranks=engine.data_ranks,
                transform=task.batch_transform(),
                seed=config.run.seed,
                loader=config.data.loader,
                device=engine.device,
                decode_seconds=config.data.decode_seconds,
            )

    # -- held-out loss -------------------------------------------------------------------------

    def run(self, step: int) -> dict[str, float] | None:
        """Evaluates all held-out rows with the current weights and, if any, their average.

        Rows, noise and timesteps are the same each time.

        Args:
            step: number of steps taken, for messages.

        Returns:
            `validation/loss`, `validation/loss_at/0.1`, figures of metrics, `validation/rows` and, if rows
            could not be read, `validation/unreadable`; `validation_ema/...` for the averaged weights. None if
            a stop was requested.
        """
        if self._data is None:
            return {}
        weights: list[tuple[str, Callable[[], AbstractContextManager[None]]]] = [(self.split, nullcontext)]
        if self._ema is not None:
            weights.append((f"{self.split}_ema", self._ema.applied))
        figures: dict[str, float] = {}
        try:
            with closing(self._data.read(len(weights))) as batches:
                for prefix, applied in weights:
                    with applied(), self._engine.evaluating():
                        found = self._one_pass(islice(batches, self._data.batches), self._data.rows)
                    figures |= {f"{prefix}/{name}": value for name, value in found.items()}
        except EvaluationStopped:
            self._note(f"{self.split} after step {step} was abandoned because a stop was requested")
            return None
        return figures

    def _one_pass(self, batches: Iterator[Batch | None], rows: int) -> dict[str, float]:
        for _, metric in self._metrics:
            metric.reset()
        totals: dict[str, float] = {}
        counted, weight = 0.0, 0.0
        failures: list[_Failure] = []
        parts = 0.0
        while (batch := self._next(batches)) is not None:
            failures += [(f.id, f.index, f.reason, f.replaced) for f in batch.failures]
            parts += sum(not failure.replaced for failure in batch.failures)
            on_device = batch.to(self._engine.device, non_blocking=True)
            evaluation = self._task.evaluate(on_device, self._rng, self.settings.quantiles)
            counts = batch.sample_weights > 0
            for name, value in _row_sums(evaluation, counts, totals).items():
                totals[name] = totals.get(name, 0.0) + value
            weight += float(evaluation.weights.cpu().double()[counts].sum())
            counted += float(counts.sum())
            for _, metric in self._metrics:
                metric.batch(on_device, evaluation)
            self._seen(batch, evaluation)
        names = sorted(totals)
        own = [counted, weight, parts, *(totals[name] for name in names)]
        counted, weight, parts, *sums = sum_rows(own, self._leads).tolist()
        if counted < rows or parts:
            self._report(failures, rows - int(counted), rows)
        if weight <= 0:
            raise DataError(
                "nothing can be evaluated: every row has weight 0",
                where=f"data.{self.split}",
                hint="check that the rows can be read and have labels",
            )
        figures = {name: value / weight for name, value in zip(names, sums, strict=True)}
        lost = {"unreadable": rows - counted} if counted < rows else {}
        return {**figures, **self._figures(set(figures)), "rows": counted, **lost}

    def _next(self, batches: Iterator[Batch | None]) -> Batch | None:
        """The next batch, once all ranks have theirs; None after the last one, on all ranks."""
        try:
            batch = next(batches, None)
        except MMError as fault:
            self._go_on(fault)
            raise
        if batch is not None:
            self._go_on()
        return batch

    def _go_on(self, fault: MMError | None = None) -> None:
        """Agrees with other ranks: a stop request or an error on any of them ends the evaluation on all."""
        self._enter("validation")
        flags = torch.tensor([float(self._stop()), float(fault is not None)], dtype=torch.float64)
        stopping, failing = gather_rows(flags).unbind(1)
        if failing.any():
            culprit = int(failing.nonzero()[0])
            raised = fault or PeerError(f"rank {culprit} failed to read its samples of data.{self.split}")
            raised.on_all_ranks = True
            raise raised
        if stopping.any():
            raise EvaluationStopped

    def _report(self, failures: Sequence[_Failure], lost: int, rows: int) -> None:
        """Reports rows, and parts of rows, that could not be read, each once. A collective call."""
        everyone = [row for rank in self._ranks.gather(list(failures)) for row in rank]
        fresh = sorted({row for row in everyone if row[:2] not in self._reported})
        self._reported |= {row[:2] for row in fresh}
        whole, parts = ([row for row in fresh if row[3] is replaced] for replaced in (True, False))
        if whole:
            self._note(
                f"warning: {lost} of {plural(rows, 'row')} of data.{self.split} could not be read and are"
                f" not counted: {_shown(whole)}"
            )
        if parts:
            self._note(
                f"warning: parts of rows of data.{self.split} could not be read and are left out: "
                f"{_shown(parts)}"
            )

    def _figures(self, taken: set[str]) -> dict[str, float]:
        """The metrics' figures from the sums over all ranks. ContractError for one that cannot be logged."""
        figures: dict[str, float] = {}
        for name, metric in self._metrics:
            sums = returned(Metric.sums, metric.sums(), metric)
            found = returned(Metric.result, metric.result(sum_rows(sums.double(), self._leads)), metric)
            twice = sorted(found.keys() & (taken | figures.keys()))
            if twice or not all(isinstance(value, int | float) for value in found.values()):
                raise _wrong_figure(name, metric, found, twice)
            figures |= found
        return figures

    # -- sampled clips -------------------------------------------------------------------------

    def sample(self, step: int) -> Path | None:
        """Samples the clips of `validation.samples`, from the averaged weights if there are any.

        Each rank generates and writes its share of the prompts; rank 0 adds the contact sheet. Clip i is
        identical to the one that `mm sample` with the same seed generates from a checkpoint of this step.

        Args:
            step: number of steps taken.

        Returns:
            The folder `samples/step_N`, or None if a stop was requested.
        """
        request, real = share_of(self._request, self._engine.data_ranks)
        applied = nullcontext if self._ema is None else self._ema.applied
        try:
            with applied(), self._engine.evaluating(), self._agreeing_forwards():
                clips = returned(Task.sample, self._task.sample(request), self._task)[:real]
        except EvaluationStopped:
            self._note(f"sampling after step {step} was abandoned because a stop was requested")
            return None
        folder = self.run_dir / "samples" / f"step_{step:08d}"
        made, clips = len(clips), clips if self._leads else []
        fault = write_own(clips, request.first, folder)
        if made < real:
            fault = no_clips(type(self._task).__name__, made, real).what
        title = f"{self.run_dir.name}, step {step}, seed {request.seed}"
        previews, faults = gather_previews(self._ranks, clips, fault, folder, title)
        if faults:
            self._note(f"warning: the clips after step {step} could not be written: {'; '.join(faults)}")
        if self._ranks.rank == 0:
            self._show(step, previews, folder)
        self._log_samples(step, clips)
        return folder

    def check_samples(self) -> None:
        """Checks, before the first step, that the clips of `validation.samples` can be sampled.

        Raises:
            MMError: they cannot.
        """
        if self.settings.samples is None:
            return
        if not callable(getattr(self._task, "sample", None)):
            raise no_clips(type(self._task).__name__)
        if isinstance(self._task, SupportsCheckRequest):
            self._task.check_request(self._request)

    @cached_property
    def _request(self) -> SampleRequest:
        """All clips of `validation.samples`, with their images read once."""
        samples = self.settings.samples
        assert samples is not None, "validation.samples contains the prompts"
        prompts = with_images([Prompt(text) for text in samples.prompts], samples.images, samples.last_images)
        prompts = with_inputs(prompts, samples.inputs)
        request = SampleRequest(
            prompts=samples.prompts,
            negative_prompt=samples.negative_prompt,
            seed=samples.seed,
            steps=samples.steps,
            guidance=samples.guidance,
        )
        return complete_request(request, *self._sizes, prompts)

    @contextmanager
    def _agreeing_forwards(self) -> Iterator[None]:
        """A context in which ranks agree to continue before every forward of a trained module; all ranks run
        equally many."""
        hooks = [
            self._task.get_submodule(name).register_forward_pre_hook(
                lambda *_: self._go_on(),
                prepend=True,  # before the engine's own collectives
            )
            for name in self._task.trainable
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _log_samples(self, step: int, clips: Sequence[Clip]) -> None:
        for _, metric in self._metrics:
            metric.reset()
            metric.sampled(clips)
        if figures := self._figures(set()):
            prefix = self.split if self._ema is None else f"{self.split}_ema"
            self._log(step, {f"{prefix}/{name}": value for name, value in figures.items()})


def _wrong_figure(
    name: str, metric: Metric, found: Mapping[str, object], twice: Sequence[str]
) -> ContractError:
    """The error for a metric whose figures are no numbers, or have names that are taken (`twice`)."""
    if twice:
        return ContractError(
            f"two metrics return the figure {twice[0]!r}",
            where=f"validation.metrics: {name}",
            hint="remove one of the metrics",
        )
    figure, value = next((k, value) for k, value in found.items() if not isinstance(value, int | float))
    return ContractError(
        f"the figure {figure!r} is a {type(value).__name__}",
        where=f"validation.metrics: {name}, {place_of_object(metric)}",
        accepted="a number, such as float(tensor)",
    )


def build_metrics(registry: Registry, settings: ValidationSection) -> list[tuple[str, Metric]]:
    """Builds the metrics listed in the config section `validation`, with their types."""
    return [(component.type, registry.build("metric", component)) for component in settings.metrics]


def default_settings(section: ValidationSection | None, split: str) -> ValidationSection:
    """The run's validation settings for a split; every row of a test set is evaluated."""
    settings = section or ValidationSection()
    return settings if split == "validation" else replace(settings, rows=None)


def _row_sums(evaluation: Evaluation, counts: Tensor, before: Mapping[str, float]) -> dict[str, float]:
    """The sums over rows that count, in float64. ContractError for names that break the contract."""
    names = list(evaluation.sums)
    if "loss" not in names or (before and set(names) != set(before)):
        raise ContractError(
            f"the task's evaluation returned the sums {sorted(names)}",
            where="Task.evaluate",
            accepted="sums that include 'loss', with the same names for every batch",
        )
    table = torch.stack([evaluation.sums[name] for name in names]).cpu().double()
    return dict(zip(names, table[:, counts].sum(1).tolist(), strict=True))

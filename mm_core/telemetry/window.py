"""Training metrics between two log lines: summed on the device, fetched and averaged over ranks once."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Bins, Loss
from mm_core.errors import ContractError
from mm_core.runtime.launch.watchdog import PHASES
from mm_core.runtime.ranks import gather_rows
from mm_core.telemetry.loss_by_bin import BinnedLoss
from mm_core.telemetry.phase_clock import PhaseClock

Gather = Callable[[Tensor], Iterable[Tensor]]
"""A collective: this rank's float64 vector on CPU -> the vectors of all ranks."""

_BLOCK = 32
"""Rows are padded to a multiple of this length, so that ranks with different metrics can exchange them."""

_HEAD = 8 + len(PHASES)
"""Numbers in a row before the sums of the metrics."""


class MetricsWindow:
    """Sums training losses, metrics and step times from one log line to the next (`flush`).

    `micro` and `step` cost no host synchronisation; `flush` costs one transfer and one small collective.
    Every rank must report the same metric names. A step whose gradient is not finite changes no weights and
    is excluded from the means: a single NaN would make the mean of its window NaN.

    Args:
        memory: returns the peak memory of this rank in bytes.
        gather: the collective that `flush` runs.
        samples_seen: samples trained on before this window began (non-zero after a resume).
        clock: returns the time in seconds.
        bins: the scale of `Loss.bins`, if the task has one.
        phases: measures the time spent in each phase of a step.
        peak: peak FLOPs per second of one device; None if unknown.
    """

    def __init__(
        self,
        memory: Callable[[], int],
        gather: Gather = gather_rows,
        samples_seen: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        bins: Bins | None = None,
        phases: PhaseClock | None = None,
        peak: float | None = None,
    ) -> None:
        self.samples_seen = samples_seen
        self.step_flops = 0.0
        """FLOPs of the trained modules in one step, over all ranks, for losses that do not report their own;
        0 until they are counted."""
        self.counts = True
        """Whether this rank's tokens and FLOPs count (`DataRanks.leads`)."""
        self.own: Sequence[float] = ()
        """Each rank's seconds outside of collectives in a step, as of the last `flush` (`PhaseClock.own`)."""
        self._memory, self._gather, self._clock = memory, gather, clock
        self._phases, self._peak = phases, peak
        self._bins = BinnedLoss(bins, gather) if bins is not None else None
        self._reset()
        self.restart_clock()

    def _reset(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._step_sums: dict[str, Tensor] = {}
        self._weight = self._step_weight = self._samples = self._tokens = self._flops = 0.0
        self._step_time = self._data_wait = self._grad_norm = 0.0
        self._steps = self._finite_steps = 0

    def restart_clock(self) -> None:
        """Restarts the clock of step times, after work outside of steps such as saving a checkpoint."""
        self._mark = self._clock()

    def micro(self, loss: Loss) -> None:
        """Adds the loss and metrics of one micro-batch; the sums stay on the device."""
        self._step_weight += loss.weight
        self._tokens += loss.tokens
        self._flops += loss.flops
        if self._bins is not None and loss.bins is not None:
            self._bins.micro(loss.bins)
        for name, value in (("loss", loss.total), *loss.metrics.items()):
            value = value.detach().to(loss.total.device, torch.float32)
            add(self._step_sums, name, value)

    def step(self, *, grad_norm: float, data_wait: float, samples: float, weight: float) -> None:
        """Ends a training step: adds its time, gradient norm and samples to the metrics of the window.

        Args:
            grad_norm: global gradient norm before clipping.
            data_wait: seconds that this rank waited for its samples.
            samples: samples of the step, over all ranks.
            weight: total weight of the step, over all ranks.
        """
        now = self._clock()
        self._step_time += now - self._mark
        self._mark = now
        self._steps += 1
        self._end_step(grad_norm)
        self._data_wait += data_wait
        self._samples += samples
        self.samples_seen += samples
        if self._bins is not None:
            self._bins.step(grad_norm, weight)

    def _end_step(self, grad_norm: float) -> None:
        if math.isfinite(grad_norm):
            self._grad_norm += grad_norm
            self._finite_steps += 1
            self._weight += self._step_weight
        for name, value in self._step_sums.items():
            add(self._sums, name, value if math.isfinite(grad_norm) else torch.zeros_like(value))
        self._step_sums, self._step_weight = {}, 0.0

    def detail(self) -> dict[str, float]:
        """Detailed metrics since the last call: loss, gradient norm and share of samples in each bin.

        All ranks must call it.
        """
        return {} if self._bins is None else self._bins.flush()

    def flush(self) -> dict[str, float]:
        """The training metrics since the last log line, equal on all ranks; a new window begins.

        All ranks must call it.

        Returns:
            loss and the task's metrics: exact means over the samples of all ranks.
            grad_norm: mean over steps.
            step_time, data_wait, time/PHASE: seconds per step of the slowest rank.
            samples_per_second, tokens_per_second: over all ranks.
            samples: samples trained on since step 0.
            memory: peak bytes of the rank that uses most.
            model_flops_per_second, mfu: per device, if known.

        Raises:
            ContractError: ranks report metrics with different names.
        """
        names = sorted(self._sums)
        ranks = self._exchange(names)
        columns = list(zip(*ranks, strict=True))
        steps = max(1, self._steps)
        weight = sum(columns[0])
        step_time, data_wait, memory = (max(column) for column in columns[1:4])
        self.own = columns[4]
        spent = [max(column) for column in columns[5 : 5 + len(PHASES)]]
        tokens, flops = sum(columns[_HEAD - 2]), sum(columns[_HEAD - 3]) or self.step_flops * self._steps
        sums = [sum(column) for column in columns[_HEAD : _HEAD + len(names)]]
        means = {
            name: total / weight if weight else float("nan") for name, total in zip(names, sums, strict=True)
        }
        metrics = {
            **({"loss": means.pop("loss")} if "loss" in means else {}),
            **means,
            "grad_norm": self._grad_norm / self._finite_steps if self._finite_steps else float("nan"),
            "step_time": step_time / steps,
            "data_wait": data_wait / steps,
            "samples_per_second": self._samples / step_time if step_time else 0.0,
            **({"tokens_per_second": tokens / step_time} if tokens and step_time else {}),
            "samples": self.samples_seen,
            "memory": memory,
            **{f"time/{name}": value / steps for name, value in zip(PHASES, spent, strict=True) if value},
        }
        if flops and step_time:
            rate = flops / step_time / len(ranks)
            metrics["model_flops_per_second"] = rate
            if self._peak:
                metrics["mfu"] = rate / self._peak
        self._reset()
        return metrics

    def _exchange(self, names: Sequence[str]) -> list[list[float]]:
        """The rows of all ranks: weight, times, memory, own time, phases, FLOPs, tokens, fingerprint, sums.

        Outside of the collective, rows are plain numbers: small tensor operations would cost more.
        """
        fingerprint = float(zlib.crc32("\n".join(names).encode()))
        spent = self._phases.take() if self._phases is not None else {}
        own_time = self._phases.own() if self._phases is not None else 0.0
        row = [self._weight, self._step_time, self._data_wait, float(self._memory()), own_time]
        own = (self._flops, self._tokens) if self.counts else (0.0, 0.0)
        row += [*(spent.get(name, 0.0) for name in PHASES), *own, fingerprint]
        if names:
            row += torch.stack([self._sums[name] for name in names]).tolist()
        # Padded to a length that ranks with different metrics share.
        row += [0.0] * (-len(row) % _BLOCK)
        ranks = [other.tolist() for other in self._gather(torch.tensor(row, dtype=torch.float64))]
        odd = [rank for rank, other in enumerate(ranks) if other[_HEAD - 1] != fingerprint]
        if odd:
            raise ContractError(
                f"ranks {odd} report different metrics from this rank ({', '.join(names) or 'none'})",
                hint="return the same metric names from the task's loss on every rank; use 0 for a metric "
                "that a rank does not have",
            )
        return ranks


def add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Adds a metric's value to its running sum by name; the first value is cloned, never shared."""
    sums[name] = sums[name] + value if name in sums else value.clone()

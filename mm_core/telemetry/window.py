"""Metrics between two log lines: summed on the device, fetched and averaged over ranks once."""

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
"""A float64 vector on CPU -> the vectors of all ranks."""

_BLOCK = 32


class MetricsWindow:
    """Sums losses, metrics and times from one `flush` to the next.

    `micro` and `step` cost no host synchronisation; `flush` costs one transfer and one small collective.
    A task names the same metrics on every rank; so must its ranks do here. A step whose gradient is not
    finite changes no weights and counts in no mean: one of them would hide all others of its window.

    Args:
        memory: peak memory of this rank in bytes.
        gather: the collective that `flush` runs.
        samples_seen: samples trained on before this window began (at a resume).
        clock: seconds.
        bins: the scale of `Loss.bins`, if the task has one.
        phases: where the time went.
        peak: FLOPs a second that one device can do at most, where that is known.
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
        """Operations of the trained modules in one step, over all ranks, where no loss says its own; 0 until
        they are counted."""
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
        """The next step's time counts from now: call it after what is no part of a step (saving, say)."""
        self._mark = self._clock()

    def micro(self, loss: Loss) -> None:
        """Adds one micro-batch: its sums stay where they are."""
        self._step_weight += loss.weight
        self._tokens += loss.tokens
        self._flops += loss.flops
        if self._bins is not None and loss.bins is not None:
            self._bins.micro(loss.bins)
        for name, value in (("loss", loss.total), *loss.metrics.items()):
            value = value.detach().to(loss.total.device, torch.float32)
            add(self._step_sums, name, value)

    def step(self, *, grad_norm: float, data_wait: float, samples: float) -> None:
        """Ends a step.

        Args:
            grad_norm: the global norm before clipping.
            data_wait: seconds that this rank waited for its samples.
            samples: samples of the step, over all ranks.
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
            self._bins.step(grad_norm)

    def _end_step(self, grad_norm: float) -> None:
        if math.isfinite(grad_norm):
            self._grad_norm += grad_norm
            self._finite_steps += 1
            self._weight += self._step_weight
        for name, value in self._step_sums.items():
            add(self._sums, name, value if math.isfinite(grad_norm) else torch.zeros_like(value))
        self._step_sums, self._step_weight = {}, 0.0

    def detail(self) -> dict[str, float]:
        """What is worth a look less often: the loss, gradient norm and share of samples by bin since the
        last call. Called by all ranks."""
        return {} if self._bins is None else self._bins.flush()

    def flush(self) -> dict[str, float]:
        """The window's metrics, the same on every rank; a new window begins. Called by all ranks.

        loss and the task's metrics: exact means over the samples of all ranks. grad_norm: mean over steps.
        step_time, data_wait, time/PHASE: seconds a step, of the slowest rank. samples_per_second,
        tokens_per_second: over all ranks. samples: trained on since step 0. memory: peak bytes of the rank
        that has most. model_flops_per_second, mfu: of a device, where they are known.
        """
        names = sorted(self._sums)
        ranks = self._exchange(names)
        columns = list(zip(*ranks, strict=True))
        steps = max(1, self._steps)
        weight = sum(columns[0])
        step_time, data_wait, memory = (max(column) for column in columns[1:4])
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
        """One row a rank: weight, step time, data wait, memory, phases, FLOPs, tokens, fingerprint,
        sums. Beyond the collective it is plain numbers: small tensor operations would cost more than that."""
        fingerprint = float(zlib.crc32("\n".join(names).encode()))
        spent = self._phases.take() if self._phases is not None else {}
        row = [self._weight, self._step_time, self._data_wait, float(self._memory()), 0.0]
        row += [*(spent.get(name, 0.0) for name in PHASES), self._flops, self._tokens, fingerprint]
        if names:
            row += torch.stack([self._sums[name] for name in names]).tolist()
        # Padded, so that ranks whose names differ can still tell each other so.
        row += [0.0] * (-len(row) % _BLOCK)
        ranks = [other.tolist() for other in self._gather(torch.tensor(row, dtype=torch.float64))]
        odd = [rank for rank, other in enumerate(ranks) if other[_HEAD - 1] != fingerprint]
        if odd:
            raise ContractError(
                f"ranks {odd} report other metrics than this one ({', '.join(names) or 'none'})",
                hint="a task's loss must name the same metrics on every rank, with zeros where it has none",
            )
        return ranks


def add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Adds to a sum that is a tensor of its own."""
    sums[name] = sums[name] + value if name in sums else value.clone()


_HEAD = 8 + len(PHASES)

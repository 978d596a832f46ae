"""Stand-ins while the parts of the loop are being built; this file goes before anything is released."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from mm_core.errors import PeerError, TrainingError
from mm_core.train.loop import gather


class StopRequest(Protocol):
    @property
    def requested(self) -> str | None: ...


class PlainGuard:
    def judge(self, step: int, norm: float, losses: Any, batches: Any, rerun: Any) -> str | None:
        if math.isfinite(norm):
            return None
        guilty = [not math.isfinite(float(loss.total)) for loss in losses]
        samples = [name for batch, bad in zip(batches, guilty, strict=True) if bad for name in batch.ids]
        culprits = gather([float(any(guilty))])[:, 0].nonzero().flatten().tolist()
        if culprits and dist.get_rank() not in culprits:
            raise PeerError(f"the loss of rank {culprits[0]} is not finite") from None
        rank = f", rank {dist.get_rank()}, samples {samples[:8]}" if culprits else ""
        raise TrainingError(
            f"the gradient norm is {norm}; no parameter was changed",
            where=f"step {step + 1}{rank}",
            hint="lower the learning rate, check the samples of this step, or train in fp32",
        )


@dataclass
class PlainMilestones:
    steps: int
    every: int
    save: Any
    request: StopRequest
    save_due: bool = False

    def begin(self, step: int) -> None: ...

    def fault(self) -> None: ...

    @property
    def stop(self) -> bool:
        return self.request.requested is not None

    def updated(self, step: int, refused: str | None) -> None: ...

    def reach(self, step: int, logged: Any, *, stop: bool, save: bool) -> bool:
        done = step == self.steps
        if stop or save or done or step % self.every == 0:
            self.save(step)
        return stop or done

"""Metrics for video: latent PSNR of held-out clips, and frame change of sampled clips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Batch, Clip, Evaluation, TextBatch
from mm_core.errors import ContractError
from mm_core.evaluation.metrics.needs import needed_outputs
from mm_core.evaluation.metrics.summed import SummedMetric, mean


class LatentPSNR(SummedMetric):
    """The metric `latent_psnr`: peak signal-to-noise ratio, in dB, of one-step estimates of clean latents.

    PSNR = 10 log10(R^2 / MSE). Latents have no maximum, so the range R is that of a uniform signal with the
    variance of the clean latents, R^2 = 12 (E[x^2] - E[x]^2), over all rows of the evaluation.
    """

    width = 4
    """Number of rows, and the sums of their means of x, x^2 and squared error."""

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch to the metric.

        Raises:
            ContractError: the task's evaluation contains no estimates.
        """
        hint = "remove latent_psnr from validation.metrics: it is for the task text_to_video"
        found = needed_outputs(evaluation, "latent_psnr", ("clean", "estimate"), hint)
        clean, estimate = (latents.float() for latents in found)
        rows = (clean, clean.square(), (estimate - clean).square())
        means = torch.stack([row.flatten(1).mean(1) for row in rows]).cpu().double()
        counted = means[:, batch.sample_weights > 0]
        self._sums[0] += counted.shape[1]
        self._sums[1:] += counted.sum(1)

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`latent_psnr` in dB, infinite for a perfect estimate; {} without rows."""
        count, first, second, error = sums.tolist()
        if not count:
            return {}
        variance = max(0.0, second / count - (first / count) ** 2)
        if error == 0:
            return {"latent_psnr": math.inf}
        if variance == 0 or math.isnan(error):
            return {"latent_psnr": math.nan}
        return {"latent_psnr": 10 * math.log10(12 * variance / (error / count))}


class FrameChange(SummedMetric):
    """The metric `frame_change`: mean absolute difference of successive frames in sampled clips.

    From 0 to 1 (black to white); near 0 the video is frozen. Clips of one frame are left out.
    """

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Ignores held-out clips, since the metric uses sampled ones.

        Raises:
            ContractError: the rows are text, from which no clips are sampled.
        """
        if isinstance(batch, TextBatch):
            raise ContractError(
                "the metric needs sampled clips, but the task samples no clips from rows of text",
                where="validation.metrics: frame_change",
                accepted="a task that samples clips: text_to_video",
                hint="use accuracy or f1 for classes, perplexity for tokens, exact_match for answers",
            )

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Adds sampled clips to the metric."""
        for clip in clips:
            if clip.pixels.shape[1] > 1:
                self._sums[0] += 1
                self._sums[1] += clip.pixels.diff(dim=1).abs().mean().double() / 2

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`frame_change`, the mean over clips; {} without clips of at least two frames."""
        return mean("frame_change", sums)

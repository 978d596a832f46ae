"""Metrics of clips. Only sums leave a rank, so that they are exact over ranks."""

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
    """Peak signal-to-noise ratio, in dB, of the one-step clean estimate against the clean latents.

    PSNR = 10 log10(R^2 / MSE). Latents have no greatest value, so the range R is that of a uniform signal
    with the references' variance, R^2 = 12 (E[x^2] - E[x]^2), over all rows of the evaluation.
    """

    width = 4
    """Rows, and the sums of their means of x, x^2 and squared error."""

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Adds the rows of a batch. ContractError when the task gives no estimates."""
        hint = "take a metric that fits the task: text_to_video is one that gives them"
        found = needed_outputs(evaluation, "latent_psnr", ("clean", "estimate"), hint)
        clean, estimate = (latents.float() for latents in found)
        rows = (clean, clean.square(), (estimate - clean).square())
        means = torch.stack([row.flatten(1).mean(1) for row in rows]).cpu().double()
        counted = means[:, batch.sample_weights > 0]
        self._sums[0] += counted.shape[1]
        self._sums[1:] += counted.sum(1)

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`latent_psnr`, infinite for a perfect estimate; {} without rows."""
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
    """How much sampled clips move: the mean absolute difference of successive frames, 0 to 1 (black to
    white). Near 0 means frozen video. Clips of one frame are left out."""

    def batch(self, batch: Batch, evaluation: Evaluation) -> None:
        """Held-out clips are not looked at. ContractError for rows of text, of which nothing is sampled."""
        if isinstance(batch, TextBatch):
            raise ContractError(
                "the metric is of sampled clips, and the task makes none of rows of text",
                where="validation.metrics: frame_change",
                accepted="a task that samples clips: text_to_video",
                hint="accuracy and f1 are of classes, perplexity of tokens, exact_match of answers in words",
            )

    def sampled(self, clips: Sequence[Clip]) -> None:
        """Adds clips."""
        for clip in clips:
            if clip.pixels.shape[1] > 1:
                self._sums[0] += 1
                self._sums[1] += clip.pixels.diff(dim=1).abs().mean().double() / 2

    def result(self, sums: Tensor) -> Mapping[str, float]:
        """`frame_change`, the mean over clips; {} without clips that have two frames."""
        return mean("frame_change", sums)

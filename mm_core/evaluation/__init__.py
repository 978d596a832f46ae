"""Evaluation on held-out samples while training: settings, losses, metrics, predictions, sampled clips."""

from mm_core.evaluation.metrics.classes import F1, Accuracy, Perplexity, f1_score
from mm_core.evaluation.metrics.needs import needed_outputs, needed_texts
from mm_core.evaluation.metrics.texts import (
    TextMetric,
    anls,
    anls_score,
    edit_distance,
    exact_match,
    normalized_similarity,
    squad_normalized,
    without_thought,
)
from mm_core.evaluation.metrics.video import FrameChange, LatentPSNR

__all__ = [
    "F1",
    "Accuracy",
    "FrameChange",
    "LatentPSNR",
    "Perplexity",
    "TextMetric",
    "anls",
    "anls_score",
    "edit_distance",
    "exact_match",
    "f1_score",
    "needed_outputs",
    "needed_texts",
    "normalized_similarity",
    "squad_normalized",
    "without_thought",
]

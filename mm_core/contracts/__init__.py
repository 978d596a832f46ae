"""Contracts between rooms: protocols, typed batches, derived randomness."""

from mm_core.contracts.batch import Batch, Clip, FailureRecord, Loss, SampleKey, SampleRequest, VideoTextBatch
from mm_core.contracts.components import (
    Autoencoder,
    Frozen,
    NoiseScheduler,
    Posterior,
    Predictor,
    TextEncoder,
    Tokenizer,
    VelocityField,
)
from mm_core.contracts.dtypes import torch_dtype
from mm_core.contracts.randomness import Randomness
from mm_core.contracts.running import (
    Dataset,
    Engine,
    EnginePlan,
    LRSchedule,
    RandomisedDataset,
    Task,
    Tracker,
    VideoInfo,
    VideoReader,
)

__all__ = [
    "Autoencoder",
    "Batch",
    "Clip",
    "Dataset",
    "Engine",
    "EnginePlan",
    "FailureRecord",
    "Frozen",
    "LRSchedule",
    "Loss",
    "NoiseScheduler",
    "Posterior",
    "Predictor",
    "RandomisedDataset",
    "Randomness",
    "SampleKey",
    "SampleRequest",
    "Task",
    "TextEncoder",
    "Tokenizer",
    "Tracker",
    "VelocityField",
    "VideoInfo",
    "VideoReader",
    "VideoTextBatch",
    "torch_dtype",
]

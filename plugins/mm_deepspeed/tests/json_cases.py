"""JSON files in the manner of DeepSpeed's and the Trainer's documentation, and runs that fit them."""

from pathlib import Path

from mm_core.contracts import TrainingFacts
from mm_core.schema.fields import ComponentConfig

FOLDER = Path(__file__).parent / "jsons"
CASES: dict[str, str | None] = {
    **dict.fromkeys(["stage0", "stage1", "stage2", "stage3", "trainer_zero2_auto", "trainer_zero3_auto"]),
    **dict.fromkeys(["bf16_stage1", "fp16_stage2", "comments", "offload_cpu_stage1", "stage3_activation"]),
    **dict.fromkeys(["adam_l2", "warmup_cosine", "communication"]),
    "bert_lamb": "optimizer.type Lamb is not taken over (only Adam, AdamW)",
    "one_bit": "optimizer.type OneBitAdam is not taken over (only Adam, AdamW)",
    "fp16_stage0": "fp16.enabled is true at stage 0",
    "nvme": "offload_optimizer.device nvme is not taken over",
    "sparse_attention": "sparse_attention is not taken over",
    "misspelt": "gradient_cliping is not a key of DeepSpeed; did you mean 'gradient_clipping'",
}
"""File in `jsons` without its ending -> what its error contains; None for files that run."""
ACCEPTED = [name for name, sentence in CASES.items() if sentence is None]


def facts_of(name: str = "stage0", shares: int = 1) -> TrainingFacts:
    """The facts of a run that the JSON file `name` fits: 2 samples x 3 micro-batches, 100 steps."""
    kind, decay = ("core/adam", 0.01) if name == "adam_l2" else ("core/adamw", 0.0)
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
    warmup = {"warmup_steps": 10, "warmup_fraction": None, "warmup_init": 0.0}
    warmup["warmup_type"] = "log" if name == "trainer_zero2_auto" else "linear"  # as its WarmupLR does
    schedule = ComponentConfig("lr_schedule", "core/constant", warmup)
    if name == "warmup_cosine":
        schedule = ComponentConfig("lr_schedule", "core/cosine", {**warmup, "min_lr": 1e-4})
    return TrainingFacts(
        steps=100,
        micro_batch_size=2,
        accumulation=3,
        shares=shares,
        clip_grad_norm=1.0,
        optimizer=ComponentConfig("optimizer", kind, adam),
        lr_schedule=schedule,
    )

"""The built-in plugin `core`: the components that mm_core ships, registered like any plugin's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mm_core.plugin.component import Component
from mm_core.plugin.hookspecs import hookimpl

_WARMUP = {"warmup_steps": 4}
"""The small instance of a learning-rate schedule."""

_SUMMARIES = {
    "text_to_video": "diffusion training of captioned clips; sampling with classifier-free guidance",
    "pretrained": "any Transformers model with its own loss, exact over tokens or rows of the global batch",
    "fsdp2": "PyTorch fully_shard: one process, replicated, sharded and hybrid",
    "flow_match": "rectified flow: x_t = (1-sigma) x0 + sigma eps, target eps - x0, Euler sampling",
    "pixel": "lossless space-to-depth and time-to-depth; no weights",
    "bytes": "deterministic byte-level hidden states; nothing to download",
    "hf_text": "any Transformers text encoder directory, frozen",
    "video_text": "clips and captions from a JSON or JSONL annotation file",
    "media_text": "captioned images and clips: tables, folders with .txt captions and WebDataset tars, mixed",
    "shapes": "captioned clips of moving shapes, drawn in memory: to try a model without any file",
    "conversations": "chats about images, by the model's own processor and chat template, optionally packed",
    "text_rows": "texts of a JSON, CSV, TSV or Parquet table with labels, for Transformers models",
    "pyav": "FFmpeg through PyAV; detects corrupt frames, honours rotation and variable frame rates",
    "decord": "decord 0.6 on x86_64 Linux, decord2 on aarch64 (does not detect corrupt frames)",
    "resize_crop": "short side, stretched or as it is; central, random or fixed crop; mirrored; mean and std",
    "torchcodec": "torchcodec with the machine's FFmpeg (extra: torchcodec; does not detect corrupt frames)",
    "adamw": "torch.optim.AdamW (decoupled weight decay)",
    "adam": "torch.optim.Adam (L2 decay)",
    "adamw_bf16": "AdamW with moments in bfloat16, rounded at random",
    "adamw_8bit": "torchao's AdamW with 8-bit moments (extra: low-bit)",
    "muon": "torch.optim.Muon for matrices, AdamW for the rest (torch >= 2.9)",
    "constant": "linear warm-up, then constant",
    "linear": "linear warm-up, then a straight line down to min_lr",
    "cosine": "linear warm-up, then half a cosine down to min_lr",
    "polynomial": "linear warm-up, then (1 - progress)^power down to min_lr",
    "warmup_decay": "logarithmic warm-up, then a straight line down to min_lr",
    "one_cycle": "min_lr to the base rate and back, then below min_lr",
    "lr_range_test": "from the base rate up, to find the largest rate that trains",
    "wsd": "warm-up, stable, decay over the last decay_fraction of the run",
    "tensorboard": "scalars and clips under <run>/tensorboard (extra: tensorboard)",
    "wandb": "Weights & Biases, online or offline (extra: wandb)",
    "mlflow": "an MLflow server or store (extra: mlflow)",
    "jsonl": "<run>/metrics.jsonl, one object per logged step (always on)",
    "diffusers": "a Diffusers model folder or pipeline: config.json, diffusion_pytorch_model.safetensors",
    "transformers": "a Transformers model folder: config.json, model.safetensors, tokenizer files",
    "safetensors": "one file or sharded with an index, under the component's own names",
    "dcp": "a folder of torch.distributed.checkpoint, as FSDP2 trainers save it; only read",
    "latent_psnr": "peak signal-to-noise ratio of the one-step clean estimate, in dB",
    "frame_change": "mean absolute difference of successive frames of sampled clips; near 0 is frozen video",
    "accuracy": "share of correctly predicted labels: of rows, or of tokens that count",
    "f1": "F1 score over classes: macro, micro or weighted",
    "perplexity": "exp of the mean cross entropy over the labels that count",
    "exact_match": "share of rows whose text is one of the references",
    "anls": "average normalized Levenshtein similarity of texts and references",
    "command": "runs a user command on run events: to send a message, copy files, start a job",
}
"""Summary of each component in `mm plugins list`."""

_PAPERS = {
    "fsdp2": "https://arxiv.org/abs/2304.11277",
    "flow_match": "https://arxiv.org/abs/2209.03003",
    "adamw": "https://arxiv.org/abs/1711.05101",
    "adam": "https://arxiv.org/abs/1412.6980",
    "adamw_bf16": "https://arxiv.org/abs/1502.02551",
    "adamw_8bit": "https://arxiv.org/abs/2110.02861",
    "muon": "https://arxiv.org/abs/2502.16982",
    "cosine": "https://arxiv.org/abs/1608.03983",
    "one_cycle": "https://arxiv.org/abs/1803.09820",
    "lr_range_test": "https://arxiv.org/abs/1803.09820",
    "wsd": "https://arxiv.org/abs/2405.18392",
    "anls": "https://arxiv.org/abs/1905.13648",
}
"""The paper that describes what a component implements."""


def _core(
    name: str,
    target: str,
    config: str | None = None,
    state_tensors: int | None = None,
    tiny: Mapping[str, object] | str = MappingProxyType({}),
    expected_failures: Mapping[str, str] = MappingProxyType({}),
    examples: str | None = None,
    check: str | None = None,
) -> Component:
    """A component whose target is in mm_core and whose config is in `builtin.configs`.

    Args:
        name: name of the component.
        target: `module:Name` in mm_core.
        config: `module:Name` in `builtin.configs`.
        state_tensors: for an optimizer, the number of state tensors of a parameter's size per parameter.
        tiny: fields of a small instance, or the name of a function of `mm_core.builtin.tiny`.
        expected_failures: name of a conformance check -> why the component fails it.
        examples: name of a function of `mm_core.builtin.tiny`.
        check: `module:name` of a function in mm_core.
    """
    return Component(
        name,
        f"mm_core.{target}",
        config and f"mm_core.builtin.configs.{config}",
        _SUMMARIES[name],
        capabilities={} if state_tensors is None else {"state_tensors": state_tensors},
        paper=_PAPERS.get(name),
        tiny=f"mm_core.builtin.tiny:{tiny}" if isinstance(tiny, str) else tiny,
        expected_failures=expected_failures,
        examples=examples and f"mm_core.builtin.tiny:{examples}",
        check=check and f"mm_core.{check}",
    )


@hookimpl
def mm_tasks() -> list[Component]:
    return [
        _core(
            "text_to_video",
            "tasks.text_to_video.task:TextToVideo",
            "text_to_video:TextToVideoConfig",
            tiny="text_to_video",
        ),
        _core(
            "pretrained",
            "tasks.pretrained.task:PretrainedTask",
            "pretrained:PretrainedConfig",
            tiny="classifier",
            examples="classified_rows",
        ),
    ]


@hookimpl
def mm_engines() -> list[Component]:
    return [_core("fsdp2", "engines.fsdp2:FSDP2Engine", "engines:FSDP2Config")]


@hookimpl
def mm_schedulers() -> list[Component]:
    return [_core("flow_match", "diffusion.flow_match:FlowMatch", "diffusion:FlowMatchConfig")]


@hookimpl
def mm_autoencoders() -> list[Component]:
    size = {"spatial": 2, "temporal": 2}
    return [_core("pixel", "diffusion.encoders.pixel:PixelAutoencoder", "diffusion:PixelConfig", tiny=size)]


@hookimpl
def mm_text_encoders() -> list[Component]:
    module, size = "diffusion.encoders.text", {"hidden_size": 16, "max_length": 64}
    return [
        _core("bytes", f"{module}:ByteTextEncoder", "diffusion:ByteTextConfig", tiny=size),
        _core("hf_text", f"{module}:HFTextEncoder", "diffusion:HFTextConfig", tiny="text_encoder"),
    ]


@hookimpl
def mm_datasets() -> list[Component]:
    rows = "data.datasets"
    return [
        _core(
            "video_text",
            f"{rows}.video_text:VideoTextDataset",
            "data:VideoTextConfig",
            tiny="video_text",
            check=f"{rows}.first_rows:of_video_text",
        ),
        _core(
            "media_text",
            f"{rows}.media_text:MediaTextDataset",
            "data:MediaTextConfig",
            tiny="media_text",
            check=f"{rows}.first_rows:of_media_text",
        ),
        _core(
            "shapes",
            f"{rows}.shapes:ShapesDataset",
            "data:ShapesConfig",
            tiny={"num_frames": 4, "height": 8, "width": 16, "clips": 5},
        ),
        _core(
            "conversations",
            "tasks.conversations.dataset:Conversations",
            "conversations:ConversationsConfig",
            tiny="conversations",
            check="tasks.conversations.rows.first_rows:faults",
            expected_failures={
                "new_samples_each_epoch": "only with packing the epoch decides which rows share a sample"
            },
        ),
        _core(
            "text_rows",
            f"{rows}.text_rows:TextRowsDataset",
            "data:TextRowsConfig",
            tiny="text_rows",
            check=f"{rows}.first_rows:of_text_rows",
        ),
    ]


@hookimpl
def mm_video_readers() -> list[Component]:
    known = {"bit_rot": "decord 0.6 returns what its decoder makes of damaged frames, without a sign"}
    also = {"bit_rot": "torchcodec returns what its decoder makes of damaged frames, without a sign"}
    others = "data.media.package_readers"
    return [
        _core("pyav", "data.media.readers:PyAVReader", "data:PyAVConfig"),
        _core("decord", f"{others}:DecordReader", "data:DecordConfig", expected_failures=known),
        _core("torchcodec", f"{others}:TorchcodecReader", "data:TorchcodecConfig", expected_failures=also),
    ]


@hookimpl
def mm_transforms() -> list[Component]:
    return [_core("resize_crop", "data.media.transforms:ResizeCrop", "data:ResizeCropConfig")]


@hookimpl
def mm_optimizers() -> list[Component]:
    return [
        _core("adamw", "optim.adamw:adamw", "training:AdamWConfig", state_tensors=2),
        _core("adam", "optim.adamw:adam", "training:AdamConfig", state_tensors=2),
        _core("adamw_bf16", "optim.adamw_bf16:adamw_bf16", "training:AdamWBF16Config", state_tensors=1),
        _core("adamw_8bit", "optim.adamw_8bit:adamw_8bit", "training:AdamW8bitConfig", state_tensors=1),
        _core("muon", "optim.muon:muon", "training:MuonConfig", state_tensors=1),
    ]


@hookimpl
def mm_lr_schedules() -> list[Component]:
    return [
        _core("constant", "optim.lr_schedules:constant", "training:ConstantConfig", tiny=_WARMUP),
        _core("linear", "optim.lr_schedules:linear", "training:LinearConfig", tiny=_WARMUP),
        _core("warmup_decay", "optim.lr_schedules:linear", "training:WarmupDecayConfig", tiny=_WARMUP),
        _core("one_cycle", "optim.lr_schedules:one_cycle", "training:OneCycleConfig"),
        _core("lr_range_test", "optim.lr_schedules:lr_range_test", "training:LRRangeTestConfig"),
        _core("cosine", "optim.lr_schedules:cosine", "training:CosineConfig", tiny=_WARMUP),
        _core("polynomial", "optim.lr_schedules:polynomial", "training:PolynomialConfig", tiny=_WARMUP),
        _core("wsd", "optim.lr_schedules:wsd", "training:WSDConfig", tiny=_WARMUP),
    ]


@hookimpl
def mm_trackers() -> list[Component]:
    remote = "telemetry.trackers.remote"
    return [
        _core("tensorboard", "telemetry.trackers.local:TensorBoardTracker", "training:TensorBoardConfig"),
        _core("wandb", f"{remote}:WandbTracker", "trackers:WandbConfig", tiny={"mode": "disabled"}),
        _core("mlflow", f"{remote}:MlflowTracker", "trackers:MlflowConfig", tiny="mlflow_store"),
        _core("jsonl", "telemetry.trackers.local:JsonlTracker", "nothing:NothingConfig"),
    ]


@hookimpl
def mm_weight_formats() -> list[Component]:
    library = "weights.formats.libraries"
    return [
        _core("diffusers", f"{library}:Diffusers", examples="diffusers_model"),
        _core("transformers", f"{library}:Transformers", examples="transformers_model"),
        _core("safetensors", f"{library}:Safetensors", examples="plain_model"),
        _core("dcp", "checkpoint.dcp_format:Dcp", examples="plain_model"),
    ]


@hookimpl
def mm_metrics() -> list[Component]:
    return [
        _core("latent_psnr", "evaluation.metrics.video:LatentPSNR", "nothing:NothingConfig"),
        _core("frame_change", "evaluation.metrics.video:FrameChange", "nothing:NothingConfig"),
        _core("accuracy", "evaluation.metrics.classes:Accuracy", "nothing:NothingConfig"),
        _core("f1", "evaluation.metrics.classes:F1", "metrics:F1Config"),
        _core("perplexity", "evaluation.metrics.classes:Perplexity", "nothing:NothingConfig"),
        _core("exact_match", "evaluation.metrics.texts:exact_match", "metrics:ExactMatchConfig"),
        _core("anls", "evaluation.metrics.texts:anls", "metrics:ANLSConfig"),
    ]


@hookimpl
def mm_callbacks() -> list[Component]:
    return [_core("command", "telemetry.command_callback:Command", "callbacks:CommandConfig", tiny="command")]

"""The built-in plugin `core`: what mm_core ships, registered through the same hooks as everybody's."""

from __future__ import annotations

from mm_core.plugin.component import Component
from mm_core.plugin.hookspecs import hookimpl

_CONFIG = "mm_core.builtin.configs"


@hookimpl
def mm_tasks() -> list[Component]:
    return [
        Component(
            name="text_to_video",
            target="mm_core.tasks.text_to_video.task:TextToVideo",
            config=f"{_CONFIG}.text_to_video:TextToVideoConfig",
            summary="diffusion training of captioned clips; sampling with classifier-free guidance",
        ),
        Component(
            name="pretrained",
            target="mm_core.tasks.pretrained.task:PretrainedTask",
            config=f"{_CONFIG}.pretrained:PretrainedConfig",
            summary="any Transformers model with its own loss, exact over tokens or rows of the global batch",
        ),
    ]


@hookimpl
def mm_engines() -> list[Component]:
    return [
        Component(
            name="fsdp2",
            target="mm_core.engines.fsdp2:FSDP2Engine",
            config=f"{_CONFIG}.engines:FSDP2Config",
            summary="PyTorch fully_shard: one process, replicated, sharded and hybrid",
            paper="https://arxiv.org/abs/2304.11277",
        )
    ]


@hookimpl
def mm_schedulers() -> list[Component]:
    return [
        Component(
            name="flow_match",
            target="mm_core.diffusion.flow_match:FlowMatch",
            config=f"{_CONFIG}.diffusion:FlowMatchConfig",
            summary="rectified flow: x_t = (1-sigma) x0 + sigma eps, target eps - x0, Euler sampling",
            paper="https://arxiv.org/abs/2209.03003",
        )
    ]


@hookimpl
def mm_autoencoders() -> list[Component]:
    return [
        Component(
            name="pixel",
            target="mm_core.diffusion.encoders.pixel:PixelAutoencoder",
            config=f"{_CONFIG}.diffusion:PixelConfig",
            summary="lossless space-to-depth and time-to-depth; no weights",
        )
    ]


@hookimpl
def mm_text_encoders() -> list[Component]:
    return [
        Component(
            name="bytes",
            target="mm_core.diffusion.encoders.text:ByteTextEncoder",
            config=f"{_CONFIG}.diffusion:ByteTextConfig",
            summary="deterministic byte-level hidden states; nothing to download",
        ),
        Component(
            name="hf_text",
            target="mm_core.diffusion.encoders.text:HFTextEncoder",
            config=f"{_CONFIG}.diffusion:HFTextConfig",
            summary="any Transformers text encoder directory, frozen",
        ),
    ]


@hookimpl
def mm_datasets() -> list[Component]:
    return [
        Component(
            name="video_text",
            target="mm_core.data.datasets.video_text:VideoTextDataset",
            config=f"{_CONFIG}.data:VideoTextConfig",
            summary="clips and captions from a JSON or JSONL annotation file",
        ),
        Component(
            name="text_rows",
            target="mm_core.data.datasets.text_rows:TextRowsDataset",
            config=f"{_CONFIG}.data:TextRowsConfig",
            summary="texts of a JSON, CSV, TSV or Parquet table with labels, for Transformers models",
        ),
    ]


@hookimpl
def mm_video_readers() -> list[Component]:
    return [
        Component(
            name="pyav",
            target="mm_core.data.media.readers:PyAVReader",
            config=f"{_CONFIG}.data:PyAVConfig",
            summary="FFmpeg through PyAV; notices corrupt frames, honours rotation and variable frame rates",
        ),
        Component(
            name="decord",
            target="mm_core.data.media.readers:DecordReader",
            config=f"{_CONFIG}.data:DecordConfig",
            summary="decord 0.6 (x86_64 Linux wheels only; no AV1, does not notice bit rot)",
        ),
    ]


@hookimpl
def mm_optimizers() -> list[Component]:
    return [
        Component(
            name="adamw",
            target="mm_core.optim.adamw:adamw",
            config=f"{_CONFIG}.training:AdamWConfig",
            summary="torch.optim.AdamW (decoupled weight decay)",
            capabilities={"state_tensors": 2},
            paper="https://arxiv.org/abs/1711.05101",
        ),
        Component(
            name="adamw_8bit",
            target="mm_core.optim.adamw_8bit:adamw_8bit",
            config=f"{_CONFIG}.training:AdamW8bitConfig",
            summary="torchao's AdamW with moments of 8 bits (extra: low-bit)",
            capabilities={"state_tensors": 1},
            paper="https://arxiv.org/abs/2110.02861",
        ),
        Component(
            name="muon",
            target="mm_core.optim.muon:muon",
            config=f"{_CONFIG}.training:MuonConfig",
            summary="torch.optim.Muon for matrices, AdamW for the rest (torch >= 2.9)",
            capabilities={"state_tensors": 1},
            paper="https://arxiv.org/abs/2502.16982",
        ),
    ]


@hookimpl
def mm_lr_schedules() -> list[Component]:
    return [
        Component(
            name="constant",
            target="mm_core.optim.lr_schedules:constant",
            config=f"{_CONFIG}.training:ConstantConfig",
            summary="linear warm-up, then constant",
        ),
        Component(
            name="linear",
            target="mm_core.optim.lr_schedules:linear",
            config=f"{_CONFIG}.training:LinearConfig",
            summary="linear warm-up, then a straight line down to min_lr",
        ),
        Component(
            name="cosine",
            target="mm_core.optim.lr_schedules:cosine",
            config=f"{_CONFIG}.training:CosineConfig",
            summary="linear warm-up, then half a cosine down to min_lr",
            paper="https://arxiv.org/abs/1608.03983",
        ),
        Component(
            name="polynomial",
            target="mm_core.optim.lr_schedules:polynomial",
            config=f"{_CONFIG}.training:PolynomialConfig",
            summary="linear warm-up, then (1 - progress)^power down to min_lr",
        ),
        Component(
            name="wsd",
            target="mm_core.optim.lr_schedules:wsd",
            config=f"{_CONFIG}.training:WSDConfig",
            summary="warm-up, stable, decay over the last decay_fraction of the run",
            paper="https://arxiv.org/abs/2405.18392",
        ),
    ]


@hookimpl
def mm_trackers() -> list[Component]:
    return [
        Component(
            name="tensorboard",
            target="mm_core.telemetry.trackers.local:TensorBoardTracker",
            config=f"{_CONFIG}.training:TensorBoardConfig",
            summary="scalars and clips under <run>/tensorboard",
        ),
        Component(
            name="wandb",
            target="mm_core.telemetry.trackers.remote:WandbTracker",
            config=f"{_CONFIG}.trackers:WandbConfig",
            summary="Weights & Biases, online or offline (extra: wandb)",
        ),
        Component(
            name="mlflow",
            target="mm_core.telemetry.trackers.remote:MlflowTracker",
            config=f"{_CONFIG}.trackers:MlflowConfig",
            summary="an MLflow server or store (extra: mlflow)",
        ),
        Component(
            name="jsonl",
            target="mm_core.telemetry.trackers.local:JsonlTracker",
            config=f"{_CONFIG}.training:JsonlConfig",
            summary="<run>/metrics.jsonl, one object a logged step (always on)",
        ),
    ]


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [
        Component(
            name="diffusers",
            target="mm_core.weights.formats.libraries:Diffusers",
            summary="a Diffusers model folder or pipeline: config.json, diffusion_pytorch_model.safetensors",
        ),
        Component(
            name="transformers",
            target="mm_core.weights.formats.libraries:Transformers",
            summary="a Transformers model folder: config.json, model.safetensors, tokenizer files",
        ),
        Component(
            name="safetensors",
            target="mm_core.weights.formats.libraries:Safetensors",
            summary="one file or sharded with an index, under the component's own names",
        ),
    ]


@hookimpl
def mm_metrics() -> list[Component]:
    return [
        Component(
            name="latent_psnr",
            target="mm_core.metrics.video:LatentPSNR",
            config=f"{_CONFIG}.metrics:LatentPSNRConfig",
            summary="peak signal-to-noise ratio of the one-step clean estimate, in dB",
        ),
        Component(
            name="frame_change",
            target="mm_core.metrics.video:FrameChange",
            config=f"{_CONFIG}.metrics:FrameChangeConfig",
            summary="mean absolute difference of successive frames of sampled clips; near 0 is frozen video",
        ),
        Component(
            name="accuracy",
            target="mm_core.metrics.classes:Accuracy",
            config=f"{_CONFIG}.metrics:AccuracyConfig",
            summary="share of labels that were predicted: of rows, or of tokens that count",
        ),
        Component(
            name="f1",
            target="mm_core.metrics.classes:F1",
            config=f"{_CONFIG}.metrics:F1Config",
            summary="F1 score over classes: macro, micro or weighted",
        ),
        Component(
            name="perplexity",
            target="mm_core.metrics.classes:Perplexity",
            config=f"{_CONFIG}.metrics:PerplexityConfig",
            summary="exp of the mean cross entropy over the labels that count",
        ),
        Component(
            name="exact_match",
            target="mm_core.metrics.texts:exact_match",
            config=f"{_CONFIG}.metrics:ExactMatchConfig",
            summary="share of rows whose text is one of the references",
        ),
        Component(
            name="anls",
            target="mm_core.metrics.texts:anls",
            config=f"{_CONFIG}.metrics:ANLSConfig",
            summary="average normalized Levenshtein similarity of texts and references",
            paper="https://arxiv.org/abs/1905.13648",
        ),
    ]


@hookimpl
def mm_callbacks() -> list[Component]:
    return [
        Component(
            name="command",
            target="mm_core.telemetry.command_callback:Command",
            config=f"{_CONFIG}.callbacks:CommandConfig",
            summary="runs a program at events of a run: a message, a copy, a queue",
        )
    ]

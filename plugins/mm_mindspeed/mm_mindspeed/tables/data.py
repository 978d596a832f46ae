"""data.json of clips and captions."""

from __future__ import annotations

from typing import Any

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.tables.converts import one_of, path

_TEXT = "captions are cleaned as the text encoder's pipeline does it"
_READ = "how their reader works"
_SHORT = "a clip that is too short is left out, and counted in data_failures.jsonl"
_CAPTION = "the caption is dropped as often; absent, theirs drops a tenth of them"
_STAGES = {
    *("ResizeVideo", "CenterCropResizeVideo", "ResizeCropVideo", "ResizeToFill", "ToTensorVideo", "norm_fun"),
    "ToTensorAfterResize",
}


def interpolation(stages: Any) -> str:
    """The interpolation of a pipeline of transforms that resizes, crops, and scales to -1 and 1."""
    found = "bilinear"
    for stage in stages:
        name, param = stage["trans_type"], stage.get("param", {})
        if name not in _STAGES:
            raise ValueError(f"{name} is not a transform here")
        if name == "norm_fun" and {str(param.get("mean")), str(param.get("std"))} != {"0.5"}:
            raise ValueError("pixels are scaled to -1 and 1 here: mean and std of 0.5")
        found = param.get("interpolation_mode", found)
    return found


DATA: tuple[Row, ...] = (
    Key("dataset_param.dataset_type", note="t2v, i2v: data.train; feature: data.cache over the same clips"),
    Key("dataset_param.basic_parameters.data_path", note="the sources: each line is a folder and a table"),
    Key("dataset_param.basic_parameters.data_folder", note="the folder of a source"),
    Drop("dataset_param.basic_parameters.data_storage_mode", "rows are read as they are", only=("combine",)),
    Drop("dataset_param.basic_parameters.repeat_time", "each row once", only=(1, 1.0)),
    Key("dataset_param.preprocess_parameters.num_frames", "data.train.num_frames"),
    Key("dataset_param.preprocess_parameters.max_height", note="height, or max_height of buckets"),
    Key("dataset_param.preprocess_parameters.max_width", note="width, or max_width of buckets"),
    Key("dataset_param.preprocess_parameters.train_fps", "data.train.fps"),
    Key("dataset_param.preprocess_parameters.cfg", "task.caption_dropout", float),
    Default("dataset_param.preprocess_parameters.cfg", "task.caption_dropout", 0.1, _CAPTION),
    Drop("dataset_param.preprocess_parameters.force_resolution", "one size: height, width", only=(True,)),
    Differs(
        "dataset_param.preprocess_parameters.force_resolution",
        "each clip keeps its own size up to max_hxw; here it goes to the nearest bucket of that area",
    ),
    Drop("dataset_param.preprocess_parameters.max_hxw", "the area of max_height and max_width"),
    Drop("dataset_param.preprocess_parameters.hw_stride", "buckets are multiples of what the model takes"),
    Drop(
        "dataset_param.preprocess_parameters.hw_aspect_thr", "buckets go from 1:2 to 2:1, and crop the rest"
    ),
    Drop("dataset_param.preprocess_parameters.min_num_frames", _SHORT),
    Drop("dataset_param.preprocess_parameters.drop_short_ratio", _SHORT, only=(0, 0.0)),
    Differs("dataset_param.preprocess_parameters.drop_short_ratio", "short clips go to shorter buckets here"),
    Drop("dataset_param.preprocess_parameters.frame_interval", "frames are taken at fps", only=(1,)),
    Drop("dataset_param.preprocess_parameters.speed_factor", "clips keep their speed", only=(1, 1.0)),
    Drop("dataset_param.preprocess_parameters.auto_interval", "frames are taken at fps"),
    Drop("dataset_param.preprocess_parameters.truncate_t_by_sp", "for their sequence parallelism"),
    Drop("dataset_param.preprocess_parameters.keep_last", _READ, only=(False,)),
    Drop("dataset_param.preprocess_parameters.zero_start", _READ, only=(True,)),
    Drop("dataset_param.preprocess_parameters.video_processor_type", _READ),
    Drop("dataset_param.preprocess_parameters.image_processer_type", _READ),
    Drop("dataset_param.preprocess_parameters.image_reader_type", _READ),
    Key(
        "dataset_param.preprocess_parameters.video_reader_type",
        "data.train.reader.type",
        one_of({"DecordVideo": "decord", "torchvision": "pyav", "av": "pyav"}),
    ),
    *(
        Key(f"dataset_param.preprocess_parameters.train_pipeline.{name}", ours, interpolation)
        for name, ours in (
            *(("video", "data.train.interpolation"), ("video_and_first_frame", "data.train.interpolation")),
        )
    ),
    *(
        Key(f"dataset_param.preprocess_parameters.train_pipeline.{name}", "", interpolation, "as `video`")
        for name in ("video_only", "image")
    ),
    Drop(
        "dataset_param.preprocess_parameters.train_pipeline.first_frame_*",
        "a given frame is the clip's own, resized with it; CLIP's image as its processor has it",
    ),
    Drop("dataset_param.use_text_processer", _TEXT),
    Drop("dataset_param.enable_text_preprocessing", _TEXT),
    Drop("dataset_param.text_preprocess_methods", _TEXT),
    Drop("dataset_param.use_clean_caption", _TEXT),
    Drop("dataset_param.support_chinese", _TEXT),
    Key("dataset_param.tokenizer_config.from_pretrained", "task.text_encoder.tokenizer", path),
    Key("dataset_param.tokenizer_config.0.from_pretrained", "task.text_encoder.tokenizer", path),
    Key("dataset_param.tokenizer_config*.model_max_length", "task.text_encoder.max_length"),
    Drop("dataset_param.tokenizer_config.*", "the text encoder's tokenizer"),
    Drop("dataloader_param.dataloader_mode", "batches of one size", only=("sampler",)),
    Key("dataloader_param.dataloader_mode", "data.loader.mode", one_of({"variable": "variable"})),
    Key("dataloader_param.sampler_type", note="with shuffle: data.loader.sampler"),
    Key("dataloader_param.shuffle", note="with sampler_type: data.loader.sampler"),
    Key("dataloader_param.drop_last", "data.loader.drop_last"),
    Key("dataloader_param.pin_memory", "data.loader.pin_memory"),
    Key("dataloader_param.num_workers", "data.loader.workers"),
    Key("dataloader_param.prefetch_factor", "data.loader.prefetch"),
    Drop("dataloader_param.group_data", "clips of one size share a batch in buckets anyway"),
    Drop("dataloader_param.group_frame", "buckets differ in frames, aspect and size", only=(False,)),
    Key("dataloader_param.group_frame", "data.loader.group_frame"),
    Drop("dataloader_param.group_resolution", "buckets differ in frames, aspect and size", only=(False,)),
    Key("dataloader_param.group_resolution", "data.loader.group_resolution"),
    Drop("dataloader_param.initial_global_step_for_sampler", "a resumed run knows its place"),
    Drop("dataloader_param.priority_mode", "for their buckets"),
    Drop("dataloader_param.collate_param*", "samples of clips are stacked"),
)
"""Keys of data.json, for clips."""

"""data.json of clips and captions."""

from __future__ import annotations

from typing import Any

from mm_core.interchange import Default, Differs, Drop, Key, Row
from mm_mindspeed.tables.converts import always, drops, one_of, path, same, under

_TEXT = "captions are cleaned as the text encoder's pipeline does it"
_READ = "how their reader works"
_SHORT = "a clip that is too short is left out, and counted in data_failures.jsonl"
_READERS = {"DecordVideo": "decord", "torchvision": "pyav", "av": "pyav"}
RESIZES = ("ResizeVideo", "CenterCropResizeVideo", "ResizeCropVideo", "ResizeToFill")
_STARTS = {"OpensoraplanVideoProcessor": True, "VACEVideoProcessor": False}
_STAGES = (*RESIZES, "ToTensorVideo", "norm_fun", "ToTensorAfterResize")


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


P = "dataset_param.preprocess_parameters."
_BUCKETS, _ONE_SIZE = f"{P}force_resolution=false", f"{P}force_resolution!=false"
_VACE = f"{P}video_processor_type"
_TENTH = "absent, theirs drops a tenth of the captions"
_NEVER = "features of captions are never dropped"
_KEPT = "clips that are too short are left out at one size here, and go to shorter buckets where sizes differ"
_ORDER = "data.loader.sampler"

_BASIC = under(
    "dataset_param.basic_parameters.",
    Key("data_path", note="the sources: each line is a folder and a table"),
    Key("data_folder", note="the folder of a source"),
    Drop("data_storage_mode", "rows are read as they are", only=("combine",)),
    Drop("repeat_time", "each row once", only=(1, 1.0)),
)
_PREPROCESS = under(
    P,
    Key("num_frames", "data.train.num_frames"),
    Key("max_height", "data.train.max_height", absent=480, given=_BUCKETS),
    Key("max_width", "data.train.max_width", absent=640, given=_BUCKETS),
    Key("max_height", "data.train.height", absent=480, given=_ONE_SIZE),
    Key("max_width", "data.train.width", absent=640, given=_ONE_SIZE),
    Key("auto_interval", "data.train.fps", always(None), "every frame is taken", only=(False,)),
    Key("auto_interval", note="frames are taken at train_fps"),
    Key("train_fps", "data.train.fps", absent=24, given=f"{P}auto_interval!=false"),
    Key("train_fps", note="nothing: every frame is taken"),
    Key(
        "cfg", "task.caption_dropout", float, _TENTH, absent=0.1, given="dataset_param.dataset_type!=feature"
    ),
    Key("cfg", note="nothing: features of captions are never dropped"),
    Drop("force_resolution", "one size: height, width", only=(True,)),
    Differs("force_resolution", "each clip keeps its own size up to max_hxw; here the nearest bucket has it"),
    Key("max_hxw", note="max_height x max_width, the largest area of buckets", given=_BUCKETS),
    Drop("max_hxw", "the area of max_height and max_width"),
    Drop("hw_stride", "buckets are multiples of what the model takes"),
    Differs("hw_aspect_thr", "clips of other aspects are cropped here; theirs leaves them out"),
    Drop("min_num_frames", _SHORT),
    Key("drop_short_ratio", note="nothing", given=f"{_VACE}=vacevideoprocessor"),
    Drop("drop_short_ratio", _SHORT, only=(1,), given=_ONE_SIZE),
    Drop("drop_short_ratio", "short clips go to shorter buckets", only=(0,), given=_BUCKETS),
    Differs("drop_short_ratio", _KEPT),
    Default("drop_short_ratio", "", 1.0, _KEPT, given=f"{_BUCKETS} {_VACE}!=vacevideoprocessor"),
    Drop("frame_interval", "frames are taken at fps, or all of them", only=(1,)),
    Drop("speed_factor", "clips keep their speed", only=(1, 1.0)),
    Drop("truncate_t_by_sp", "for their sequence parallelism"),
    Drop("keep_last", _READ, only=(False,)),
    Drop("zero_start", _READ, only=(True,)),
    Key("video_processor_type", "data.train.random_start", one_of(_STARTS), "longer clips begin anywhere"),
    *drops("image_processer_type image_reader_type", _READ),
    Key("video_reader_type", "data.train.reader.type", one_of(_READERS)),
    Key("train_pipeline.video", "data.train.interpolation", interpolation),
    Key("train_pipeline.video_and_first_frame", "data.train.interpolation", interpolation),
    Key("train_pipeline.video_only", "", interpolation, "as `video`"),
    Key("train_pipeline.image", "", interpolation, "as `video`"),
    Drop("train_pipeline.first_frame_*", "a given frame is the clip's own; CLIP's as it takes it"),
)
LOADER = under(
    "dataloader_param.",
    Key("shuffle", _ORDER, always("sequential"), only=(False,)),
    Key("shuffle", note=f"with sampler_type: {_ORDER}"),
    Key("sampler_type", _ORDER, always("sequential"), only=("SequentialSampler",)),
    Key("sampler_type", _ORDER, always("random"), absent="", given="dataloader_param.shuffle!=false"),
    Key("sampler_type", note="nothing: samples are not shuffled"),
    Drop("dataloader_mode", "batches as the sampler makes them", only=("sampler",)),
    *same("drop_last pin_memory", "data.loader"),
    Key("num_workers", "data.loader.workers"),
    Key("prefetch_factor", "data.loader.prefetch"),
)
"""Keys of loaders, of clips and of conversations."""

DATA: tuple[Row, ...] = (
    Key("dataset_param.dataset_type", "task.caption_dropout", always(0.0), _NEVER, only=("feature",)),
    Key("dataset_param.dataset_type", note="data.train.type: media_text"),
    *_BASIC,
    *_PREPROCESS,
    *under("dataset_param.", *drops("use_text_processer *text_preprocess* use_clean_caption", _TEXT)),
    Drop("dataset_param.support_chinese", _TEXT),
    Key("dataset_param.tokenizer_config.from_pretrained", "task.text_encoder.tokenizer", path),
    Key("dataset_param.tokenizer_config.0.from_pretrained", "task.text_encoder.tokenizer", path),
    Drop(
        "dataset_param.tokenizer_config*.model_max_length",
        "of features, before",
        given="dataset_param.dataset_type=feature",
    ),
    Key("dataset_param.tokenizer_config*.model_max_length", "task.text_encoder.max_length"),
    Drop("dataset_param.tokenizer_config.*", "the text encoder's tokenizer"),
    *LOADER,
    *under(
        "dataloader_param.",
        Key("dataloader_mode", "data.loader.mode", one_of({"variable": "variable"})),
        Drop("group_data", "clips of one size share a batch in buckets anyway"),
        Drop("group_frame", "buckets differ in frames, aspect and size", only=(False,)),
        Drop("group_resolution", "buckets differ in frames, aspect and size", only=(False,)),
        *same("group_frame group_resolution", "data.loader"),
        Drop("initial_global_step_for_sampler", "a resumed run knows its place"),
        Drop("priority_mode", "for their buckets"),
        Drop("collate_param*", "samples of clips are stacked"),
    ),
)
"""Keys of data.json, for clips."""

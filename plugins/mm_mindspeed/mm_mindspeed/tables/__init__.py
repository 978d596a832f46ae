"""The keys of MindSpeed-MM's files, and what each becomes; a page of the docs is made of them."""

from mm_mindspeed.tables.data import DATA
from mm_mindspeed.tables.engine import ENGINE
from mm_mindspeed.tables.flags import FLAGS, LAUNCHER
from mm_mindspeed.tables.language import LANGUAGE, LANGUAGE_DATA
from mm_mindspeed.tables.one_file import ONE_FILE
from mm_mindspeed.tables.video import HUNYUAN, VIDEO

TABLES = {
    "Flags of the launch script, or `gpt_args` of a YAML": FLAGS,
    "Flags of torchrun and msrun": LAUNCHER,
    "fsdp2_config.yaml and zero_config.yaml": ENGINE,
    "model.json of Wan": VIDEO,
    "model.json of HunyuanVideo 1.5": HUNYUAN,
    "data.json of clips": DATA,
    "model.json of vision-language models": LANGUAGE,
    "data.json of conversations": LANGUAGE_DATA,
    "The YAML of FSDP2 runs": ONE_FILE,
}
"""Table -> its rows, by the title on the page."""

HEAD = """\
# Coming from MindSpeed-MM

<!-- made -->

The plugin `mm-mindspeed` reads the runs of MindSpeed-MM: launch scripts with `model.json` and `data.json`,
with or without `fsdp2_config.yaml`; the same under `gpt_args` of a YAML; and the one YAML of newer runs.

```bash
pip install ./ ./plugins/mm_mindspeed
mm migrate examples/wan2.1/1.3b/t2v --out run.yaml    # a folder, a script, or a YAML of a run
mm-train --config run.yaml
```

A folder with several scripts gives a config for each: `run.yaml` is of `pretrain.sh`,
`run_finetune_lora.yaml` of `finetune_lora.sh`. Scripts are read, never run. What is printed:
[Coming from another tool](migrate.md). A run of a model that is not known here is an error, which names it
and those that are known.

## Weights, both ways

Saves of Wan are read as they are: the folder that `--load` names (`release`) or `--save` wrote (the newest
`iter_...`), as `mp_rank_00/model_optim_rng.pt` or as torch_dcp of any number of ranks. Their optimizer states
are not taken.

```yaml
init_from: {path: ckpt/wan2.1_mm}
```

`mm import --from ckpt/wan2.1_mm` writes the same as the first checkpoint of a run, and
`mm export --to mindspeed/wan` a folder that MindSpeed-MM loads. Saves of other models as torch_dcp are read
too, where their names are those of the model's library ([`dcp`](weights.md#formats)). Saves that are divided
by tensor or pipeline parallelism are joined first with its own `mm-convert`.

## What changes numbers without a word

Each of these is written out in the config, with a comment.

| there | here |
|---|---|
| `cfg` is absent | a tenth of the captions is dropped: `task.caption_dropout: 0.1` |
| `--clip-grad 0.0` | gradients are not clipped: `train.clip_grad_norm: null` |
| `diffusion` has no `shift`, `sigma_min`, `extra_one_step` | 3, 0.003 / 1.002, false; ours: 5, 0, true |
| one timestep for a micro-batch | `task.scheduler.draw_per: micro_batch`; ours is one for each sample |
| the loss is weighted by a gaussian of the timestep | `task.scheduler.loss_weighting: gaussian` |
| `--lr-warmup-init` | `lr_schedule.warmup_init`, the rate of the first step; 0 changes no weight |
| `--lr-decay-style` is absent | the rate falls to 0 in a straight line |
| clips are resized bilinearly | `data.train.interpolation: bilinear`; ours is bicubic |
| `antialias` is absent or false | **no counterpart**: frames are resized with antialiasing |
| `auto_interval: false` | `data.train.fps: null`: every frame; else `train_fps`, 24 by default |
| `OpensoraplanVideoProcessor` | longer clips begin anywhere: `data.train.random_start: true` |
| clips of other aspects, by `hw_aspect_thr`, are left out | **no counterpart**: they are cropped |
| `force_resolution: false`, no `drop_short_ratio` | **no counterpart**: theirs leaves short clips out |
| `--load` of a training's save goes on with its step | `init_from` begins at step 0, which is printed |
| `--lora-target-modules`, `lora.enable: true` | only these make adapters; by default of rank 8 and alpha 16 |
| a clip that cannot be read is replaced by one at random | it is left out, and counted |
| `cutoff_len` is absent | `data.train.max_length: 1024`; of scripts it is `--seq-length` |
| `load_video_features` | their .pt files are not read: `data.cache` encodes each clip once |
| `loss_type` is absent or `default` | **no counterpart**: a mean over a micro-batch; ours: the global batch |
"""

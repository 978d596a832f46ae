"""The keys of the other tools, and what each becomes; a page of the docs is made of them."""

from mm_trainers.tables.aitoolkit import JOB, PROCESS
from mm_trainers.tables.arguments import ARGUMENTS
from mm_trainers.tables.llamafactory import DATA_SET, LLAMA_FACTORY, LORA
from mm_trainers.tables.musubi import DATASETS, FLAGS, LAUNCHER, NETWORK, ONE, TWO

TABLES = {
    "ai-toolkit: the file": JOB,
    "ai-toolkit: a process": PROCESS,
    "musubi-tuner: flags of the training": (*ONE, TWO[0], *NETWORK, *FLAGS),
    "musubi-tuner: flags of the launcher": LAUNCHER,
    "musubi-tuner: the TOML of datasets": DATASETS,
    "LLaMA-Factory: its own keys": (*LORA, *LLAMA_FACTORY[: -len(ARGUMENTS)]),
    "LLaMA-Factory: dataset_info.json": DATA_SET,
    "TrainingArguments, also in LLaMA-Factory": ARGUMENTS,
}
"""Table -> its rows, by the title on the page."""

HEAD = """\
# Coming from other trainers

<!-- made -->

The plugin `mm-trainers` reads the runs of ai-toolkit, musubi-tuner and LLaMA-Factory, and a JSON of
Transformers' `TrainingArguments` with the one of DeepSpeed.

```bash
pip install ./ ./plugins/mm_trainers
mm migrate style.yaml --out style_run.yaml              # ai-toolkit
mm migrate data.toml train.sh --out motion_run.yaml     # musubi-tuner
mm migrate sft.yaml --out chats_run.yaml --accept       # LLaMA-Factory
mm migrate arguments.json ds.json --out run.yaml        # TrainingArguments and DeepSpeed
```

To train, install the plugin of the model, too: `./plugins/mm_wan`, or `./plugins/mm_diffusers` for
image models and HunyuanVideo; with a JSON of DeepSpeed `./plugins/mm_deepspeed`. VLMs need none.
What is printed: [Coming from another tool](migrate.md).

| tool | models | not here: an error names it |
|---|---|---|
| ai-toolkit | Wan, FLUX.1, Kontext, FLUX.2 klein, Qwen-Image, Z-Image, Krea 2, SD 3 | UNets (SDXL); sliders |
| musubi-tuner | Wan, HunyuanVideo 1.5, Qwen-Image, Z-Image, Krea 2, Kontext, FLUX.2 klein | FramePack |
| LLaMA-Factory | models that Transformers opens | other stages than `sft`; the configuration v1 |

## What changes training without a word

Each of these is written out in the config, or is in the third list.

| there | here |
|---|---|
| ai-toolkit, musubi-tuner: no weight by timestep | `loss_weighting: none` for Wan; ours is a gaussian |
| ai-toolkit shifts no timestep but with `shift` | `task.scheduler.shift: 1`; ours is 5 for Wan |
| ai-toolkit: `caption_dropout_rate` of a dataset | `task.caption_dropout`: **no counterpart** of several |
| ai-toolkit: frames evenly spaced over the clip | **no counterpart**: at `data.train.fps` |
| ai-toolkit: each picture at each of several resolutions | **no counterpart**: at the largest that it fills |
| ai-toolkit: Wan 2.2's experts by turns | **no counterpart**: each step trains that of its timestep |
| ai-toolkit: the trigger word where a caption lacks it | before every caption |
| ai-toolkit: AdamW's eps is 1e-6, the average has no ramp | written out |
| musubi-tuner: every frame, unless `source_fps` is set | `data.train.fps: null`, or the model's rate |
| musubi-tuner: `min_timestep`, `max_timestep` count from clean | bounds from noise, before the shift |
| musubi-tuner: the density is squeezed between them | **no counterpart**: it is cut at them |
| musubi-tuner: `network_alpha` is 1 | `alpha: 1.0`; ours is the rank |
| LLaMA-Factory: `lora_alpha` is twice the rank | written out |
| LLaMA-Factory: tower and projector are frozen | `train.freeze`, or `exclude` of the adapter |
| LLaMA-Factory: images are shrunk to `image_max_pixels` | **no counterpart**: the processor decides |
| LLaMA-Factory: `template` | the chat template of the model's own folder |
| Transformers: no weight decay on biases and norms | `train.decay_norms_and_biases: false` |
| Transformers: the batch is that of a rank | `global_batch_size` of one rank: multiply it by yours |
"""

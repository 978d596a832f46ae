"""The keys of the other tools, and what each becomes; docs/coming-from-other-trainers.md is made of them."""

from mm_trainers.tables.aitoolkit import JOB, PROCESS
from mm_trainers.tables.arguments import ARGUMENTS
from mm_trainers.tables.llamafactory import LLAMA_FACTORY
from mm_trainers.tables.musubi import DATASETS, FLAGS, LAUNCHER

TABLES = {
    "ai-toolkit: the file": JOB,
    "ai-toolkit: a process": PROCESS,
    "musubi-tuner: flags of the training": FLAGS,
    "musubi-tuner: flags of the launcher": LAUNCHER,
    "musubi-tuner: the TOML of datasets": DATASETS,
    "LLaMA-Factory": LLAMA_FACTORY,
    "Transformers: TrainingArguments": ARGUMENTS,
}
"""Table -> its rows, by the title on the page."""

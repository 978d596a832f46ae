"""The keys of the other tools, and what each becomes; docs/coming-from-other-trainers.md is made of them."""

from mm_trainers.tables.aitoolkit import JOB, PROCESS

TABLES = {
    "ai-toolkit: the file": JOB,
    "ai-toolkit: a process": PROCESS,
}
"""Table -> its rows, by the title on the page."""

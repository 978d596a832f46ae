"""Run by each rank, which share a model: its answers to prompts of a rank's own lengths, as JSON.

usage: answer_ranks.py FOLDER LENGTHS
"""

from __future__ import annotations

import json
import sys

import torch
import transformers
from torch.distributed.fsdp import fully_shard

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import Decoding
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.tasks.pretrained.answers import Answers


def main() -> None:
    folder, lengths = sys.argv[1], json.loads(sys.argv[2])
    start_process_group()
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    model.generation_config.suppress_tokens = [0, 1, 2]
    fully_shard(model)
    own = lengths[torch.distributed.get_rank()]
    rows = [{"input_ids": torch.arange(5, 5 + length)[None]} for length in own]
    with torch.no_grad():
        wanted = PretrainedConfig(folder, "AutoModelForCausalLM")
        answers = Answers(model, wanted, 20, "task.max_new_tokens")
        said = answers.to(rows, Decoding(), list(range(len(rows))))
    print(json.dumps(said), flush=True)
    leave(0)


if __name__ == "__main__":
    main()

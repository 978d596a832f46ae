"""One rank of a run that loads a checkpoint: prints a hash of every tensor that it then holds, as a whole."""

from __future__ import annotations

import hashlib
import os
import sys

import torch
from torch.distributed.tensor import DTensor

from mm_core.config.load import load_config
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.training.run import assemble


def main(config: str, *overrides: str) -> None:
    start_process_group()
    run = assemble(load_config(config, overrides))
    lines = []
    for part, tensors in sorted(run.between.state().items()):
        for name, tensor in sorted(tensors.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            data = whole.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            lines.append(f"{part}.{name} {hashlib.sha256(data).hexdigest()}\n")
    os.write(1, "".join(lines).encode())
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

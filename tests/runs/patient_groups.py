"""A one-file plugin for tests: writes how long the process groups of a run wait, once it has saved."""

import json
from dataclasses import dataclass

from mm_core import Component, hookimpl
from mm_core.contracts import Callback


@dataclass(frozen=True)
class PatienceConfig:
    """Nothing to set."""


@hookimpl
def mm_callbacks():
    config = "patient_groups:PatienceConfig"
    return [Component(name="patience", target="patient_groups:Patience", config=config)]


class Patience(Callback):
    def run_started(self, run_dir, step, last_step):
        from torch.distributed import distributed_c10d as c10d

        self.folder, self.made = run_dir, len(c10d._world.pg_map)

    def saved(self, step, path):
        import torch
        from torch.distributed import distributed_c10d as c10d

        # A launcher that is killed takes with it what groups are made through.
        assert len(c10d._world.pg_map) == self.made, "a process group was made after the start"
        groups = [group._get_backend(torch.device("cpu")) for group in c10d._world.pg_map]
        seconds = [group.options._timeout.total_seconds() for group in groups]
        (self.folder / f"patience_{c10d.get_rank()}.json").write_text(json.dumps(seconds))

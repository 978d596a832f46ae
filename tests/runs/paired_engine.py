"""A one-file plugin for tests: an engine whose ranks read the same samples in pairs."""

from mm_core import Component, hookimpl


@hookimpl
def mm_engines():
    config = "mm_core.builtin.configs.engines:FSDP2Config"
    return [Component(name="paired", target="paired_engine:build", config=config)]


def build(**fields):
    from dataclasses import replace

    from mm_core.contracts import DataRanks
    from mm_core.engines.fsdp2 import FSDP2Engine
    from mm_core.runtime.ranks import Ranks

    class Paired(FSDP2Engine):
        def plan(self, task, world, *given, **named):
            return replace(super().plan(task, world, *given, **named), data_parallel=max(1, world // 2))

        def prepare(self, task, plan, *given):
            super().prepare(task, plan, *given)
            rank = Ranks.current().rank
            self.data_ranks = DataRanks(rank // 2, plan.data_parallel, leads=rank % 2 == 0)

    return Paired(**fields)

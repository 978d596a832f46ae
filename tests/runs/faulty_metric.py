"""A one-file plugin for tests: a metric that raises, on one rank or on all, in evaluations or on samples."""

from dataclasses import dataclass

from mm_core import Component, hookimpl


@dataclass(frozen=True)
class FaultyConfig:
    at: int = 1  # the evaluation, from 1, that it raises in
    rank: int | None = None  # none: on every one
    in_samples: bool = False  # on clips that were sampled, and not in the evaluation


@hookimpl
def mm_metrics():
    return [Component(name="faulty", target="faulty_metric:Faulty", config="faulty_metric:FaultyConfig")]


class Faulty:
    def __init__(self, at, rank, in_samples):
        self.at, self.rank, self.in_samples, self.evaluations = at, rank, in_samples, 0

    def reset(self):
        pass

    def batch(self, batch, evaluation):
        self.evaluations += 1
        if not self.in_samples:
            self.fail()

    def sampled(self, clips):
        if self.in_samples:
            self.fail()

    def fail(self):
        import torch.distributed as dist

        if self.evaluations >= self.at and self.rank in (None, dist.get_rank()):
            raise RuntimeError("this metric is broken")

    def sums(self):
        import torch

        return torch.zeros(1, dtype=torch.float64)

    def result(self, sums):
        return {}

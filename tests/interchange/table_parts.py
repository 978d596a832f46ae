"""A one-file plugin for tests of export: a layer with a table that it holds in fp32."""

from mm_core import Component, hookimpl


@hookimpl
def mm_tasks():
    return [Component(name="table", target="table_parts:build")]


def build():
    import torch
    from torch import nn

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("table", torch.empty(5))

        def init_weights(self) -> None:
            nn.init.normal_(self.weight)
            nn.init.zeros_(self.bias)
            self.table.copy_(1 / torch.arange(1.0, 6.0))

    class Task(nn.Module):
        trainable, frozen, bins = ("net",), (), None

        def __init__(self) -> None:
            super().__init__()
            self.net = Layer()

        def check(self, batch_spec) -> None:
            """Anything fits."""

        def _never(self, *arguments):
            raise NotImplementedError("this task is built and exported, and never trained")

        weight = batch_transform = prepare = loss = evaluate = sample = _never

    return Task()

"""A one-file plugin for tests of pipelines: a task that wraps a transformer of Diffusers, and a component
with
two models in separate folders."""

from mm_core import Component, hookimpl

TRANSFORMER = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "num_layers": 1,
    "caption_channels": 32,
}
FOLDERS = {"high": "transformer", "low": "transformer_2"}


@hookimpl
def mm_tasks():
    return [
        Component(name="ltx", target="out_pipelines:ltx"),
        Component(name="experts", target="out_pipelines:experts"),
    ]


@hookimpl
def mm_weight_formats():
    return [Component(name="folders", target="out_pipelines:Folders")]


def transformer(**options):
    """A small transformer of LTX-Video."""
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(**(TRANSFORMER | options))


def ltx(beside: bool = False):
    """A task that trains the transformer of an LTXPipeline in a wrapper, optionally with another model."""
    return _task(
        {"predictor": _around(inner=transformer())}
        | ({"control": _around(inner=transformer())} if beside else {})
    )


def experts(parts: tuple[str, ...] = ("high", "low"), layers: int = 1):
    """A task that trains two transformers as one component, or one of them."""
    return _task({"predictor": _around(**{part: transformer(num_layers=layers) for part in parts})})


def _around(**models):
    from torch import nn

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, model in models.items():
                self.add_module(name, model)

        def init_weights(self) -> None:
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.1)

    return Around()


def _task(components):
    from torch import nn

    class Task(nn.Module):
        trainable = tuple(components)
        frozen = ()
        bins = None

        def __init__(self) -> None:
            super().__init__()
            for name, component in components.items():
                self.add_module(name, component)

        def check(self, batch_spec) -> None:
            """Accepts any batch."""

        def _never(self, *arguments):
            raise NotImplementedError("this task is built and exported, and never trained")

        weight = batch_transform = prepare = loss = evaluate = sample = _never

    return Task()


class Folders:
    """A weight format with one Diffusers folder for each child (`high`, `low`) of a component. `low` is
    optional if the model declares it."""

    def __init__(self) -> None:
        from mm_core.weights.formats.libraries import Diffusers

        self._inner = Diffusers()

    def recognises(self, path):
        return self._inner.recognises(path)

    def folders(self, path):
        return self._inner.folders(path)

    def open(self, path, folder=""):
        return self._inner.open(path, folder)

    def layout(self, name, component):
        """One layout for each part, with the keys of that part."""
        from dataclasses import replace

        return [
            replace(self._inner.layout(part, model), part=part, folder=FOLDERS[part], optional=OPTIONAL)
            for part, model in component.named_children()
            if part in FOLDERS
        ]

    def adapter(self, name, component):
        from dataclasses import replace

        return [
            replace(
                self._inner.adapter(part, model),
                part=part,
                file=f"{FOLDERS[part]}/pytorch_lora_weights.safetensors",
            )
            for part, model in component.named_children()
            if part in FOLDERS
        ]

    def companions(self, task, written):
        return self._inner.companions(task, written)


OPTIONAL = False

"""A one-file plugin for tests of import and export: language models of Transformers, and two components
that a task trains together."""

from mm_core import Component, hookimpl

SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 32}
MODELS = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 8}),
    "qwen3_tied": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "wide": ("BertConfig", "BertForMaskedLM", {"hidden_size": 32}),
}


@hookimpl
def mm_tasks():
    return [
        Component(name="parts", target="out_parts:build"),
        Component(name="large", target="out_parts:large"),
    ]


def model_of(kind: str):
    """The library's own model."""
    import transformers

    config, model, options = MODELS[kind]
    return getattr(transformers, model)(getattr(transformers, config)(**(SIZES | options)))


def build(model: str = "bert", second: bool = False):
    """A task that trains one of the models, or two linear layers beside it."""
    from torch import nn

    class Wrapped(nn.Module):
        """As a plugin wraps a library's model: the names below `inner` are the library's."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(model)

        def init_weights(self) -> None:
            """Tables as the library computes them; weights by chance."""
            import torch

            with torch.device("cpu"):
                tables = dict(model_of(model).named_buffers())
            for name, buffer in self.inner.named_buffers():
                buffer.copy_(tables[name])
            for parameter in self.inner.parameters():
                nn.init.normal_(parameter)

    parts = {"lm": Wrapped()} | ({"head": _linear(4, 3)} if second else {})
    return _task(parts)


def large(layers: int, width: int):
    """Many matrices of one size."""
    from torch import nn

    return _task({"net": nn.Sequential(*[_linear(width, width) for _ in range(layers)])})


def _linear(width: int, out: int):
    from torch import nn

    class Layer(nn.Linear):
        def init_weights(self) -> None:
            nn.init.normal_(self.weight)
            nn.init.zeros_(self.bias)

    return Layer(width, out)


def _task(parts):
    from torch import nn

    class Parts(nn.Module):
        trainable = tuple(parts)
        frozen = ()
        bins = None

        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

        def check(self, batch_spec) -> None:
            """Anything fits."""

    return Parts()

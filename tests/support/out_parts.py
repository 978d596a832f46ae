"""A one-file plugin for tests of import and export: language models of Transformers, and two components in
one task."""

from mm_core import Component, hookimpl

SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 32}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
VISION |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
DEEP = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MODELS = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 8}),
    "qwen3_tied": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "wide": ("BertConfig", "BertForMaskedLM", {"hidden_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 3}),
    "internvl": (
        "InternVLConfig",
        "InternVLForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2", "num_key_value_heads": 1},
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "image_size": [28, 28],
                "patch_size": [14, 14],
            },
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {"num_key_value_heads": 1, "rope_scaling": ROPE, **ENDS},
            "vision_config": {**VISION, "fullatt_block_indexes": [1], "window_size": 16},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {"text_config": {**GROUPED, "rope_scaling": ROPE}, "vision_config": {**VISION, **DEEP}},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {**GROUPED, **EXPERTS, "rope_scaling": ROPE},
            "vision_config": {**VISION, **DEEP},
        },
    ),
}


@hookimpl
def mm_tasks():
    return [
        Component(name="parts", target="out_parts:build"),
        Component(name="large", target="out_parts:large"),
    ]


def model_of(kind: str):
    """A language model of Transformers."""
    import transformers

    config, model, options = MODELS[kind]
    if "text_config" in options:
        options = options | {"text_config": SIZES | options["text_config"]}
    else:
        options = SIZES | options
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def build(model: str = "bert", second: bool = False):
    """A task that trains one of the models, optionally together with two linear layers."""
    from torch import nn

    class Wrapped(nn.Module):
        """A wrapper as in plugins: names below `inner` are the library's."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(model)

        def init_weights(self) -> None:
            """Tables as computed by the library; random weights."""
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
    """A task with many matrices of one size."""
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
            """Accepts any batch."""

        def _never(self, *arguments):
            raise NotImplementedError("this task is built and exported, and never trained")

        weight = batch_transform = prepare = loss = evaluate = sample = _never

    return Parts()

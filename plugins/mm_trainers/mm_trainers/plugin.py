"""Entry point of the plugin `trainers`: registers a migration for each tool."""

from mm_core import Component, hookimpl

_TOOLS = {
    "ai_toolkit": ("aitoolkit:AiToolkit", "ai-toolkit: one YAML"),
    "musubi_tuner": ("musubi:MusubiTuner", "musubi-tuner: a script, and the TOML of datasets"),
    "llama_factory": ("language:LlamaFactory", "LLaMA-Factory: one YAML"),
    "training_arguments": ("language:TrainingArguments", "Transformers: TrainingArguments as JSON"),
}


@hookimpl
def mm_migrations() -> list[Component]:
    return [
        Component(
            name,
            f"mm_trainers.{target}",
            "mm_trainers.common:NoOptions",
            f"runs of {what}",
            examples=f"mm_trainers.testing:{name}",
            licence="Apache-2.0",
        )
        for name, (target, what) in _TOOLS.items()
    ]

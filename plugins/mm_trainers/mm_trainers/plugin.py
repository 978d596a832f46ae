"""Entry point of the plugin `trainers`: registers a migration for each tool."""

from mm_core import Component, hookimpl

_FILES = "mm_trainers.testing"
_TOOLS = {
    "ai_toolkit": ("aitoolkit:AiToolkit", "ai-toolkit: one YAML"),
    "musubi_tuner": ("musubi:MusubiTuner", "musubi-tuner: a script, and the TOML of datasets"),
    "llama_factory": ("language:LlamaFactory", "LLaMA-Factory: one YAML"),
    "training_arguments": ("language:TrainingArguments", "Transformers: TrainingArguments as JSON"),
}


@hookimpl
def mm_migrations() -> list[Component]:
    more = {"config": "mm_trainers.common:NoOptions", "licence": "Apache-2.0"}
    return [
        Component(
            name, f"mm_trainers.{target}", summary=f"runs of {what}", examples=f"{_FILES}:{name}", **more
        )
        for name, (target, what) in _TOOLS.items()
    ]

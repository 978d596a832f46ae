"""Entry point of the plugin `trainers`: registers a migration for each tool."""

from mm_core import Component, hookimpl

_TOOLS = (
    ("ai_toolkit", "AiToolkit", "aitoolkit", "ai-toolkit: one YAML"),
    ("musubi_tuner", "MusubiTuner", "musubi", "musubi-tuner: a script, and the TOML of datasets"),
    ("llama_factory", "LlamaFactory", "language", "LLaMA-Factory: one YAML"),
    (
        "training_arguments",
        "TrainingArguments",
        "language",
        "Transformers: TrainingArguments as JSON",
    ),
)


@hookimpl
def mm_migrations() -> list[Component]:
    return [
        Component(
            name=name,
            target=f"mm_trainers.{module}:{target}",
            config="mm_trainers.common:NoOptions",
            examples=f"mm_trainers.testing:{name}",
            summary=f"runs of {summary}",
            licence="Apache-2.0",
        )
        for name, target, module, summary in _TOOLS
    ]

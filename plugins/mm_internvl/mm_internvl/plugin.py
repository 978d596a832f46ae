"""Entry point of the plugin: imports nothing heavy."""

from mm_core import Component, hookimpl


@hookimpl
def mm_datasets() -> list[Component]:
    return [
        Component(
            name="conversations",
            target="mm_internvl.conversations:Conversations",
            config="mm_internvl.config_data:ConversationsConfig",
            summary="conversations about images and videos, tiled and packed as InternVL takes them",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2508.18265",
        )
    ]


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [
        Component(
            name="original",
            target="mm_internvl.formats:InternVLOriginal",
            summary="OpenGVLab's own folders of InternVL 3 and 3.5, dense and mixtures of experts",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2508.18265",
        )
    ]

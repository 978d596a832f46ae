"""Entry point of the plugin `deepspeed`: an engine and a weight format; imports no torch or deepspeed."""

from mm_core import Component, hookimpl


@hookimpl
def mm_engines() -> list[Component]:
    return [
        Component(
            name="deepspeed",
            target="mm_deepspeed.engine:DeepSpeedEngine",
            config="mm_deepspeed.config:DeepSpeedConfig",
            tiny={"settings": {"zero_optimization": {"stage": 2}}},
            summary="DeepSpeed's ZeRO stages 0 to 3 with offloading, from a DeepSpeed JSON file as it is",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/1910.02054",
        )
    ]


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [
        Component(
            name="zero_folder",
            target="mm_deepspeed.folders:DeepSpeedFolders",
            examples="mm_deepspeed.folders:example",
            summary="global_stepN folders of DeepSpeed scripts, ZeRO stages 0 to 3; only read",
        )
    ]

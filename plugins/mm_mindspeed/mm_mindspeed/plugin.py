"""Entry point of the plugin `mindspeed`: registers its migration."""

from mm_core import Component, hookimpl


@hookimpl
def mm_migrations() -> list[Component]:
    return [
        Component(
            name="mindspeed_mm",
            target="mm_mindspeed.migration:MindSpeedMM",
            config="mm_mindspeed.migration:NoOptions",
            examples="mm_mindspeed.testing:examples",
            summary="runs of MindSpeed-MM: scripts with model.json and data.json, and the YAML of newer runs",
            licence="Apache-2.0",
        )
    ]

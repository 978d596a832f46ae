"""Entry point of the plugin `mindspeed`: registers its migration and weight format."""

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


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [
        Component(
            name="wan",
            target="mm_mindspeed.weights:MindSpeedWan",
            examples="mm_mindspeed.testing:tiny_wan",
            expected_failures={"damaged": "it writes one torch.save file, and no safetensors"},
            summary="Wan's transformer in MindSpeed-MM's saves: mp_rank_00 of Megatron, torch_dcp",
        )
    ]

"""Entry point of the plugin `diffusers`: registers its components and imports no torch."""

from mm_core import Component, hookimpl

_SOURCE = "https://github.com/huggingface/diffusers"


@hookimpl
def mm_tasks() -> list[Component]:
    return [
        Component(
            name="pipeline",
            target="mm_diffusers.task:PipelineTask",
            config="mm_diffusers.config:PipelineTaskConfig",
            summary="trains the transformer of a pipeline of Diffusers, by its folder",
            aliases=("diffusers",),
            paper=_SOURCE,
        )
    ]


@hookimpl
def mm_predictors() -> list[Component]:
    return [
        Component(
            name="transformer",
            target="mm_diffusers.transformer:DiffusersTransformer",
            config="mm_diffusers.config:TransformerConfig",
            check="mm_diffusers.config:check_folder",
            tiny="mm_diffusers.testing:tiny",
            expected_failures={
                "gradients": "the text half of Qwen-Image's last block, which is tested, reaches no output"
            },
            summary="the transformer of a pipeline, Diffusers' own class, called as the pipeline calls it",
            paper=_SOURCE,
        )
    ]


@hookimpl
def mm_autoencoders() -> list[Component]:
    return [
        Component(
            name="vae",
            target="mm_diffusers.vae:DiffusersVAE",
            config="mm_diffusers.config:VaeConfig",
            check="mm_diffusers.config:check",
            tiny="mm_diffusers.testing:tiny",
            summary="the autoencoder of a pipeline, Diffusers' own class",
            paper=_SOURCE,
        )
    ]


@hookimpl
def mm_text_encoders() -> list[Component]:
    return [
        Component(
            name="text",
            target="mm_diffusers.text:DiffusersText",
            config="mm_diffusers.config:TextConfig",
            check="mm_diffusers.config:check",
            tiny="mm_diffusers.testing:tiny",
            summary="all text encoders of a pipeline, by the pipeline's own code",
            paper=_SOURCE,
        )
    ]


@hookimpl
def mm_image_encoders() -> list[Component]:
    return [
        Component(
            name="image",
            target="mm_diffusers.image:DiffusersImage",
            config="mm_diffusers.config:ImageConfig",
            check="mm_diffusers.config:check",
            tiny="mm_diffusers.testing:tiny_first_frame",
            summary="the image encoder of a pipeline from pictures to clips",
            paper=_SOURCE,
        )
    ]


@hookimpl
def mm_schedulers() -> list[Component]:
    return [
        Component(
            name="schedule",
            target="mm_diffusers.schedule:PipelineSchedule",
            config="mm_diffusers.config:ScheduleConfig",
            check="mm_diffusers.config:check",
            tiny="mm_diffusers.testing:tiny_static",
            summary="flow matching, sampled with the pipeline's own times and solver",
            paper=_SOURCE,
        )
    ]


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [
        Component(
            name="encoders",
            target="mm_diffusers.formats:PipelineText",
            examples="mm_diffusers.testing:example",
            summary="the text encoders of a pipeline, each in its folder",
        )
    ]

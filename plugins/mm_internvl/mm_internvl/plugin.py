"""Entry point of the plugin `internvl`: registers its components and imports no torch."""

from mm_core import Component, hookimpl


@hookimpl
def mm_datasets() -> list[Component]:
    return [
        Component(
            name="conversations",
            target="mm_internvl.data.conversations:Conversations",
            config="mm_internvl.data.config:ConversationsConfig",
            tiny="mm_internvl.testing:tiny_rows",
            check="mm_core.tasks.conversations.rows.first_rows:faults",
            expected_failures={
                "new_samples_each_epoch": "only with packing the epoch decides which rows share a sample"
            },
            summary="conversations about images and videos, tiled and packed as InternVL takes them",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2508.18265",
        )
    ]


@hookimpl
def mm_metrics() -> list[Component]:
    return [
        Component(
            name="relaxed_accuracy",
            target="mm_internvl.metrics:relaxed_accuracy",
            config="mm_internvl.config_metrics:RelaxedAccuracyConfig",
            summary="share of answers that are right in ChartQA's sense: numbers within 5 %",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2203.10244",
        ),
        Component(
            name="multiple_choice",
            target="mm_internvl.metrics:multiple_choice",
            config="mm_internvl.config_metrics:MultipleChoiceConfig",
            summary="share of answers with the right letter, for multiple-choice sets such as AI2D and MMMU",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2311.16502",
        ),
    ]


@hookimpl
def mm_weight_formats() -> list[Component]:
    return [
        Component(
            name="original",
            target="mm_internvl.formats:InternVLOriginal",
            examples="mm_internvl.testing:tiny_model",
            summary="OpenGVLab's own folders of InternVL 3 and 3.5, dense and mixtures of experts",
            licence="Apache-2.0",
            paper="https://arxiv.org/abs/2508.18265",
        )
    ]

"""The way from `train` to the optimizer's step is short enough to read."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from types import CodeType, FrameType

import pytest
import torch
import yaml

from mm_core.config.load import load_config
from mm_core.engines.base import EngineBase
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.training import loop, run

pytestmark = pytest.mark.slow


class Reading:
    """What a real run of one step has entered of mm_core, in the main thread.

    Attributes:
        stack: the functions that the update was called from, innermost first.
        step: all functions that were entered between the beginning of `run_steps` and the update.
        whole: all functions that were entered until `run_steps` returned.
    """

    def __init__(self) -> None:
        self.stack: list[CodeType] = []
        self.step: set[CodeType] = set()
        self.whole: set[CodeType] = set()

    def watch(self, frame: FrameType, event: str, argument: object) -> None:
        own = frame.f_code is loop.run_steps.__code__
        if event == "return" and own:
            sys.setprofile(None)
        if event == "call" and "/mm_core/" in frame.f_code.co_filename and (own or self.whole):
            self.whole.add(frame.f_code)
            if not self.stack:
                self.step.add(frame.f_code)

    def updated(self, frame: FrameType | None) -> None:
        while frame is not None:
            if "/mm_core/" in frame.f_code.co_filename:
                self.stack.append(frame.f_code)
            frame = frame.f_back


@pytest.fixture(scope="module")
def reading(tiny, tmp_path_factory) -> Reading:
    found, step = Reading(), torch.optim.AdamW.step

    def watched(self, *args, **kwargs):
        # Not the probe for the fused kernel, which steps while the run is assembled.
        if not found.stack and found.step:
            found.updated(sys._getframe(1))
        return step(self, *args, **kwargs)

    overrides = [
        "train.steps=1",
        "lr_schedule={type: constant}",
        f"run.dir={tmp_path_factory.mktemp('read')}",
        "data.loader.workers=0",
        "ema={decay: 0.9}",
        f"data.validation={json.dumps(yaml.safe_load(tiny.read_text())['data']['train'])}",
        "validation={every: 1, rows: 2}",
    ]
    config = load_config(tiny, overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched)
        # Tests of one-file plugins leave the finder of their modules in the process.
        others = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("mm_core.")]
        patch.setattr(sys, "meta_path", others)
        sys.setprofile(found.watch)
        try:
            run.train(config)
        finally:
            sys.setprofile(None)
    return found


def lines(codes) -> int:
    """Whole functions: signature, docstring and comments."""
    return sum(len(inspect.getsourcelines(code)[0]) for code in codes)


def docstring_lines(codes) -> int:
    """Lines of the docstrings among them."""
    found = 0
    for code in codes:
        (function,) = ast.parse(textwrap.dedent("".join(inspect.getsourcelines(code)[0]))).body
        if ast.get_docstring(function) is not None:
            found += function.body[0].end_lineno - function.body[0].lineno + 1
    return found


def test_from_train_to_the_update_in_four_files_and_220_lines(reading):
    """Whole functions, from `train` (what `mm-train` calls on every rank) to `optimizer.step()`: two counts.

    The stack: `train`, `run_steps`, `FSDP2Engine.step`, which has the loss scale of fp16, and
    `EngineBase.step`, one in each of four files. And the stack with everything else of these files that the
    first step enters before the update (reading the batches, the agreement of ranks, the forward, the norm).

    What is not counted: the command line and the care for processes before `train`; how the parts of a run
    are built (`assemble`); and what the other parts do: see the next test.
    """
    assert [code.co_qualname for code in reading.stack] == [
        *("EngineBase.step", "FSDP2Engine.step", "run_steps", "train")
    ]
    files = {code.co_filename for code in reading.stack}
    assert files == {inspect.getfile(where) for where in (EngineBase, FSDP2Engine, loop, run)}
    within = {code for code in reading.step if code.co_filename in files and "<" not in code.co_name}
    entered = {code.co_qualname for code in within}
    assert {"run_steps", "read_step", "agree", "compute", "FSDP2Engine.micro_step"} <= entered
    assert lines(reading.stack) <= 200
    assert lines(within | set(reading.stack)) <= 220, sorted(entered)


def test_all_that_a_step_runs_is_read_in_an_afternoon(reading):
    """Every function of mm_core that the first step enters before the update, in the main thread: task,
    data, guard and reporter included. The next test counts what comes after the update too."""
    found = [code for code in reading.step if "<" not in code.co_name]
    rooms = {code.co_filename.rpartition("/mm_core/")[2].partition("/")[0] for code in found}
    assert {"training", "tasks", "data", "engines", "telemetry"} <= rooms
    entered = sorted((code.co_filename.rpartition("/mm_core/")[2], code.co_qualname) for code in found)
    docstrings = docstring_lines(found)  # a line for each argument
    # 100 lines are the conditions, the token-dependent noise levels and the checks of what authors return;
    # 130 the times at which containers show frames, their geometry and the check of pixels; 23 that what is
    # encoded (own and empty captions) is one value, from which another function draws; 150 that a video is
    # opened once and its frames are resized as they come, and what its authors' readers return; 20 that
    # FLOPs are counted without other kernels; 20 the loss scale, and states of captions by the cache;
    # 20 the norm over local shards, copies that do not wait, and the way to steps that end late;
    # 20 that the task's encoder is a part of its own, which takes what it uses; 55 the range of pixels,
    # the gap behind the first packet of an AVI, a model's dtype without adapters, and kernels that refuse;
    # 90 the stream that is shown, transparency, contents before suffixes, decoders that hang, cut captions;
    # 45 the table of inputs, named tokens and states, and the further fields of samples; 55 pictures of their
    # own size, encoders that read them or are given captions, checks of tokens, the length of a control;
    # 5 the check of what `with_inputs` returns; 10 lengths of captions and masks that stay on the host.
    assert lines(found) - docstrings <= 1970 and docstrings <= 575, entered


def test_all_that_a_run_of_one_step_enters_is_read_in_a_day(reading):
    """What lies between steps included: the average, a validation and a save, logging, the end."""
    found = [code for code in reading.whole if "<" not in code.co_name]
    entered = {code.co_qualname for code in found}
    assert {
        "BetweenSteps.updated",
        "BetweenSteps.after_step",
        "EMA.update",
        "CheckpointStore.save",
    } <= entered
    assert {"Validator.run", "RunReporter.step"} <= entered
    docstrings = docstring_lines(found)
    # 2 lines tell the forecast that a phase has run; 13 measure the own time of a rank.
    assert lines(found) - docstrings <= 3120 and docstrings <= 930, sorted(entered)


def test_the_whole_loop_is_read_at_a_sitting():
    assert len(inspect.getsource(loop).splitlines()) <= 200

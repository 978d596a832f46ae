"""`mm validate`: one line for a valid config, else every error and exit code 1; no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import yaml

from mm_core.cli.main import main


def test_a_config_that_checks_is_one_line_and_one_for_each_missing_file(place, capsys):
    assert main(["validate", str(place.run)]) == 0
    out, err = capsys.readouterr()
    assert out == (
        f"{place.run}: ok (task core/text_to_video, data core/video_text, engine core/fsdp2)\n"
        "missing: a.json (needed to train)\n"
    )
    assert err == ""


def test_faults_go_to_standard_error_and_the_exit_code_is_1(place, capsys):
    assert main(["validate", str(place.run), "train.stps=3", "run.seed=x"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"mm: error: {place.run}: 2 errors in the config",
        "override 'run.seed=x': run.seed: found 'x', a string",
        "  accepted: an integer",
        "override 'train.stps=3': train.stps: unknown key 'stps'",
        "  accepted: steps, epochs, micro_batch_size, global_batch_size, clip_grad_norm, adapters,"
        " also_train, base_dtype, freeze, parameter_groups, decay_norms_and_biases, non_finite, spike,"
        " overfit_one_batch",
        "  hint: did you mean 'steps'?",
    ]


def test_json_holds_every_fault(place, capsys):
    assert main(["validate", str(place.run), "train.stps=3", "run.seed=x", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "ok": False,
        "faults": [
            {
                "where": "override 'run.seed=x': run.seed",
                "what": "found 'x', a string",
                "accepted": "an integer",
                "hint": None,
            },
            {
                "where": "override 'train.stps=3': train.stps",
                "what": "unknown key 'stps'",
                "accepted": "steps, epochs, micro_batch_size, global_batch_size, clip_grad_norm, adapters, "
                "also_train, base_dtype, freeze, parameter_groups, decay_norms_and_biases, non_finite, "
                "spike, overfit_one_batch",
                "hint": "did you mean 'steps'?",
            },
        ],
    }


@pytest.mark.parametrize("name", ["nope.yaml", "."])
def test_json_of_a_file_that_cannot_be_read(place, capsys, name):
    assert main(["validate", str(place.folder / name), "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["what"] in ("there is no such file", "this is a folder, not a YAML file")


def test_json_of_a_broken_plugin_under_strict(place, capsys, monkeypatch):
    monkeypatch.setenv("MM_PLUGINS_STRICT", "perhaps")
    assert main(["validate", str(place.run), "--json"]) == 1
    assert any(fault["what"] for fault in json.loads(capsys.readouterr().out)["faults"])


def test_print_writes_the_config_that_would_run(place, capsys, tmp_path):
    assert main(["validate", str(place.run), "train.steps=3", "--print"]) == 0
    written = capsys.readouterr().out
    assert yaml.safe_load(written)["train"]["steps"] == 3
    assert main(["validate", str(place.write("again.yaml", written))]) == 0
    capsys.readouterr()
    assert main(["validate", str(place.run), "train.steps=3", "--print", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["config"] == yaml.safe_load(written)


def test_checking_imports_no_torch_and_is_quick(place):
    place.edit(
        ("run: {name: small}", "run: {nam: small}"),
        ("    depth: 2", "    depth: two\n    pach: [1, 2, 2]"),
        ("type: flow_match", "type: flow_mach"),
        ("steps: 10", "steps: -1"),
    )
    code = (
        "import sys\nfrom mm_core.cli.main import main\n"
        f"code = main(['validate', {str(place.run)!r}])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'diffusers'} & set(sys.modules)\n"
        "print(code, sorted(heavy))"
    )
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    print(f"validate took {time.perf_counter() - begin:.3f} s (bar: 0.5 s on a machine at rest)")
    assert done.stdout == "1 []\n", done.stderr
    # The five planted mistakes, and the key that is missing because it was misspelt.
    places = [
        line.split(" ")[0] + line.split(" ")[1] for line in done.stderr.splitlines() if "run.yaml:" in line
    ]
    assert [place.rpartition("run.yaml")[2] for place in places[1:]] == [
        ":1:run.nam:",
        ":1:run:",
        ":7:task.predictor.depth:",
        ":8:task.predictor.pach:",
        ":11:task.scheduler.type:",
        ":15:train.steps:",
    ]
    assert done.stderr.count("did you mean") == 3

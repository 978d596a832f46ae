"""One-file plugins that a stored run's config names run where this user has trained with them, or a flag
allows it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import py_compile
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import mm_core
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.cli.main import main
from mm_core.config.load import load_config
from mm_core.config.stored import remember
from mm_core.errors import ConfigError, TrustError
from mm_core.inference.evaluate import choose, evaluate
from mm_core.interchange.export import export
from mm_core.loading.left_out import source_of_run
from mm_core.loading.provenance import given_weights, sources_of
from mm_core.plugin import local
from mm_core.plugin.trust.known import KnownCode, digest_of
from mm_core.runtime.launch.signals import StopFlag
from mm_core.training.between_steps import BetweenSteps
from mm_core.training.callback_list import CallbackList
from mm_core.training.evaluating import Evaluating
from mm_core.training.run import train

COMMANDS = {
    "sample": ("sample", "--run", "{run}", "--prompt", "a circle"),
    "chat": ("chat", "--run", "{run}"),
    "eval": ("eval", "--run", "{run}", "--split", "train"),
    "export": ("export", "--run", "{run}", "--to", "safetensors"),
    "validate": ("validate", "{run}/config.yaml"),
    "validate_checkpoint": ("validate", "{checkpoint}/config.yaml", "--json"),
    "train": ("train", "--config", "{run}/config.yaml", "--dry-run"),
    "import": ("import", "--from", "{run}", "--config", "{checkpoint}/config.yaml"),
    "weights": ("weights", "show", "{file}", "--config", "{run}/config.yaml"),
}


def words(stranger, name):
    file = stranger.folder / "some.safetensors"
    if not file.exists():
        import torch
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, file)
    places = {"run": stranger.run, "checkpoint": stranger.checkpoint, "file": file}
    return [word.format(**places) for word in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_strangers_plugin_is_not_run(stranger, home, name, capsys):
    stranger.train()
    assert main(words(stranger, name)) == 1
    assert not stranger.ran
    said = "".join(capsys.readouterr())
    assert "the code of a stored run would run with your rights, and you have not trained with it" in said
    assert str(stranger.plugin) in said
    assert f"code that this user has trained with before (recorded in {home})" in said
    assert (
        "read the code named above; if you trust it, pass --allow-code (in Python: allow_code=True)" in said
    )


@pytest.mark.parametrize("name", ["export", "validate", "train", "weights"])
def test_the_flag_runs_it(stranger, name, capsys):
    stranger.train(weights=True)
    assert main([*words(stranger, name), "--allow-code"]) == 0, capsys.readouterr().err
    assert stranger.ran


@pytest.mark.parametrize("name", ["export", "validate", "weights"])
def test_what_this_user_trained_with_runs(stranger, name, capsys):
    stranger.train(known=True, weights=name == "export")
    assert main(words(stranger, name)) == 0, capsys.readouterr().err
    assert stranger.ran


def test_python_functions_refuse_and_take_the_argument(stranger, tmp_path):
    run = stranger.train(weights=True)
    calls = {
        "sample": lambda **more: mm_core.sample(run, "a circle", **more),
        "answer": lambda **more: mm_core.answer(run, "hello", **more),
        "evaluate": lambda **more: evaluate(run, split="train", **more),
        "export": lambda **more: export(run, tmp_path / "out", "safetensors", **more),
        "load_config": lambda **more: mm_core.load_config(run / "config.yaml", **more),
    }
    for call in calls.values():
        with pytest.raises(TrustError, match="you have not trained with it"):
            call()
    assert not stranger.ran
    assert len(calls["sample"](allow_code=True)) == 1
    assert stranger.ran
    calls["export"](allow_code=True)
    calls["load_config"](allow_code=True)


def test_one_byte_changed_after_training_is_refused(stranger):
    stranger.train(known=True)
    load_config(stranger.checkpoint / "config.yaml")
    with stranger.plugin.open("a") as file:
        file.write(" ")
    stranger.mark.unlink()
    with pytest.raises(TrustError, match=r"theirs\.py"):
        load_config(stranger.checkpoint / "config.yaml")  # in the process that knows the plugin as it was
    assert not stranger.ran


def test_the_content_counts_not_the_place(stranger, moved, tmp_path):
    stranger.train(known=True)
    run, code = (
        moved(each, tmp_path / "else" / each.name) for each in (stranger.run, stranger.plugin.parent)
    )
    text = (run / "config.yaml").read_text().replace(str(stranger.plugin), str(code / "theirs.py"))
    (run / "config.yaml").write_text(text)
    load_config(run / "config.yaml")
    assert stranger.ran


def test_a_list_in_the_runs_folder_is_not_asked(stranger, monkeypatch):
    stranger.train(known=True)
    known = KnownCode.of_user().folder
    for place in (stranger.run, stranger.checkpoint, stranger.run / ".local/state", stranger.plugin.parent):
        shutil.copytree(known, place / "mm_core" / "trusted_code")
    shutil.rmtree(known)
    monkeypatch.setenv("XDG_STATE_HOME", "mm_core")  # relative: it would be another one in each folder
    monkeypatch.setenv("HOME", ".local")
    monkeypatch.chdir(stranger.run)
    with pytest.raises(TrustError, match="this user has no home folder"):
        load_config(stranger.run / "config.yaml")
    assert not stranger.ran


def test_bytecode_beside_the_plugin_is_not_run(stranger):
    stranger.train(known=True)
    evil = stranger.folder / "evil.py"
    evil.write_text(f"open({str(stranger.folder / 'evil')!r}, 'w')\n" + stranger.plugin.read_text())
    cached = Path(importlib.util.cache_from_source(str(stranger.plugin)))
    py_compile.compile(str(evil), cfile=str(cached), dfile=str(stranger.plugin))
    found = stranger.plugin.stat()
    header = int(found.st_mtime).to_bytes(4, "little") + (found.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    cached.write_bytes(cached.read_bytes()[:8] + header + cached.read_bytes()[16:])
    load_config(stranger.run / "config.yaml")
    assert stranger.ran
    assert not (stranger.folder / "evil").exists()


def test_a_file_that_is_exchanged_after_it_was_checked_is_not_run(stranger, monkeypatch):
    stranger.train(known=True)
    real = KnownCode.holds

    def exchange(self, digest):
        stranger.plugin.write_text(f"open({str(stranger.folder / 'evil')!r}, 'w')\n")
        return real(self, digest)

    monkeypatch.setattr(KnownCode, "holds", exchange)
    load_config(stranger.run / "config.yaml")
    assert stranger.ran
    assert not (stranger.folder / "evil").exists()


BESIDE = """
import sys
sys.path.insert(0, str(Path(__file__).parent))
import beside_lib
from beside_package.inner import value
"""


def beside(stranger, text="value = 1\n"):
    code = stranger.plugin.parent
    (code / "beside_lib.py").write_text("x = 1\n")
    (code / "beside_package").mkdir(exist_ok=True)
    (code / "beside_package/__init__.py").write_text("")
    (code / "beside_package/inner.py").write_text(text)
    stranger.write(BESIDE)


def clean_path(stranger):
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(stranger.folder))]


def test_modules_beside_a_plugin_are_as_much_its_code(stranger):
    beside(stranger)
    stranger.train(known=True)
    clean_path(stranger)
    load_config(stranger.run / "config.yaml")  # nothing has changed
    assert stranger.ran
    for name in ("beside_lib.py", "beside_package/inner.py", "beside_package/__init__.py"):
        stranger.forget()
        clean_path(stranger)
        file = stranger.plugin.parent / name
        before = file.read_text()
        file.write_text(f"open({str(stranger.folder / 'evil')!r}, 'w')\n{before}")
        with pytest.raises(TrustError, match="a module that a plugin of a stored run imports") as caught:
            load_config(stranger.run / "config.yaml")
        assert str(file) in caught.value.what
        assert "--allow-code" in caught.value.hint
        assert not (stranger.folder / "evil").exists()
        file.write_text(before)


def test_a_module_linked_from_beside_a_plugin_is_checked_too(stranger, tmp_path):
    beside(stranger)
    stranger.train(known=True)
    clean_path(stranger)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(stranger.folder / 'evil')!r}, 'w')\nx = 1\n")
    lib = stranger.plugin.parent / "beside_lib.py"
    lib.unlink()
    lib.symlink_to(evil)
    with pytest.raises(TrustError, match="beside_lib"):
        load_config(stranger.run / "config.yaml")
    assert not (stranger.folder / "evil").exists()


@pytest.mark.parametrize("kind", ["compiled", "archive"])
def test_a_module_that_is_not_source_text_is_refused(stranger, kind):
    """Its content could be exchanged between the check and the import."""
    place, code = stranger.folder / "lib", stranger.plugin.parent
    place.mkdir()
    source = place / "beside_lib.py"
    source.write_text(f"open({str(stranger.folder / 'evil')!r}, 'w').close()\n")
    entry = place
    if kind == "compiled":
        py_compile.compile(str(source), cfile=str(place / "beside_lib.pyc"))
        source.unlink()
    else:
        entry = Path(shutil.make_archive(str(code / "lib"), "zip", place))
    stranger.write(f"import sys\nsys.path.insert(0, {str(entry)!r})\nimport beside_lib\n")
    stranger.train(known=True)  # with these very bytes
    (stranger.folder / "evil").unlink()
    clean_path(stranger)
    with pytest.raises(TrustError, match="beside_lib"):
        load_config(stranger.run / "config.yaml")
    assert not (stranger.folder / "evil").exists()


def test_a_module_that_is_exchanged_after_it_was_checked_is_not_run(stranger, monkeypatch):
    beside(stranger)
    stranger.train(known=True)
    clean_path(stranger)
    real, library = local.check_known, stranger.plugin.parent / "beside_lib.py"

    def exchange(*given):
        real(*given)
        library.write_text(f"open({str(stranger.folder / 'evil')!r}, 'w').close()\n")

    monkeypatch.setattr(local, "check_known", exchange)
    load_config(stranger.run / "config.yaml")
    assert stranger.ran
    assert not (stranger.folder / "evil").exists()


def test_modules_beside_a_plugin_are_checked_where_their_folder_was_on_the_path_before(stranger, monkeypatch):
    beside(stranger)
    stranger.train(known=True)
    clean_path(stranger)
    monkeypatch.syspath_prepend(str(stranger.plugin.parent))  # as with PYTHONPATH
    (stranger.plugin.parent / "beside_lib.py").write_text("x = 4\n")
    with pytest.raises(TrustError, match="beside_lib"):
        load_config(stranger.run / "config.yaml")


def test_a_data_worker_checks_what_a_plugin_imports_as_its_parent_does(stranger):
    stranger.write("import sys\nsys.path.insert(0, str(Path(__file__).parent))\n")
    stranger.train(known=True)
    clean_path(stranger)
    load_config(stranger.run / "config.yaml")
    files = pickle.loads(pickle.dumps(local.imported_files()))
    stranger.forget()  # as in a new process
    clean_path(stranger)
    local.import_again(files)
    assert stranger.ran
    (stranger.plugin.parent / "beside_lib.py").write_text("x = 5\n")
    importlib.invalidate_caches()
    with pytest.raises(TrustError, match="beside_lib"):
        importlib.import_module("beside_lib")


def test_a_module_of_a_known_package_is_checked_when_it_is_imported_later(stranger):
    beside(stranger)
    stranger.train(known=True)
    clean_path(stranger)
    load_config(stranger.run / "config.yaml")
    new = stranger.plugin.parent / "beside_package/later.py"
    new.write_text("x = 3\n")
    importlib.invalidate_caches()
    with pytest.raises(TrustError, match=str(new)):
        importlib.import_module("beside_package.later")


def test_what_is_beside_runs_with_the_flag_and_lazy_imports_are_checked(stranger):
    beside(stranger)
    stranger.write(
        "import sys\nsys.path.insert(0, str(Path(__file__).parent))\ndef later():\n    import beside_lib\n"
    )
    stranger.train(known=True)  # which has not imported it
    clean_path(stranger)
    load_config(stranger.run / "config.yaml")
    (plugin,) = (m for n, m in sys.modules.items() if n.startswith("mm_local_") and n.endswith("_theirs"))
    with pytest.raises(TrustError, match="beside_lib"):
        plugin.later()
    stranger.forget()
    clean_path(stranger)
    load_config(stranger.run / "config.yaml", allow_code=True)
    (plugin,) = (m for n, m in sys.modules.items() if n.startswith("mm_local_") and n.endswith("_theirs"))
    plugin.later()


def test_a_folder_that_a_plugin_puts_on_the_path_is_checked_and_the_users_own_is_not(stranger, tmp_path):
    (stranger.folder / "beside_above.py").write_text("x = 1\n")
    stranger.write("import sys\nsys.path.insert(0, str(Path(__file__).parents[1]))\nimport beside_above\n")
    stranger.train(known=True)
    clean_path(stranger)
    load_config(stranger.run / "config.yaml")
    (tmp_path / "beside_own.py").write_text("x = 1\n")
    sys.path.append(str(tmp_path))  # as a notebook goes on
    importlib.import_module("beside_own")
    stranger.forget()
    clean_path(stranger)
    (stranger.folder / "beside_above.py").write_text("x = 2\n")
    with pytest.raises(TrustError, match="beside_above"):
        load_config(stranger.run / "config.yaml")


def test_a_plugin_that_the_command_line_names_is_the_users_own(stranger, tmp_path):
    stranger.train()
    own = tmp_path / "mine.py"
    shutil.copy(stranger.plugin, own)
    load_config(stranger.run / "config.yaml", [f"plugins.path=[{own}]"])
    assert stranger.ran


def test_a_config_that_includes_a_stored_one_does_not_vouch_for_it(stranger, tmp_path):
    stranger.train()
    own = tmp_path / "own.yaml"
    own.write_text(f"include: {stranger.run}/config.yaml\nrun: {{name: mine}}\n")
    with pytest.raises(TrustError, match=r"theirs\.py"):
        load_config(own)
    inner = stranger.folder / "inner.yaml"  # outside of the run, and included by what lies in it
    inner.write_text((stranger.run / "config.yaml").read_text())
    (stranger.run / "config.yaml").write_text(f"include: {inner}\n")
    with pytest.raises(TrustError, match=r"theirs\.py"):
        load_config(stranger.run / "config.yaml")
    assert not stranger.ran


@pytest.mark.parametrize("name", ["deep/er/x.yaml", "x.yaml", "checkpoints/step_00000001/x.yaml"])
def test_a_yaml_anywhere_within_a_run_is_stored(stranger, name):
    stranger.train()
    path = stranger.run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(stranger.yaml, path)
    with pytest.raises(TrustError):
        load_config(path)
    link = stranger.folder / "link.yaml"
    link.symlink_to(path)
    with pytest.raises(TrustError):
        load_config(link)
    assert not stranger.ran


def test_a_yaml_in_an_exported_folder_is_stored_and_one_beside_mere_weights_is_not(stranger):
    stranger.train()
    folder = stranger.yaml.parent
    (folder / "given.safetensors").write_bytes(b"")
    load_config(stranger.yaml)
    (folder / "config.json").write_text("{}")
    with pytest.raises(TrustError):
        load_config(stranger.yaml)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "a.pt", "a.pth"])
def test_a_yaml_below_a_published_model_is_stored(stranger, weights):
    stranger.train()
    top = stranger.yaml.parents[1] / "published"
    (top / "configs/small").mkdir(parents=True)
    inner = shutil.copy(stranger.yaml, top / "configs/small/x.yaml")
    (top / weights).write_bytes(b"")
    load_config(inner)
    (top / "config.json").write_text("{}")
    with pytest.raises(TrustError):
        load_config(inner)


@pytest.mark.parametrize("name", ["checksums.json", ".metadata"])
def test_one_stray_file_of_a_common_name_makes_nothing_stored(stranger, name):
    stranger.train()
    (stranger.folder / name).write_text("{}")
    load_config(stranger.yaml)
    (stranger.folder / "facts.json").write_text("{}")
    with pytest.raises(TrustError):
        load_config(stranger.yaml)


def test_ones_own_yaml_is_no_stored_one_wherever_one_stands(stranger, monkeypatch):
    stranger.train()
    monkeypatch.chdir(stranger.run)
    load_config(Path(os.path.relpath(stranger.yaml)))
    assert stranger.ran


def test_a_run_given_by_its_folder_is_stored_however_it_looks(stranger):
    """Without the marks of a run around its checkpoint."""
    stranger.train()
    plain = stranger.folder / "plain"
    shutil.move(stranger.checkpoint, plain)
    with pytest.raises(TrustError):
        choose(plain, "train")
    assert not stranger.ran


def test_weights_to_begin_with_bring_no_code(stranger, monkeypatch):
    """`init_from`, resumes of runs that began with another, and where an export's other parts come from."""
    run = stranger.train(weights=True)
    row = {
        "key": "init_from",
        "path": str(run),
        "tensors": 1,
        "sha256": "",
        "format": None,
        "weights": "model",
    }
    row |= {"strict": True, "include": [], "exclude": [], "prefixes": {}}
    monkeypatch.setattr(OpenedCheckpoint, "manifest", {"base": [row]})
    with pytest.raises(TrustError, match=r"theirs\.py"):
        source_of_run(run, "model")
    assert not stranger.ran
    own = load_config(stranger.config(), [f"init_from.path={run}"])
    from mm_core.plan import build_task

    task = build_task(own)
    stranger.forget()
    notes: list[str] = []
    given = given_weights(own.init_from, {})
    assert sources_of(given, task, own.allow_code, notes.append)["predictor"] == (run,)
    assert not stranger.ran
    (note,) = notes
    assert str(stranger.plugin) in note
    assert "--allow-code" in note


def test_a_command_of_a_stored_config_is_not_run_by_training_with_it(stranger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = [
        {"type": "command", "run": ["touch", str(stranger.folder / "evil")], "events": ["run_started"]}
    ]
    config = {"callbacks": callbacks, "plugins": {"path": []}}
    task = stranger.settings["task"]
    predictor = {**task["predictor"], "type": "custom_dit"}
    stranger.train(**config, task={**task, "predictor": predictor})
    stored = load_config(stranger.run / "config.yaml")  # nothing that a look at it could run
    with pytest.raises(
        TrustError, match="the stored run's callbacks would run these programs as your user"
    ) as caught:
        train(stored)
    assert f'the command ["touch", "{stranger.folder}/evil"]' in caught.value.what
    assert caught.value.accepted == "callbacks=[], which runs none of them"
    assert not (stranger.folder / "evil").exists()
    assert load_config(stranger.run / "config.yaml", ["callbacks=[]"]).unknown_commands == ()
    assert load_config(stranger.run / "config.yaml", allow_code=True).unknown_commands == ()
    assert remember(load_config(stranger.yaml)) is None
    assert load_config(stranger.run / "config.yaml").unknown_commands == ()
    within = load_config(stranger.run / "config.yaml", ["callbacks.0.run=[rm]"])
    assert within.unknown_commands == ('the command ["rm"]',)


def test_a_stored_config_does_not_read_the_environment(stranger, monkeypatch, recwarn):
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("FOLDER", "/data")
    run = {"name": "theirs", "dir": "${oc.env:FOLDER}/runs"}
    stranger.train(known=True, run=run)
    path = stranger.run / "config.yaml"
    assert load_config(path).run.dir == "/data/runs"  # as it was trained with
    text = path.read_text()
    (stranger.run / "config.yaml").write_text(text.replace("name: theirs", "name: ${oc.env:SECRET}"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (fault,) = caught.value.faults
    assert fault.what == (
        "'${oc.env:SECRET}' in a stored run reads the environment, and you have not trained with it"
    )
    assert "--allow-code" in fault.hint
    spared = load_config(path, spare_environment=True)
    assert spared.run.name == "${oc.env:SECRET}"
    assert "s3cret" not in repr(spared)
    assert "it is not read" in str(recwarn.pop(UserWarning).message)
    assert load_config(path, allow_code=True).run.name == "s3cret"
    assert load_config(path, ["run.name=${oc.env:SECRET}"]).run.name == "s3cret"  # the user's own words
    # One more step does not lead around it, nor does another place for a text that is known.
    path.write_text(text.replace("name: theirs", "name: ${run.dir}"))
    with pytest.raises(ConfigError, match="reads the environment"):
        load_config(path)


OWN_TRACKER = """
from dataclasses import dataclass

@dataclass(frozen=True)
class OwnConfig:
    folder: str = ""
    trust_remote_code: bool = False
"""
OWN_HOOK = """
from mm_core import Component, hookimpl

@hookimpl
def mm_trackers():
    return [Component(name="own", target="own_tracker:OwnConfig", config="own_tracker:OwnConfig")]
"""


def test_a_component_whose_trust_is_true_or_false_is_refused_with_a_readable_error(
    stranger, tmp_path, monkeypatch
):
    (tmp_path / "own_tracker.py").write_text(OWN_TRACKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    tracker = {"type": "local/own", "trust_remote_code": True}
    stranger.write(OWN_HOOK)
    sections = {"log": {"trackers": [tracker]}}
    stranger.train(known=True, **sections)
    with pytest.raises(TrustError) as caught:
        load_config(stranger.run / "config.yaml")
    assert caught.value.what.startswith("log.trackers.0.trust_remote_code of a stored run would run Python")
    assert "--allow-code" in caught.value.hint
    allowed = load_config(stranger.run / "config.yaml", allow_code=True)
    assert allowed.log.trackers[0].options["trust_remote_code"] is True
    over = "log.trackers.0.trust_remote_code=false"
    assert load_config(stranger.run / "config.yaml", [over]).log.trackers


@pytest.mark.parametrize("text", ["${oc.env:SECRET}:8080", "x:${oc.env:SECRET}:1"])
def test_an_override_that_ends_as_a_place_does_is_the_users_own(stranger, monkeypatch, text):
    monkeypatch.setenv("SECRET", "s3cret")
    stranger.train(known=True)
    config = load_config(stranger.run / "config.yaml", [f"run.name={text}"])
    assert config.run.name == text.replace("${oc.env:SECRET}", "s3cret")


def test_what_a_plugin_imports_between_saves_is_recorded(stranger, monkeypatch):
    beside(stranger)
    stranger.write(
        "import sys\nsys.path.insert(0, str(Path(__file__).parent))\ndef later():\n    import beside_lib\n"
    )
    config = load_config(stranger.config())
    assert remember(config) is None
    (plugin,) = (m for n, m in sys.modules.items() if n.startswith("mm_local_") and n.endswith("_theirs"))
    plugin.later()  # in the first step
    saved = SimpleNamespace(poll=list, save=lambda *given, **more: None, close=lambda **more: None)
    reporter = SimpleNamespace(enter=lambda phase: None, leads=True)
    callbacks, quiet = CallbackList(), SimpleNamespace(close=lambda: None)
    between = BetweenSteps(
        config,
        steps=9,
        store=saved,
        state=dict,
        facts=dict,
        manifest={},
        config_yaml="",
        evaluating=Evaluating(None, None, False, reporter, callbacks),
        flag=StopFlag(),
        reporter=reporter,
        callbacks=callbacks,
        profile=quiet,
        watchdog=quiet,
    )
    library = stranger.plugin.parent / "beside_lib.py"
    digest = digest_of(library.read_bytes())
    assert not KnownCode.of_user().holds(digest)
    between.save(1, {}, last=False)
    assert KnownCode.of_user().holds(digest)
    importlib.import_module("beside_package.inner")
    between.close(None)
    assert KnownCode.of_user().holds(digest_of((library.parent / "beside_package/inner.py").read_bytes()))

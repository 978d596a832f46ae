"""`mm`: fast start, errors as messages, exit codes that scripts can rely on; `mm plugins`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mm_core.cli import main as cli
from mm_core.cli.main import main, train_main
from support.sites import MODEL


@pytest.fixture
def probe(site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the module of `mm train` with one that runs the given statement."""

    def install(statement: str) -> None:
        site.module(
            "mm_probe",
            "from mm_core.errors import ConfigError, MMError, PeerError\n"
            "def configure(parser): parser.add_argument('--config')\n"
            f"def execute(args):\n    {statement}\n",
        )
        monkeypatch.setattr(cli, "COMMANDS", {"train": ("mm_probe", "probe")})

    return install


LOUD = """
print("a plugin is imported")
from mm_core import Component, hookimpl


class Schedule:
    def __init__(self, total_steps, base_lr):
        print("a component is built")

    def factor(self, step):
        return 1.0


@hookimpl
def mm_lr_schedules():
    return [Component("loud", "mm_loud.plugin:Schedule")]
"""


@pytest.mark.parametrize(
    "words",
    [
        ["plugins", "list"],
        ["plugins", "check", "--import"],
        ["plugins", "test", "loud/loud"],
        ["config", "schema"],
        ["validate"],
        ["train", "--dry-run", "--config"],
    ],
)
def test_what_a_plugin_prints_does_not_corrupt_json(site: Any, tiny: Path, words: list[str]) -> None:
    site.plugin("loud", LOUD)
    more = [str(tiny), "lr_schedule={type: loud/loud}"] if words[0] in ("validate", "train") else []
    done = site.mm(*words, *more, *(["--json"] if words[0] != "config" else []))
    assert json.loads(done.stdout), done.stdout + done.stderr
    assert "a plugin is imported" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["plugns"]])
def test_help_imports_no_command_no_plugin_and_nothing_heavy(site: Any, arguments: list[str]) -> None:
    site.good("alpha")
    code = (
        "import sys; from mm_core.cli.main import main; main(sys.argv[1:]);"
        "print(*sorted(m for m in sys.modules if m.startswith(('mm_core.', 'mm_alpha', 'mm_custom'))"
        " or m in ('torch', 'rich', 'omegaconf', 'importlib.metadata', 'numpy')), file=sys.stderr)"
    )
    done = site.run("-c", code, *arguments)
    assert done.stderr.splitlines()[-1].split() == [
        "mm_core.cli",
        "mm_core.cli.main",
        "mm_core.errors",
        "mm_core.lazy",
        "mm_core.plugin",
        "mm_core.plugin.component",
        "mm_core.plugin.hookspecs",
        "mm_core.plugin.kinds",
        "mm_core.plugin.scaffold",
        "mm_core.plugin.scaffold.runs",
        "mm_core.runtime",
        "mm_core.runtime.output",
        "mm_core.schema",
        "mm_core.schema.fields",
    ]


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"  {name:<8}  {summary}\n" in text


def test_help_of_an_action_begins_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for words, summary in (
        (["data", "inspect"], "Media, sizes, and what is left out, of each source, and buckets."),
        (["data", "check"], "Decode everything once and list the bad files (exit code 1)."),
        (["plugins", "new"], "Write the files of a new plugin."),
    ):
        assert main([*words, "--help"]) == 0
        assert f"\n\n{summary}\n\npositional" in capsys.readouterr().out


def test_the_long_help_of_train_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    _, hosts = capsys.readouterr().out.split("\nranks and hosts:\n")
    hosts, plan = hosts.split("\nplan:\n")
    assert "--nnodes" in hosts and "--dry-run" in plan and "--resume" not in hosts + plan


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import mm_core

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mm {mm_core.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "mm: error: unknown command 'trian'; did you mean 'train'?"),
        (
            ["xyz"],
            "mm: error: unknown command 'xyz'; "
            "the commands are train, launch, sample, chat, eval, import, export, weights, report, align,"
            " migrate, validate, data, cache, config, plugins, doctor",
        ),
        (["--versoin"], "mm: error: unrecognized arguments: --versoin; did you mean '--version'?"),
        (["plugins", "lst"], "; did you mean 'list'?"),
        (["plugins", "list", "--kind", "predicter"], "; did you mean 'predictor'?"),
        (["plugins"], "mm plugins: error: the following arguments are required: list|show|check|test|new"),
    ],
)
def test_a_command_line_that_does_not_parse_exits_2_with_the_nearest(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(sentence)


def test_options_are_not_abbreviated(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    probe("return 0")
    assert main(["train", "--conf", "x"]) == 2
    assert capsys.readouterr().err.endswith(
        "mm train: error: unrecognized arguments: --conf x; did you mean '--config'?\n"
    )


def test_an_error_is_readable_with_exit_code_1(
    probe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe("raise MMError('the file is empty', where='a.yaml:3', hint='write something')")
    assert main(["train"]) == 1
    sentence = "mm: error: a.yaml:3: the file is empty\n  hint: write something\n"
    assert capsys.readouterr().err == sentence
    monkeypatch.setenv("MM_DEBUG", "1")
    assert main(["train"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith(sentence)


def test_the_peer_of_a_failed_rank_is_quiet(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    probe("raise PeerError('rank 1 failed')")
    assert main(["train"]) == 1
    assert capsys.readouterr().err == ""


def test_an_interrupt_exits_130(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    probe("raise KeyboardInterrupt")
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "mm: interrupted\n"


def test_a_bug_keeps_its_traceback(probe: Any) -> None:
    probe("raise RuntimeError('a bug')")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train"])


def test_the_exit_code_is_the_commands(probe: Any) -> None:
    probe("return 7 if args.config == 'x' else 0")
    assert main(["train", "--config", "x"]) == 7


def test_mm_train_is_mm_train(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    probe("return 7 if args.config == 'x' else 0")
    assert train_main(["--config", "x"]) == 7
    assert train_main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: mm-train [-h] [--config CONFIG]\n")


def test_a_reader_that_goes_away_is_no_error(site: Any) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "mm_core.cli.main", "plugins", "list"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_list_shows_plugins_and_components(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.good("alpha")
    site.plugin("broken", "1 / 0")
    assert main(["plugins", "list"]) == 0
    text, errors = capsys.readouterr()
    lines = text.splitlines()
    assert [line.split() for line in lines if line.startswith(("PLUGIN", "alpha", "broken"))] == [
        ["PLUGIN", "VERSION", "STATUS", "DISTRIBUTION"],
        ["alpha", "1.0", "ok", "mm-alpha"],
        ["broken", "1.0", "failed", "mm-broken"],
    ]
    assert any(line.split() == ["alpha/dit", "a", "transformer"] for line in lines)
    named = [line for line in lines if "ZeroDivisionError" in line]
    assert len(named) == 1  # one line names it
    assert errors == ""


def test_list_of_one_kind(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--kind", "lr_schedule"]) == 0
    text = capsys.readouterr().out
    assert "core/cosine" in text
    assert "core/adamw" not in text


def test_list_as_json(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.good("alpha")
    assert main(["plugins", "list", "--json", "--kind", "predictor"]) == 0
    plugins = {p["namespace"]: p for p in json.loads(capsys.readouterr().out)["plugins"]}
    assert plugins["core"]["components"] == []
    assert plugins["alpha"] == {
        "namespace": "alpha",
        "module": "mm_alpha.plugin",
        "distribution": "mm-alpha",
        "version": "1.0",
        "status": "ok",
        "error": None,
        "requirement": "mm-core>=0.1,<0.2",
        "imports_torch": False,
        "components": [
            {
                "name": "alpha/dit",
                "kind": "predictor",
                "summary": "a transformer",
                "target": "mm_alpha.model:DiT",
                "config": "mm_alpha.config:DiTConfig",
                "aliases": ["old_dit"],
                "capabilities": {"video": True},
                "licence": "Apache-2.0",
                "paper": "https://arxiv.org/abs/2212.09748",
                "distribution": "mm-alpha",
                "version": "1.0",
            }
        ],
    }


def test_show_prints_everything(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.good("alpha")
    assert main(["plugins", "show", "old_dit"]) == 0
    model = site.folder / "mm_alpha" / "model.py"
    assert capsys.readouterr().out == (
        "alpha/dit  (predictor)\n"
        "  summary       a transformer\n"
        "  distribution  mm-alpha 1.0\n"
        "  target        mm_alpha.model:DiT\n"
        "  config        mm_alpha.config:DiTConfig\n"
        f"  source        {model}\n"
        "  aliases       old_dit\n"
        "  capabilities  video=True\n"
        "  licence       Apache-2.0\n"
        "  paper         https://arxiv.org/abs/2212.09748\n"
        "\n"
        "  fields\n"
        "    depth  int  12  # how many blocks\n"
    )
    assert "mm_alpha.model" not in sys.modules


def test_show_as_json_and_every_plugin_of_a_bare_name(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.good("alpha")
    site.good("beta")
    assert main(["plugins", "show", "dit", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["components"]
    assert [c["name"] for c in shown] == ["alpha/dit", "beta/dit"]
    field = {"name": "depth", "type": "int", "default": "12", "comment": "how many blocks"}
    assert shown[0]["fields"] == [field]


CONFIG = """from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Block:
    width: int = 8  # of a block
    {inner}


@dataclass(frozen=True)
class DiTConfig:
    \"\"\"Config of a transformer.\"\"\"

    first: Block = field(default_factory=Block)
    more: tuple[Block, ...] = ()  # further blocks
    named: dict[str, Block | None] | None = None
"""


def test_show_lists_the_fields_of_nested_configs(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.good("alpha")
    (site.folder / "mm_alpha" / "config.py").write_text(CONFIG.format(inner="below: Block | None = None"))
    assert main(["plugins", "show", "old_dit"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.partition("  fields\n")[2].splitlines()]
    assert [row[0] for row in rows] == [
        *("first", "first.width", "first.below"),
        *("more", "more.0.width", "more.0.below"),
        *("named", "named.KEY.width", "named.KEY.below"),
    ]
    assert rows[1] == ["first.width", "int", "8", "#", "of", "a", "block"]


def test_show_of_an_annotation_that_does_not_resolve_names_its_class(
    site: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    site.good("alpha")
    path = site.folder / "mm_alpha" / "config.py"
    path.write_text(CONFIG.format(inner="depth: integer = 1"))
    assert main(["plugins", "show", "old_dit"]) == 1
    assert capsys.readouterr().err == (
        "mm: error: the annotations of mm_alpha.config.Block cannot be resolved: name 'integer' is not"
        f" defined ({path}, line 6)\n"
        "  hint: annotate with names that exist when the module is imported\n"
    )
    code, (finding,) = check(site)
    assert code == 1
    assert "predictor 'alpha/dit': the annotations of mm_alpha.config.Block cannot be" in finding["sentence"]


def test_show_of_nothing_is_an_error_with_the_nearest(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.plugin("broken", "1 / 0")
    assert main(["plugins", "show", "adamwv"]) == 1
    text = capsys.readouterr().err
    assert text.startswith(
        "mm: error: no component is named 'adamwv'\n  hint: did you mean 'adamw' or 'adam'?; plugin 'broken'"
    )


def check(site: Any, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    done = site.mm("plugins", "check", "--json", *arguments, anew="--import" not in arguments)
    findings = json.loads(done.stdout)["findings"]
    mine = [finding for finding in findings if finding["plugin"] not in ("core", "custom_dit")]
    return done.returncode, mine


def test_check_of_a_good_plugin_finds_nothing(site: Any) -> None:
    site.good("alpha")
    assert check(site)[1] == []
    assert check(site, "--import")[1] == []


def test_check_exits_1_when_a_plugin_is_broken(site: Any) -> None:
    site.plugin("broken", "1 / 0")
    code, findings = check(site)
    assert code == 1
    assert [f["severity"] for f in findings] == ["fault"]
    done = site.mm("plugins", "check")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "'broken'" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "error: plugin 'broken' (mm-broken 1.0) failed: import of mm_broken.plugin failed: Zero"
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("module", "source", "sentence"),
    [
        (
            "model",
            "class DIT: ...\n",
            "/mm_alpha/model.py has no 'DiT': did you mean 'DIT'?",
        ),
        (
            "model",
            None,
            "the target 'mm_alpha.model:DiT' does not exist: there is no module 'mm_alpha.model'",
        ),
        ("model", "def f(:", "cannot be imported: SyntaxError: invalid syntax ("),
        (
            "config",
            None,
            "the config 'mm_alpha.config:DiTConfig' does not exist: there is no module 'mm_alpha.config'",
        ),
        (
            "config",
            "class DiTConfig: ...\n",
            "the config 'mm_alpha.config:DiTConfig' is not a dataclass; hint: ",
        ),
        (
            "config",
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass DiTConfig:\n    depth: integer = 1\n",
            "the annotations of mm_alpha.config.DiTConfig cannot be resolved: name 'integer' is not defined",
        ),
        (
            "config",
            "import torch\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass DiTConfig:\n    depth: int = 1\n",
            "the config 'mm_alpha.config:DiTConfig' imports torch, which makes every check of a config slow",
        ),
    ],
)
def test_check_finds_what_is_wrong_with_a_component(
    site: Any, module: str, source: str | None, sentence: str
) -> None:
    site.good("alpha")
    file = site.folder / "mm_alpha" / f"{module}.py"
    file.unlink()
    if source is not None:
        file.write_text(source)
    code, findings = check(site)
    assert (code, len(findings)) == (1, 1), findings
    assert "plugin 'alpha' (mm-alpha 1.0), predictor 'alpha/dit'" in findings[0]["sentence"]
    assert sentence in findings[0]["sentence"]


@pytest.mark.parametrize(("strict", "code"), [("0", 0), ("1", 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_list_shows_a_broken_plugin_and_fails_where_it_is_an_error(
    site: Any, monkeypatch: Any, capsys: Any, strict: str, code: int, options: list[str]
) -> None:
    site.plugin("broken", "1 / 0")
    monkeypatch.setenv("MM_PLUGINS_STRICT", strict)
    assert main(["plugins", "list", *options]) == code
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_check_imports_targets_only_with_the_option(site: Any) -> None:
    site.good("alpha")
    (site.folder / "mm_alpha" / "model.py").write_text(f"import no_such_library\n{MODEL}")
    assert check(site)[1] == []
    code, (finding,) = check(site, "--import")
    assert code == 1
    assert "No module named 'no_such_library'" in finding["sentence"]
    (site.folder / "mm_alpha" / "model.py").write_text("class DiT:\n    def __init__(self, layers): ...\n")
    code, (contract, finding) = check(site, "--import")
    assert code == 1
    assert "DiT does not keep its contract: it does not derive from torch.nn.Module" in contract["sentence"]
    assert finding["sentence"].endswith(
        "the target 'mm_alpha.model:DiT' does not accept the fields of 'mm_alpha.config:DiTConfig': "
        "missing a required argument: 'layers'"
    )


def test_check_warns_without_failing(site: Any) -> None:
    site.good("alpha", requires=["torch>=2.7"])
    site.plugin("heavy", "import torch\n")
    findings = check(site)[1]
    assert [(f["severity"], f["sentence"]) for f in findings] == [
        (
            "warning",
            "plugin 'alpha' (mm-alpha 1.0) does not declare which versions of mm-core it works with: "
            "add 'mm-core>=0.1,<0.2' to its dependencies",
        ),
        (
            "warning",
            "plugin 'heavy' (mm-heavy 1.0) imports torch when it is loaded: "
            "import torch only in the target's module",
        ),
    ]


def test_what_the_repository_ships_checks_without_torch(site: Any) -> None:
    code = (
        "import sys; from mm_core.cli.main import main; code = main(['plugins', 'check']);"
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = site.run("-c", code)
    assert (done.returncode, done.stderr) == (0, "False\n"), done.stdout


def test_a_local_file_can_be_looked_at(site: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my_dit.py"
    path.write_text(
        "from mm_core import Component, hookimpl\n"
        "def my_dit(depth: int = 3): ...\n"
        "@hookimpl\ndef mm_predictors(): return [Component(name='my_dit', target='my_dit:my_dit')]\n"
    )
    assert main(["plugins", "show", "local/my_dit", "--path", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"  source        {path}\n" in text
    assert "    depth  int  3\n" in text
    path.write_text("1 / 0")
    assert main(["plugins", "check", "--path", str(tmp_path / "gone.py")]) == 1
    assert "No such file or directory" in capsys.readouterr().out


def test_output_with_nowhere_to_go_is_an_error():
    command = f"{sys.executable} -m mm_core.cli.main plugins list >&-"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "mm: error: standard output: the output cannot be written" in ended.stderr

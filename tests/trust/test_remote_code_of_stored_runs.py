"""`trust_remote_code` of a stored run: the folder's files run where this user has trained with them."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
import yaml

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.config.load import load_config
from mm_core.config.stored import remember
from mm_core.data.datasets.text_rows import TextRowsDataset
from mm_core.errors import CheckpointError, TrustError
from mm_core.plan import build_task
from mm_core.plugin.trust import remote_code
from mm_core.plugin.trust.remote_code import code_folder, code_pieces
from mm_core.tasks.pretrained.model import build_model
from mm_core.tokenizer import open_tokenizer

MODELING = """
from pathlib import Path

with Path({mark!r}).open("a") as file:
    file.write("ran\\n")

from transformers import BertConfig, BertForSequenceClassification
from .layers_own import WIDTH


class OwnConfig(BertConfig):
    model_type = "own_bert"


class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""
TOKENIZER = """
from pathlib import Path

with Path({mark!r}).open("a") as file:
    file.write("ran\\n")

from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
SMALL = {
    "model_type": "own_bert", "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 8, "max_position_embeddings": 16, "num_labels": 2,
    "auto_map": {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForSequenceClassification": "modeling_own.OwnModel",
    },
}  # fmt: skip
VOCABULARY = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "[PAD]": 1, "a": 2}, "unk_token": "[UNK]"},
}  # fmt: skip


class Model:
    """A folder with Python files, and a run that trains it."""

    def __init__(self, folder: Path) -> None:
        self.mark, self.folder = folder / "mark", folder / "model"
        self.folder.mkdir(parents=True)
        self.write("modeling_own.py", MODELING.format(mark=str(self.mark)))
        self.write("layers_own.py", "WIDTH = 8\n")
        self.write("tokenization_own.py", TOKENIZER.format(mark=str(self.mark)))
        self.write("config.json", json.dumps(SMALL))
        self.write("tokenizer.json", json.dumps(VOCABULARY))
        auto = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
        tokens = {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": auto,
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
        }
        self.write("tokenizer_config.json", json.dumps(tokens))
        self.table = folder / "rows.jsonl"
        self.table.write_text('{"text": "a", "label": 1}\n' * 4)
        self.yaml = folder / "own.yaml"
        self.run = folder / "run"
        self.run.mkdir()
        (self.run / "manifest.json").write_text("{}")
        self.store()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def store(self, **task: object) -> None:
        rows = {"type": "text_rows", "file": str(self.table), "tokenizer": str(self.folder), "label": "label"}
        named = {"type": "pretrained", "from_pretrained": str(self.folder), "weights": "random"}
        named |= {"auto_class": "AutoModelForSequenceClassification", "trust_remote_code": True}
        config = {
            "run": {"name": "own"},
            "task": {**named, **task},
            "data": {"train": {**rows, "trust_remote_code": True}},
            "train": {"steps": 1},
        }
        for path in (self.yaml, self.run / "config.yaml"):
            path.write_text(yaml.safe_dump(config))

    @property
    def ran(self) -> int:
        return len(self.mark.read_text().splitlines()) if self.mark.exists() else 0

    def remember(self) -> None:
        assert remember(load_config(self.yaml)) is None

    def build(self, **more: object) -> torch.nn.Module:
        return build_task(load_config(self.run / "config.yaml", **more))


@pytest.fixture
def model(tmp_path, home, monkeypatch) -> Model:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)  # of another cache
    return Model(tmp_path / "theirs")


@pytest.mark.filterwarnings("ignore::mm_core.errors.RunWarning")
class TestStored:
    def test_a_strangers_files_are_not_run(self, model):
        with pytest.raises(TrustError) as caught:
            model.build()
        names = (
            "config.json",
            "layers_own.py",
            "modeling_own.py",
            "tokenization_own.py",
            "tokenizer_config.json",
        )
        for name in names:
            assert str(model.folder / name) in caught.value.what
        assert "--allow-code" in caught.value.hint
        config = load_config(model.run / "config.yaml")
        assert config.task.options["trust_remote_code"] == "known"
        with pytest.raises(TrustError, match=r"tokenization_own\.py"):
            TextRowsDataset(**dict(config.data.train.options))
        assert not model.ran

    def test_the_flag_and_the_command_line_run_them(self, model):
        assert type(model.build(allow_code=True).model).__name__ == "OwnModel"
        assert model.ran
        said = load_config(model.run / "config.yaml", ["task.trust_remote_code=true"])
        assert said.task.options["trust_remote_code"] is True

    def test_what_this_user_trained_with_runs(self, model):
        model.remember()
        task = model.build()
        assert type(task.model).__name__ == "OwnModel"
        assert model.ran == 1
        assert task.model.config.name_or_path == str(model.folder)
        options = dict(load_config(model.run / "config.yaml").data.train.options)
        rows = pickle.loads(pickle.dumps(TextRowsDataset(**options)))
        assert rows[0]["ids"] == [2]
        tokenizer = open_tokenizer(str(model.folder), "known")
        assert type(tokenizer).__name__ == "OwnTokenizer"
        assert tokenizer.name_or_path == str(model.folder)
        assert not [key for key, value in vars(tokenizer).items() if "mm_core-code-" in str(value)]

    @pytest.mark.parametrize("name", ["modeling_own.py", "layers_own.py", "config.json"])
    def test_one_byte_changed_is_refused(self, model, name):
        model.remember()
        model.write(name, (model.folder / name).read_text() + " ")
        with pytest.raises(TrustError, match=name):
            model.build()
        assert not model.ran

    def test_a_file_more_is_refused(self, model):
        model.remember()
        model.write("more.py", "")
        with pytest.raises(TrustError, match=r"more\.py"):
            model.build()

    def test_files_that_are_exchanged_after_they_were_checked_are_not_run(self, model, monkeypatch):
        model.remember()
        evil = model.folder / "evil"
        real = remote_code.check_known

        def exchange(*given: object, **more: object) -> None:
            real(*given, **more)
            model.write("layers_own.py", f"WIDTH = 8\nopen({str(evil)!r}, 'w')\n")
            other = {**SMALL, "auto_map": {"AutoConfig": "/tmp/evil--modeling_own.OwnConfig"}}
            model.write("config.json", json.dumps(other))

        monkeypatch.setattr(remote_code, "check_known", exchange)
        assert type(model.build().model).__name__ == "OwnModel"
        assert not evil.exists()

    def test_a_file_that_named_no_class_when_it_was_checked_names_none_later(self, model, monkeypatch):
        model.write("extra.json", "{}")
        model.remember()
        real = remote_code.check_known

        def exchange(*given: object) -> None:
            real(*given)
            model.write("extra.json", json.dumps({"auto_map": {"AutoConfig": "/tmp/evil--a.B"}}))

        monkeypatch.setattr(remote_code, "check_known", exchange)
        with code_folder(model.folder, "known") as place:
            assert (place / "extra.json").read_text() == "{}"

    @pytest.mark.parametrize("key", ["auto_map", "_name_or_path"])
    def test_the_config_cannot_name_other_code_for_a_known_folder(self, model, tmp_path, key):
        model.remember()
        evil = Model(tmp_path / "evil")
        value = {"AutoModelForSequenceClassification": f"{evil.folder}--modeling_own.OwnModel"}
        model.store(overrides={key: value if key == "auto_map" else str(evil.folder)})
        with pytest.raises(TrustError, match=f"what {key} names"):
            model.build()
        assert not evil.ran

    def nest(self, model, folder: str) -> Path:
        """Moves the config's class to a file below the model's folder."""
        inner = model.folder / folder
        inner.mkdir(parents=True)
        mark = f'open({str(model.mark)!r}, "a").write("ran\\n")\n'
        (inner / "conf.py").write_text(
            mark + "from transformers import BertConfig\nclass OwnConfig(BertConfig):\n"
            '    model_type = "own_bert"\n'
        )
        other = {"AutoConfig": f"{folder}/conf.OwnConfig", "AutoModelForSequenceClassification": "m.M"}
        model.write("config.json", json.dumps({**SMALL, "auto_map": other}))
        return inner / "conf.py"

    @pytest.mark.parametrize("folder", ["code", "a/b"])
    @pytest.mark.parametrize("linked", [False, True])
    def test_files_of_inner_folders_are_checked(self, model, tmp_path, folder, linked):
        path = self.nest(model, folder)
        if linked:
            path.parent.rename(tmp_path / "real")
            path.parent.symlink_to(tmp_path / "real")
            (tmp_path / "real" / "again").symlink_to(tmp_path / "real")
        model.remember()
        with code_folder(model.folder, "known") as place:
            assert (place / folder / "conf.py").read_text() == path.read_text()
            assert not (place / folder).is_symlink()
            path.write_text(path.read_text() + "evil = 1\n")
            assert "evil" not in (place / folder / "conf.py").read_text()
        with pytest.raises(TrustError, match=f"{folder}/conf"):
            model.build()
        assert not model.ran

    def test_known_files_under_each_others_names_are_refused(self, model):
        model.remember()
        (model.folder / "layers_own.py").rename(model.folder / "other.py")
        with pytest.raises(TrustError, match=r"other\.py"):
            model.build()

    @pytest.mark.parametrize("named", ["/tmp/evil.Own", "../evil.Own", "me/evil--evil.Own"])
    def test_classes_of_other_folders_are_refused(self, model, named):
        model.write("config.json", json.dumps({**SMALL, "auto_map": {"AutoConfig": ["a.B", named]}}))
        model.remember()
        with pytest.raises(TrustError, match="code outside of the folder of a model") as caught:
            model.build()
        assert named in caught.value.what
        assert not model.ran

    def test_a_folder_of_countless_files_is_refused(self, model, monkeypatch):
        monkeypatch.setattr(remote_code, "MAX_FILES", 3)
        with pytest.raises(CheckpointError, match="more than 3 files"):
            model.build()

    def test_keys_in_escapes_are_found(self, model):
        text = json.dumps({"a": {"auto_map": {}}}).replace("auto_map", "\\u0061uto_map")
        model.write("processor_config.json", text)
        model.write("broken.json", "{")
        model.write("plain.json", '{"map": 1}')
        names = {Path(piece.name).name for piece in code_pieces(model.folder)}
        assert {"processor_config.json", "broken.json"} < names
        assert "plain.json" not in names

    def test_ones_own_config_runs_them_as_before(self, model):
        with torch.device("meta"):
            made = build_model(
                PretrainedConfig(
                    str(model.folder),
                    "AutoModelForSequenceClassification",
                    weights="random",
                    trust_remote_code=True,
                ),
                "model",
            )
        assert type(made).__name__ == "OwnModel"
        assert model.ran

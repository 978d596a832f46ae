"""`mm sample` of runs that answer in words: a table's prompts, the library's own answers, errors."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import transformers
import yaml

import mm_core
from mm_core.cli.main import main
from mm_core.cli.ranks import _while_read
from mm_core.contracts import Decoding, Turn
from mm_core.errors import ContractError, DataError
from mm_core.inference.answer import answer_session
from mm_core.interchange.export import export
from support import pretrained_models as models

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run of one step on prompts and what follows them; its model's folder asks for no repetitions."""
    top = tmp_path_factory.mktemp("answering")
    model = models.save_model("qwen3", top)
    models.save_words(model)
    said = {"eos_token_id": 2, "repetition_penalty": 5.0, "do_sample": True, "temperature": 0.6, "top_k": 20}
    (model / "generation_config.json").write_text(json.dumps(said))
    rows = [{"ask": f"w{n} w{n + 1}", "say": f"w{n + 2}"} for n in range(5, 20)]
    (top / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"type": "text_rows", "file": str(top / "rows.jsonl"), "tokenizer": str(model)}
    train |= {"text": "say", "prompt": "ask", "separator": " w4", "max_length": 20}
    document = models.run_config(
        "qwen3", model, top, data={"train": train}, train={"steps": 1, "micro_batch_size": 4}
    )
    mm_core.train(mm_core.load_config(document))
    return top


def ran(capsys, *words: object, code: int = 0) -> str:
    capsys.readouterr()
    found = main([str(word) for word in words])
    said = capsys.readouterr()
    assert found == code, said.err
    return said.err if code else said.out


def expected(place: Path, tmp_path: Path, prompts: list[str]) -> list[str]:
    """The library's answers from the exported folder, with the folder's generation settings."""
    export(place / "runs/qwen3", tmp_path / "out", "transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt + " w4", return_tensors="pt")["input_ids"]
        said = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(said, skip_special_tokens=True))
    return answers


def test_a_prompt_is_answered_as_the_exported_folder_answers_it(place, tmp_path, capsys):
    prompts = ["w5 w6", "w30", "w9 w9 w11"]
    answers = expected(place, tmp_path, prompts)
    assert all(len(set(answer.split())) == len(answer.split()) > 1 for answer in answers), "no repetition"
    command = ["sample", "--run", place / "runs/qwen3", "--max-new-tokens", 8]
    assert ran(capsys, *command, "--prompt", prompts[0]) == answers[0] + "\n"
    out = tmp_path / "answers.jsonl"
    both = [word for prompt in prompts for word in ("--prompt", prompt)]
    shown = ran(capsys, *command, *both, "--out", out)
    assert shown == "".join(f"> {p}\n{a}\n" for p, a in zip(prompts, answers, strict=True))
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == answers
    refused = ran(capsys, *command, "--prompt", "w5", "--input", "depth=a.png", code=1)
    assert "the run's task answers in words, so --input cannot be used" in refused


def test_rows_of_a_table_are_answered_and_bad_ones_reported(place, tmp_path, capsys):
    rows = [{"ask": "w5 w6", "say": "w7"}, {"ask": "", "say": "w7"}, {"ask": "w30"}]
    rows += [{"ask": "w3 " * 30, "say": "w7"}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "answers.jsonl"
    command = ["sample", "--run", f"{place / 'runs/qwen3'}@1", "--max-new-tokens", 8]
    said = ran(capsys, *command, "--prompts", tmp_path / "asked.jsonl", "--out", out)
    assert said.startswith(f"2 answers in {out}; 2 rows could not be read, the first: ")
    assert "the prompt is empty" in said and said.count("\n") == 1
    first, empty, second, long = (json.loads(line) for line in out.read_text().splitlines())
    assert [first["text"], second["text"]] == expected(place, tmp_path, ["w5 w6", "w30"])
    assert first["references"] == ["w7"] and "references" not in second
    assert "the prompt is empty" in empty["error"] and "line 2" in empty["error"]
    assert "the prompt has 31 tokens" in long["error"] and "accepted: 1 to 19" in long["error"]


def test_rows_of_text_are_no_conversation_and_show_nothing(place, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\nw7\n/new\nw5 w6\n"))
    assert main(["chat", "--run", str(place / "runs/qwen3"), "--max-new-tokens", "4"]) == 1
    said = capsys.readouterr()
    first, second = said.out.splitlines()
    assert first == second
    assert "the run was trained on single prompts, not on conversations of several turns" in said.err
    assert "start again with /new" in said.err
    shows = pytest.raises(DataError, match="its prompts cannot contain images")
    with answer_session(place / "runs/qwen3") as opened, shows:
        opened.answer([Turn("user", "w5", (Path("a.png"),))], Decoding(max_new_tokens=2))


def test_what_generates_no_text_is_a_readable_error(place, tmp_path):
    classes = models.save_model("bert_classes", tmp_path)
    models.save_words(classes)
    document = yaml.safe_load((place / "runs/qwen3/config.yaml").read_text())
    train = {"type": "text_rows", "file": str(place / "rows.jsonl"), "tokenizer": str(classes)}
    train |= {"text": "ask", "label": "say", "labels": ["w7", "w8"]}

    def stored(name: str, **sections) -> Path:
        checkpoint = tmp_path / name / "checkpoints" / "step_00000001"
        source = place / "runs/qwen3/checkpoints/step_00000001"
        checkpoint.mkdir(parents=True)
        for file in source.iterdir():
            (checkpoint / file.name).symlink_to(file)
        (checkpoint / "config.yaml").unlink()
        changed = {**document, **sections}
        (checkpoint / "config.yaml").write_text(yaml.safe_dump(changed))
        return checkpoint

    with pytest.raises(ContractError, match="the run's model classifies rows") as fault:
        mm_core.answer(stored("classes", data={"train": train}), "w5")
    assert fault.value.hint == "run `mm eval --predictions FILE` for the class of each row"
    task = {"type": "pretrained", "from_pretrained": str(classes)}
    task |= {"auto_class": "AutoModelForSequenceClassification"}
    with pytest.raises(ContractError, match="BertForSequenceClassification generates no text") as fault:
        mm_core.answer(stored("head", task=task), "w5")
    assert fault.value.where == "task.auto_class"
    clips = yaml.safe_load((HERE.parents[1] / "configs/custom_dit/quickstart.yaml").read_text())
    with pytest.raises(
        ContractError, match="the task core/text_to_video does not answer prompts with text"
    ) as fault:
        mm_core.answer(stored("clips", task=clips["task"], data=clips["data"]), "w5")
    assert fault.value.hint == "use `mm sample` for runs that generate clips"
    rows = {"train": {"type": "token_rows", "kind": "tokens"}}
    with pytest.raises(ContractError, match="trained on local/token_rows, which has no format for prompts"):
        mm_core.answer(stored("rows", data=rows), "w5")


def test_a_rank_whose_reader_has_left_ends_in_silence(monkeypatch):
    """As a lone process does, with 141; what breaks in another pipe is a fault."""
    left, ours = os.pipe()
    with os.fdopen(ours, "w") as output:
        monkeypatch.setattr("sys.stdout", output)

        def broken() -> int:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            _while_read(broken)
        os.close(left)

        def says() -> int:
            print("an answer", flush=True)
            return 0

        assert _while_read(says) == 141


def test_answers_in_python_are_those_of_the_command(place, capsys):
    run = place / "runs/qwen3"
    said = mm_core.answer(run, "w5 w6", max_new_tokens=8)
    assert ran(capsys, "sample", "--run", run, "--prompt", "w5 w6", "--max-new-tokens", 8) == said + "\n"


def test_a_prompt_that_leaves_a_model_no_positions_fails_alone(tmp_path, capsys):
    """As many as a table of positions has, which is found out of the model; other rows are answered."""
    sizes = {"vocab_size": 48, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **models.ENDS)).save_pretrained(model)
    models.save_words(model)
    (tmp_path / "rows.jsonl").write_text('{"ask": "w5", "say": "w7"}\n' * 2)
    train = {"type": "text_rows", "file": str(tmp_path / "rows.jsonl"), "tokenizer": str(model)}
    train |= {"text": "say", "prompt": "ask", "separator": " w4", "max_length": 20}
    steps = {"steps": 1, "micro_batch_size": 2, "global_batch_size": 2}
    mm_core.train(
        mm_core.load_config(models.run_config("qwen3", model, tmp_path, data={"train": train}, train=steps))
    )
    asked, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    rows = [{"ask": " ".join(["w5"] * count), "say": ""} for count in (3, 15, 13)]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["sample", "--run", tmp_path / "runs/qwen3", "--batch-size", 3]
    said = ran(capsys, *command, "--prompts", asked, "--out", out)
    reason = "a prompt has 16 tokens, but GPT2LMHeadModel has only 16 positions"
    assert said.startswith(f"2 answers in {out}; 1 row could not be read: ") and reason in said
    first, long, second = (json.loads(line) for line in out.read_text().splitlines())
    assert reason in long["error"] and "text" in first and "text" in second
    said = ran(capsys, *command[:3], "--prompt", rows[1]["ask"], code=1)
    assert reason in said and "hint: lower max_length of the dataset" in said

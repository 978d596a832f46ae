"""Launch scripts: the flags of the program that they start, and that nothing of them runs."""

import json
import subprocess
from pathlib import Path

import pytest

from mm_core.errors import ConfigError
from mm_core.interchange import Script, read_script
from mm_core.schema.nodes import to_python


def script(folder: Path, text: str) -> Script:
    file = folder / "train.sh"
    file.write_text(text)
    return read_script(file)


def flags_of(folder: Path, text: str) -> object:
    (program,) = script(folder, text).programs()
    return to_python(program.flags)


BLOCK = """
ARGS="
    --lr {lr} \\
    --steps $STEPS \\
"
torchrun train.py $ARGS
"""
SAID = [
    ("torchrun train.py --lr 1e-5", {"--lr": 1e-5}),
    ("torchrun train.py --lr=1e-5 --bf16", {"--lr": 1e-5, "--bf16": True}),
    ("python -m trainer --lr 1", {"--lr": 1}),
    ("python train.py --betas 0.9 0.95 --x", {"--betas": [0.9, 0.95], "--x": True}),
    ("LR=3; python train.py --lr $LR", {"--lr": 3}),
    ("LR=3\npython train.py --lr ${LR}", {"--lr": 3}),
    ("LR = 3\npython train.py --lr 1", {"--lr": 1}),
    ("export LR=3\npython train.py --lr $LR", {"--lr": 3}),
    ("A=2 B=4\npython train.py --b $(($A*B))", {"--b": 8}),
    ("W=8; TP=2; PP=2; CP=1\nDP=$(($W/$TP/$PP/$CP))\npython train.py --n $((DP * 3))", {"--n": 6}),
    (
        "python train.py --n $((7/2)) --m $((-7/2)) --r $((7%4)) --s $((2+3*4))",
        {"--n": 3, "--m": -3, "--r": 3, "--s": 14},
    ),
    ("STEPS=5\n" + BLOCK.format(lr="1e-5"), {"--lr": 1e-5, "--steps": 5}),
    ("STEPS=5\n" + BLOCK.format(lr="$RATE").replace("ARGS=", "RATE=2\nARGS="), {"--lr": 2, "--steps": 5}),
    ("A=' --a 1 '\nB=\" --b 2 \"\npython train.py $A $B --c 3", {"--a": 1, "--b": 2, "--c": 3}),
    ('A="--a 1"\nA="$A --b 2"\npython train.py $A', {"--a": 1, "--b": 2}),
    ('A="--a 1"\nA+=" --b 2"\npython train.py $A', {"--a": 1, "--b": 2}),
    ("A=(--a 1 --b)\nA+=(2)\npython train.py ${A[@]}", {"--a": 1, "--b": 2}),
    ('A=(\n  --a "x y"  # why\n  --b 2\n)\npython train.py "${A[@]}"', {"--a": "x y", "--b": 2}),
    ("A=(1 2 3)\npython train.py --a ${A[1]}", {"--a": 2}),
    (
        'P="my folder"\npython train.py --save "$P" --load $P',
        {"--save": "my folder", "--load": ["my", "folder"]},
    ),
    ("python train.py --save 'a $B c'", {"--save": "a $B c"}),
    ('python train.py --save "a \\"b\\" \\$c"', {"--save": 'a "b" $c'}),
    ("python train.py --save a\\ b", {"--save": "a b"}),
    ("python train.py --n ${N:-4} --m ${M-x}", {"--n": 4, "--m": "x"}),
    ("N=2\npython train.py --n ${N:-4}", {"--n": 2}),
    ("N=\npython train.py --n ${N:-4} --m ${N-5}", {"--n": 4, "--m": True}),
    ("N=()\npython train.py --n ${N:-4} --m ${N-5}", {"--n": 4, "--m": 5}),
    ("declare -r N=2\ndeclare -xg M=3\npython train.py --n $N --m $M", {"--n": 2, "--m": 3}),
    ("A=1; cd x && A=2 python train.py --lr 1", {"--lr": 1}),
    ("true &&\n  python train.py --lr 1\nLR=2\npython none --lr $LR", {"--lr": 1}),
    ("A=1\nfor ((i = 0; i < 2; i++)); do A=2; done; A=3\npython train.py --a $A", {"--a": 3}),
    ("D=out\npython train.py --n ${N:-$D/x}", {"--n": "out/x"}),
    ("python train.py --lr 1 2>&1 | tee log.txt", {"--lr": 1}),
    ("python train.py --lr 1 > log.txt 2>&1 &", {"--lr": 1}),
    ("cd x && python train.py --lr 1 || exit 1", {"--lr": 1}),
    ("nohup python train.py --lr 1", {"--lr": 1}),
    ("exec torchrun --nproc_per_node 8 train.py --lr 1", {"--lr": 1}),
    ("A=1 torchrun train.py --lr 1", {"--lr": 1}),
    ("python train.py \\\n  --lr 1 \\\n  --b 2\n", {"--lr": 1, "--b": 2}),
    ("# python train.py --lr 9\npython train.py --lr 1 # the rate", {"--lr": 1}),
    ("python train.py --x a#b", {"--x": "a#b"}),
    ("python train.py --x ''", {"--x": ""}),
    ("A=1\r\npython train.py --a $A\r\n", {"--a": 1}),
    ('if [ -z "$X" ]; then\n  echo no\nfi\npython train.py --a 1', {"--a": 1}),
    ("for i in 1 2; do echo $i; done\npython train.py --a 1", {"--a": 1}),
    ("f() {\n  A=2\n}\nA=1\npython train.py --a $A", {"--a": 1}),
    ("case $1 in\n  x) A=2;;\nesac\nA=1; python train.py --a $A", {"--a": 1}),
    ("python train.py --neg -1 --lr 2", {"--neg": -1, "--lr": 2}),
]


@pytest.mark.parametrize(("text", "flags"), SAID)
def test_flags_are_those_that_the_shell_would_give(text, flags, tmp_path):
    assert flags_of(tmp_path, text) == flags


def test_flags_are_those_of_a_real_shell(tmp_path):
    """The same scripts, run by bash with programs that print their arguments."""
    shim = 'import json, sys; print("ARGS", json.dumps(sys.argv[1:]))'
    (tmp_path / "train.py").write_text(shim)
    (tmp_path / "trainer.py").write_text(shim)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/train.py").write_text(shim)
    for text, flags in SAID:
        if "LR = 3" in text or "\r" in text or "case $1" in text:
            continue  # errors in a shell, which ends the script or not
        launcher = 'torchrun() { while [ "${1#*.py}" = "$1" ]; do shift; done; python3 "$@"; }\n'
        body = text.replace("exec torchrun", "torchrun").replace("python ", "python3 ")
        body = body.replace("> log.txt 2>&1 &", "").replace("| tee log.txt", "")
        done = subprocess.run(["bash", "-c", launcher + body], cwd=tmp_path, capture_output=True, text=True)
        (line,) = [each for each in done.stdout.splitlines() if each.startswith("ARGS")]
        given = " ".join(map(repr, json.loads(line.removeprefix("ARGS"))))
        assert flags_of(tmp_path, f"python train.py {given}") == flags, text


def test_each_flag_knows_the_line_where_it_was_written(tmp_path):
    text = 'LR=1\nARGS="\n  --lr $LR \\\n  --steps 2\n"\ntorchrun --n 8 train.py \\\n  $ARGS --x\n'
    (program,) = script(tmp_path, text).programs()
    places = {name: node.where.rpartition(":")[2] for name, node in program.flags.value.items()}
    assert places == {"--lr": "3", "--steps": "4", "--x": "7"}
    assert to_python(program.launcher) == {"--n": 8}


SETS = [
    ("A=1\n[ -f x ] && A=2\npython train.py --a $A", 2, "A=2"),
    ("A=1\n[ -f x ] ||\n  A=2 && B=3\npython train.py --a $A", 3, "A=2"),
    ("A=1\ntest x && export A=2\npython train.py --a $A", 2, "export A=2"),
    ("A=1\n(( A *= 5 ))\npython train.py --a $A", 2, "(( A *= 5 ))"),
    ("A=1\n((++A))\npython train.py --a $A", 2, "((++A))"),
    ("declare -i A=1\nA=A+1\npython train.py --a $A", 1, "declare -i A=1"),
    ("A=1\nprintf -v A %s 2\npython train.py --a $A", 2, "printf -v A"),
    ("A=1\nlet A=2 B=3\npython train.py --a $A", 2, "let A=2"),
    ("A=1\nif true; then A=2; fi\npython train.py --a $A", 2, "A=2"),
    ("A=1\nwhile read A; do A=3; done < x\npython train.py --a $A", 2, "A=3"),
    ("A=1\nfor A in 2 3; do B=1; done\npython train.py --a $A", 2, "B=1"),
    ("A=1\nif [ $1 ]; then\n  case $1 in\n    a) A=2;;\n  esac\nfi\npython train.py --a $A", 4, "A=2"),
    ("A=1\nif [ -f x ]; then let A=2; fi\npython train.py --a $A", 2, "let A=2"),
    ("A=1\nf() {\n  A=2\n}\nf\npython train.py --a $A", 3, "A=2"),
]
HOSTILE = [
    *SETS,
    ("python train.py --a $(touch ran)", 1, "$(touch ran)"),
    ("A=1\nB=`touch ran`\npython train.py --a $B", 2, "`touch ran`"),
    ('A="x $(touch ran) y"\npython train.py --a "$A"', 1, "$(touch ran)"),
    ("eval touch ran\npython train.py --a 1", 1, "eval touch ran"),
    ("source ./evil.sh\npython train.py --a 1", 1, "source ./evil.sh"),
    (". ./evil.sh\npython train.py --a 1", 1, ". ./evil.sh"),
    ("bash <<EOF\ntouch ran\nEOF\npython train.py --a 1", 1, "<<EOF"),
    ("cat <<-'X' | sh\n\ttouch ran\n\tX\npython train.py --a 1", 1, "<<X"),
    ("f() {\n touch ran\n}\nf\npython train.py --a 1", 1, "f"),
    ("(touch ran)\npython train.py --a 1", 1, "("),
    ("python train.py --a $((9**9**9))", 1, "$((9**9**9))"),
    ("python train.py --a $(( __import__('os').system('touch ran') ))", 1, "$(( __import__('os')"),
    ("python train.py --a ${A:=$(touch ran)}", 1, "${A:=$(touch ran)}"),
    ("python train.py --a ${A:-$(touch ran)}", 1, "$(touch ran)"),
    ("python train.py --a $X", 1, "$X"),
    ("python train.py --a $1", 1, "$1"),
]


@pytest.mark.parametrize(("text", "line", "what"), HOSTILE)
def test_nothing_runs_and_what_was_not_evaluated_is_said_by_its_line(text, line, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.sh").write_text("touch ran\n")
    found = script(tmp_path, text)
    assert [each for each in found.unrun if each.line == line and each.text.startswith(what)], found.unrun
    assert not (tmp_path / "ran").exists()
    assert len(found.programs()) == 1


@pytest.mark.parametrize("text", [text for text, _, _ in SETS])
def test_a_variable_that_may_be_set_again_is_unknown_where_it_is_used(text, tmp_path):
    found = script(tmp_path, text)
    (program,) = found.programs()
    assert program.flags.value["--a"].loose
    assert any(each.sets for each in found.unrun)


def test_arithmetic_that_sets_nothing_sets_nothing(tmp_path):
    found = script(tmp_path, "A=1\n(( A <= 2 && A != 3 && A == 1 )) || exit 1\npython train.py --a $A")
    assert [each.sets for each in found.unrun] == [False]
    assert to_python(found.programs()[0].flags) == {"--a": 1}


@pytest.mark.parametrize(
    "launcher",
    [
        "python -m torch.distributed.run",
        "python3 -m torch.distributed.launch",
        "accelerate launch",
        "python -m accelerate.commands.launch",
        "deepspeed",
    ],
)
@pytest.mark.parametrize("name", ["train.py", "-m trainer"])
def test_the_launcher_of_a_script_is_not_taken_for_it(launcher, name, tmp_path):
    (program,) = script(tmp_path, f"{launcher} --num_nodes 2 {name} --lr 1").programs()
    assert program.name.text == name.removeprefix("-m ")
    assert to_python(program.launcher) == {"--num_nodes": 2}
    assert to_python(program.flags) == {"--lr": 1}


GROWS = ["A=xxxxxxxxxxxxxxxx\n" + 'A="$A$A"\n' * 40, 'A=("" "")\n' + 'A=("${A[@]}" "${A[@]}")\n' * 18]


@pytest.mark.parametrize("grows", GROWS)
def test_a_script_that_grows_without_end_is_refused(grows, tmp_path):
    text = grows + "python train.py --a $A"
    with pytest.raises(ConfigError, match="expand to too much"):
        script(tmp_path, text)


@pytest.mark.parametrize("text", ["A='x", 'A="x', "A=$(x", "A=(x", "A=`x", "A=${x"])
def test_a_quote_or_bracket_that_is_not_closed_is_named_with_its_line(text, tmp_path):
    with pytest.raises(ConfigError, match=r"train.sh:2: this (quote|[(`{]) is never closed"):
        script(tmp_path, "\n" + text)

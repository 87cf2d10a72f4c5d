"""Made prompts: their examples are right, the seed decides, evaluation prompts are not made."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.errors import DFlashError

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    make_prompts = importlib.import_module("make_prompts")
    chat = importlib.import_module("prompts.chat")
    programming = importlib.import_module("prompts.programming")
    Evaluation = importlib.import_module("prompts.evaluation").Evaluation
    task = importlib.import_module("prompts.task").task
finally:
    sys.path.remove(str(SCRIPTS))

TASKS = programming.TASKS
FENCED = re.compile(r"\A.*:\n```python\n(.*)\n```\Z", re.DOTALL)
RESULT = re.compile(r"^    (?:>>> )?(\w+\(.*\))(?: == | => | -> | ➞ | returns |\n    )(.+)$", re.M)


def make(folder: Path, *options: str) -> list[dict]:
    make_prompts.main(["--out", str(folder / "made.jsonl"), *options])
    return read_prompts(folder / "made.jsonl", None)


def write(file: Path, *texts: str, category: str = "code") -> Path:
    rows = [
        {"id": str(i), "category": category, "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(texts)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def content(row: dict) -> str:
    (message,) = row["messages"]
    assert message["role"] == "user"
    return message["content"]


def code_of(prompt: str) -> str:
    return FENCED.match(prompt)[1]


def test_tasks_have_names_of_their_own():
    names = [name for task in TASKS for name in task.names]
    assert len(TASKS) == 72
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.names[0])
def test_the_examples_of_a_task_are_what_its_function_returns(task):
    random = Random(task.names[0])
    for _ in range(60):
        prompt = programming.function_prompt(random, [task])
        defined = ast.parse(code_of(prompt)).body[-1]
        assert defined.name in task.names
        examples = RESULT.findall(prompt)
        assert 1 <= len(examples) <= 4
        for call, result in examples:
            assert eval(call, {defined.name: task.function}) == ast.literal_eval(result)


def test_a_wrong_function_would_be_found():
    def ends(n: int) -> list[int]:
        return [1, n]

    (right,) = (task for task in TASKS if task.names[0] == "divisors_of")
    wrong = replace(right, function=ends)
    prompts = [programming.function_prompt(Random(i), [wrong]) for i in range(20)]
    examples = [example for prompt in prompts for example in RESULT.findall(prompt)]
    names = dict.fromkeys(right.names, right.function)
    assert any(eval(call, dict(names)) != ast.literal_eval(result) for call, result in examples)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("second_largest", ([5, 5, 3, 1],), 3),
        ("second_largest", ([5, 5],), None),
        ("most_common", ([4, 2, 2, 4, 1],), 2),
        ("running_total", ([1, -2, 5],), [1, -1, 4]),
        ("difference_of_lists", ([1, 2, 3, 2], [3, 9]), [1, 2, 2]),
        ("split_in_chunks", ([1, 2, 3, 4, 5], 2), [[1, 2], [3, 4], [5]]),
        ("pairs_with_sum", ([1, 2, 3, 2, 2], 4), 4),
        ("longest_increase", ([3, 1, 2, 4, 4, 5],), 3),
        ("longest_increase", ([3, 2, 1],), 1),
        ("move_zeros", ([0, 1, 0, 2],), [1, 2, 0, 0]),
        ("nth_fibonacci", (10,), 55),
        ("collatz_steps", (6,), 8),
        ("fizz_buzz", (6,), ["1", "2", "Fizz", "4", "Buzz", "Fizz"]),
        ("fizz_buzz", (1,), ["1"]),
        ("check_prime_number", (49,), False),
        ("check_prime_number", (2,), True),
        ("check_prime_number", (1,), False),
        ("perfect_number", (28,), True),
        ("leap_year", (1900,), False),
        ("leap_year", (2000,), True),
        ("triangle_kind", (3, 4, 3), "isosceles"),
        ("seconds_to_time", (125,), "2:05"),
        ("clamp", (-3, 0, 10), 0),
        ("caesar_encode", ("zebra", 2), "bgdtc"),
        ("snake_to_camel", ("river_stone_cloud",), "riverStoneCloud"),
        ("compress_runs", ("aabccc",), "a2b1c3"),
        ("sort_by_length", (["bb", "a", "aa"],), ["a", "aa", "bb"]),
        ("common_prefix", (["undo", "unit", "until"],), "un"),
        ("transpose", ([[1, 2], [3, 4], [5, 6]],), [[1, 3, 5], [2, 4, 6]]),
        ("filter_by_score", ({"b": 7, "a": 9, "c": 1}, 7), ["a", "b"]),
    ],
)
def test_the_functions_do_what_they_are_described_to_do(name, arguments, result):
    (task,) = (task for task in TASKS if task.names[0] == name)
    assert task.function(*arguments) == result


def test_a_typed_signature_imports_what_it_names():
    (invert,) = (task for task in TASKS if task.names[0] == "invert_dictionary")
    assert invert.signature("f", typed=True) == "def f(table: Dict[str, int]) -> Dict[int, str]:"
    assert invert.signature("f", typed=False) == "def f(table):"
    for task in TASKS:
        head = f"from typing import {', '.join(task.imports())}\n" if task.imports() else ""
        names: dict = {}
        exec(f"{head}{task.signature('f', typed=True)} ...", names)


def test_a_task_whose_draws_are_not_its_parameters_is_refused():
    with pytest.raises(TypeError, match="f takes .'n'., drawn are .'m'."):

        @task("Do it.", also="g", m=lambda random: 1)
        def f(n: int) -> int:
            return n


def test_chat_templates_have_all_their_slots_and_no_idle_ones():
    templates = chat.ChatTemplates.read()
    named = {name for template in templates.templates for name in chat.SLOT.findall(template)}
    assert named == templates.slots.keys()
    assert len(set(templates.templates)) == len(templates.templates) == 311
    assert all(len(set(options)) == len(options) for options in templates.slots.values())
    random = Random(0)
    prompts = [templates.prompt(random) for _ in range(2000)]
    assert not [prompt for prompt in prompts if re.search(r"[{}]", prompt)]


def test_a_slot_that_comes_twice_is_filled_differently():
    templates = chat.ChatTemplates(("is it {a} or {a}",), {"a": ("x", "y")})
    filled = {templates.prompt(Random(i)) for i in range(20)}
    assert filled == {"is it x or y", "is it y or x"}


def test_only_a_slot_that_a_template_begins_with_gets_a_capital_letter():
    templates = ("{a} is lost", "so {a} is lost", "Is {a} lost?")
    slots = {"a": ("my cat's DNA",)}
    filled = [chat.ChatTemplates((text,), slots).prompt(Random(0)) for text in templates]
    assert filled == ["My cat's DNA is lost", "so my cat's DNA is lost", "Is my cat's DNA lost?"]


def test_an_instruction_becomes_the_documentation_of_a_function():
    prompt = programming.wrapped_prompt("Write a function  to sort\nwords by their length.")
    assert prompt.startswith(programming.SENTENCE)
    (function,) = ast.parse(code_of(prompt)).body
    assert function.name in ("sort_words", "sort_words_their")
    assert ast.get_docstring(function) == "Write a function to sort words by their length."


def test_a_long_instruction_is_cut_between_words():
    prompt = programming.wrapped_prompt("find " + "dromedaries " * 60)
    text = " ".join(ast.get_docstring(ast.parse(code_of(prompt)).body[0]).split())
    assert 380 < len(text) <= 400
    assert text.endswith(" dromedaries")


@pytest.mark.parametrize(
    "instruction",
    [
        "",
        "Write a function",
        "Sort it",
        r"split the text at every \n",
        'print """ quotes around words',
        "print ''' quotes around words",
        "mend this code ```python print(1)```",
    ],
)
def test_what_would_be_no_documentation_is_not_wrapped(instruction):
    assert programming.wrapped_prompt(instruction) is None


def test_the_corpus_reader_accepts_what_is_made(tmp_path, capsys):
    wrap = write(tmp_path / "p.jsonl", "sort the words by length", "sort it")
    rows = make(tmp_path, "--functions", "30", "--chats", "20", "--wrap", str(wrap))
    categories = [row["category"] for row in rows]
    assert categories == ["function"] * 30 + ["template-chat"] * 20 + ["doc-code"]
    assert len({row["id"] for row in rows}) == len({content(row) for row in rows}) == 51
    assert all(row.keys() == {"id", "category", "messages"} for row in rows)
    said = "30 function, 20 template-chat, 1 doc-code; 0 dropped for the evaluation's sake\n"
    assert capsys.readouterr().out == said


def test_only_the_first_user_message_of_code_rows_is_wrapped(tmp_path):
    messages = [
        {"role": "system", "content": "count the sheep"},
        {"role": "user", "content": "sort the words"},
        {"role": "user", "content": "reverse the words"},
    ]
    rows = [{"category": "code", "messages": messages}, {"category": "math", "prompt": "add words"}]
    (tmp_path / "p").write_text("\n".join(map(json.dumps, rows)))
    (row,) = make(tmp_path, "--functions", "0", "--chats", "0", "--wrap", str(tmp_path / "p"))
    assert "sort the words" in content(row)


def test_a_seed_gives_the_same_file_whatever_the_order_of_hashes(tmp_path):
    files = []
    for hash_seed in ("1", "2"):
        out = tmp_path / f"{hash_seed}.jsonl"
        command = [sys.executable, SCRIPTS / "make_prompts.py", "--out", out, "--seed", "3"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run(
            [*command, "--functions", "400", "--chats", "100"], env=environment, check=True
        )
        files.append(out.read_bytes())
    assert files[0] == files[1]
    other = make(tmp_path, "--functions", "400", "--chats", "100", "--seed", "4")
    assert {row["id"] for row in other} - {json.loads(line)["id"] for line in files[0].splitlines()}


def test_a_larger_number_adds_to_what_a_smaller_one_gives(tmp_path):
    few = make(tmp_path, "--functions", "20", "--chats", "10")
    many = make(tmp_path, "--functions", "60", "--chats", "15")
    assert many[:20] == few[:20]
    assert many[60:70] == few[20:]


def test_prompts_with_a_function_name_of_the_evaluation_are_dropped(tmp_path):
    everything = make(tmp_path, "--functions", "300", "--chats", "0")
    assert [row for row in everything if "def lcm(" in content(row)]
    kept = write(tmp_path / "eval.jsonl", "def lcm(a, b):\n    ...", category="any")
    rows = make(tmp_path, "--functions", "300", "--chats", "0", "--keep-clear-of", str(kept))
    assert len(rows) == 300
    assert not [row for row in rows if "def lcm(" in content(row)]
    assert [row for row in rows if "def least_common_multiple(" in content(row)]
    dropped = {row["id"] for row in everything} - {row["id"] for row in rows}
    assert dropped == {row["id"] for row in everything if "def lcm(" in content(row)}


def test_prompts_with_eight_words_of_the_evaluation_are_dropped(tmp_path, capsys):
    wrap = write(tmp_path / "p.jsonl", "sort one two three four five six seven", "sort words")
    options = ("--functions", "0", "--chats", "0", "--wrap", str(wrap), "--keep-clear-of")
    near = write(tmp_path / "near.jsonl", "Then SORT one, two three\nfour five six seven!")
    assert len(make(tmp_path, *options, str(near))) == 1
    assert "1 dropped" in capsys.readouterr().out
    apart = write(tmp_path / "apart.jsonl", "sort one two three four five six, not seven")
    assert len(make(tmp_path, *options, str(apart))) == 2


@pytest.mark.parametrize(
    ("kept", "made", "meets"),
    [
        ("a b c d e f g h", "x a b c d e f g h y", True),
        ("a b c d e f g h", "x a b c d e f g", False),
        ("Why jazz?", "why jazz", True),
        ("Why jazz?", "why jazz now", False),
        ("...", "!", False),
        ("def f(x): pass", "def  f(y): return 1", True),
        ("def f(x): pass", "f(x)", False),
        (f"{programming.SENTENCE} alpha beta", f"{programming.SENTENCE} gamma delta", False),
    ],
)
def test_texts_meet_in_a_name_or_in_eight_words(kept, made, meets):
    assert Evaluation.of([kept]).meets(made) is meets


def test_written_prompts_have_texts_and_ids_of_their_own():
    rows = read_prompts(make_prompts.WRITTEN, None)
    assert len({" ".join(content(row).lower().split()) for row in rows}) == len(rows) == 7771
    for row in rows:
        digest = hashlib.sha256(json.dumps(content(row)).encode()).hexdigest()[:12]
        assert row["id"] == f"written-{row['category']}-{digest}"


def test_written_prompts_are_of_ten_kinds_and_in_order():
    rows = [json.loads(line) for line in make_prompts.WRITTEN.read_text("utf-8").splitlines()]
    assert rows == sorted(rows, key=lambda row: (row["category"], content(row)))
    assert Counter(row["category"] for row in rows) == {
        **{"advice": 620, "coding": 80, "extraction": 370, "knowledge": 750, "math": 1201},
        **{"reasoning": 630, "roleplay": 760, "short-math": 459, "stub": 1481, "writing": 1420},
    }


def test_written_stubs_are_documented_functions_in_the_layout_of_programming_tasks():
    rows = read_prompts(make_prompts.WRITTEN, None)
    stubs = [content(row) for row in rows if row["category"] == "stub"]
    assert all(prompt.startswith(f"{programming.SENTENCE}\n```python\n") for prompt in stubs)
    for prompt in stubs:
        function = ast.parse(code_of(prompt)).body[-1]
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function)


def test_written_prompts_come_last_and_keep_their_categories(tmp_path, capsys):
    without = make(tmp_path, "--functions", "3", "--chats", "2")
    assert capsys.readouterr().out.startswith("3 function, 2 template-chat, 0 doc-code; 0 dropped")
    rows = make(tmp_path, "--functions", "3", "--chats", "2", "--written")
    written = [(r["category"], content(r)) for r in read_prompts(make_prompts.WRITTEN, None)]
    assert rows[:5] == without
    assert [(row["category"], content(row)) for row in rows[5:]] == written
    assert ", 1481 stub, " in capsys.readouterr().out


def test_written_prompts_that_meet_the_evaluation_or_come_twice_are_left_out(
    tmp_path, monkeypatch, capsys
):
    near = ("one two three four five six seven eight nine", "def near(x):\n    ...")
    once = write(tmp_path / "w", *near, "a clear one", category="any").read_text()
    (tmp_path / "w").write_text(once + once.replace('"any"', '"again"'))
    monkeypatch.setattr(make_prompts, "WRITTEN", tmp_path / "w")
    kept = write(tmp_path / "e", "Two three four five six seven eight nine.", "def near(y): pass")
    options = ("--functions", "0", "--chats", "0", "--written")
    assert [row["category"] for row in make(tmp_path, *options)] == ["any"] * 3
    (row,) = make(tmp_path, *options, "--keep-clear-of", str(kept))
    assert (row["category"], content(row)) == ("any", "a clear one")
    assert capsys.readouterr().out.endswith("1 any; 2 dropped for the evaluation's sake\n")


def damaged(folder: Path) -> dict[str, str]:
    (folder / "damaged.jsonl").write_text("{\n")
    (folder / "math.jsonl").write_text('{"category": "math", "prompt": "1 + 1"}\n')
    return {name: str(folder / name) for name in ("damaged.jsonl", "math.jsonl", "none.jsonl")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--functions", "-1"], "--functions is -1; choose 0 or more"),
        (["--chats", "-5"], "--chats is -5"),
        (["--functions", "0", "--chats", "0"], "nothing to make; give .*--written"),
        (["--functions", "0", "--chats", "0", "--wrap", "math.jsonl"], "nothing to make"),
        (["--wrap", "damaged.jsonl"], "line 1 of .* is no JSON"),
        (["--wrap", "none.jsonl"], "none.jsonl cannot be read"),
        (["--keep-clear-of", "damaged.jsonl"], "line 1 of .* is no JSON"),
        (["--keep-clear-of", "none.jsonl"], "none.jsonl cannot be read"),
        (["--wrap", "made.jsonl"], "--out would replace .*made.jsonl, which is read"),
        (["--keep-clear-of", "made.jsonl"], "--out would replace"),
        (["--written"], "--out would replace .*made.jsonl, which is read"),
        (["--chats", "1000000"], "only [0-9]+ of 1000000 template-chat prompts"),
    ],
)
def test_bad_input_is_refused_and_the_file_is_left_alone(tmp_path, options, message, monkeypatch):
    if "1000000" in options:  # few templates, so that they run out soon
        templates = chat.ChatTemplates(("{n}",), {"n": tuple(map(str, range(1000)))})
        monkeypatch.setattr(chat.ChatTemplates, "read", lambda: templates)
    files = damaged(tmp_path)
    before = write(tmp_path / "made.jsonl", "sort the words").read_bytes()
    files["made.jsonl"] = str(tmp_path / "made.jsonl")
    monkeypatch.setattr(make_prompts, "WRITTEN", tmp_path / "made.jsonl")
    with pytest.raises(DFlashError, match=message):
        make(tmp_path, *(files.get(option, option) for option in options))
    assert (tmp_path / "made.jsonl").read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {
        "damaged.jsonl",
        "math.jsonl",
        "made.jsonl",
    }


def test_an_evaluation_that_leaves_nothing_is_refused(tmp_path, monkeypatch):
    templates = chat.ChatTemplates(("Hello {n}",), {"n": ("1", "2", "3")})
    monkeypatch.setattr(chat.ChatTemplates, "read", lambda: templates)
    kept = write(tmp_path / "eval.jsonl", "hello 2")
    with pytest.raises(DFlashError, match="only 2 of 3 .* keep clear .*; ask for 2 or fewer"):
        make(tmp_path, "--functions", "0", "--chats", "3", "--keep-clear-of", str(kept))


@pytest.mark.parametrize("options", [["--functions", "many"], ["--out", "nowhere/made.jsonl"]])
def test_the_command_line_refuses_in_one_sentence_with_exit_code_2(tmp_path, options):
    command = [sys.executable, SCRIPTS / "make_prompts.py", "--out", "made.jsonl", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"make_prompts: .+; .+\n", done.stderr)
    assert list(tmp_path.iterdir()) == []

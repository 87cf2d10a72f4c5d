"""What an answer has to be, from the command line: files are read, and bad ones are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dflash_mlx.core.config import StructureConfig
from dflash_mlx.core.errors import DFlashError


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str, name: str = "given") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


ASKED = ["--prompt", "Hi", "--max-tokens", "99"]
NOWHERE = [*ASKED, "--model", "none/x"]
SCHEMA = '\ufeff{"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], '
SCHEMA += '"additionalProperties": false}'


@pytest.mark.parametrize("method", ["none", "ddtree"])
def test_an_answer_follows_the_schema_in_a_file(ask, file, method):
    told = ask(*ASKED, "--json-schema", file(SCHEMA), "--method", method, "--json").answer
    assert json.loads(told["text"])["n"] in (1, 22)
    assert told["finish_reason"] == "stop"


def test_a_regular_expression_and_a_grammar_are_followed(ask, file):
    assert ask(*ASKED, "--regex", "(one|two)!").out.strip() in ("one!", "two!")
    assert ask(*ASKED, "--grammar", file('start: "x" | "yy"')).out.strip() in ("x", "yy")
    code, out, _ = ask(*ASKED, "--json-object", "--max-tokens", "5")
    assert (code, out[0]) == (0, "{")


BAD = {
    "a missing file": (["--json-schema", "nowhere.json"], ["nowhere.json cannot be read"]),
    "no JSON": (["--json-schema", "{"], ["--json-schema", "is no JSON text", "column 2"]),
    "another type": (["--json-schema", '{"type": "strin"}'], ["--json-schema", "strin"]),
    "no schema": (["--json-schema", "[1]"], ["--json-schema", "choose a JSON object"]),
    "not supported": (
        ["--json-schema", '{"type": "array", "uniqueItems": true}'],
        ["--json-schema", "uniqueItems"],
    ),
    "an open group": (["--regex", "a(b"], ["--regex", "unclosed group"]),
    "nothing": (["--regex", ""], ["--regex is ''"]),
    "an unknown rule": (["--grammar", "start: foo"], ["--grammar", "line 1, column 8", "foo"]),
    "two at once": (["--regex", "a", "--json-object"], ["--json-object", "regex", "leave one"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_one_is_one_sentence_before_a_model_is_looked_for(ask, file, name):
    (option, text), words = BAD[name][0][:2], BAD[name][1]
    is_file = option in ("--json-schema", "--grammar") and not text.endswith(".json")
    given = [option, file(text) if is_file else text, *BAD[name][0][2:]]
    code, out, err = ask(*NOWHERE, *given)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert [word for word in words if word not in err] == []


def test_without_llguidance_one_sentence_says_what_to_install(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    code, _, err = ask(*NOWHERE, "--regex", "a")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--regex needs llguidance" in err and "pip install" in err


def test_whatever_is_given_is_a_text():
    with pytest.raises(DFlashError, match="json_schema is"):
        StructureConfig(json_schema={"type": "object"})  # type: ignore[arg-type]

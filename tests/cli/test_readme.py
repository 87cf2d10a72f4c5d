import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.real
def test_the_examples_in_the_readme_run_and_print_their_answers(capsys):
    codes = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(codes) == 3
    for code in codes:
        exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "sky" in printed
    assert re.search(r"\d\.\d\d tokens per round", printed)
    assert re.search(r"\d+ tokens in the caches", printed)
    assert "Name a river." in printed


@pytest.mark.parametrize("pattern", [r"--prompts (\S+)", r"\]\((?!https?:)([^)]+)\)"])
def test_every_file_that_its_commands_read_or_its_links_name_exists(pattern):
    files = re.findall(pattern, README.read_text(encoding="utf-8"))
    assert files
    assert [file for file in files if not (README.parent / file).exists()] == []

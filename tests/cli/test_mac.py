"""The report from a Mac, rehearsed in the emulator."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import doctor
from dflash_mlx import mac as command
from dflash_mlx.core.errors import DFlashError
from kernels_metal.mac import items, measure, report

ITEMS = [
    {"name": "machine", "kind": "machine"},
    {
        "name": "head",
        "kind": "variant",
        "call": ["draft_head", "float16", {"rows": 1, "vocabulary": 100, "k": 4}, ""],
    },
    {
        "name": "one",
        "kind": "race",
        "operation": "verify_qmm",
        "sizes": {"gated": 1, "depth": 128, "columns": 32, "rows": 4},
    },
]


@pytest.fixture
def few(monkeypatch):
    """All stages, but of one item of a kind."""
    monkeypatch.setattr(command, "stages", lambda report: [ITEMS])
    return ITEMS


def says(path, *answers: str) -> None:
    """A child that answers its first items so, and then ends."""
    lines = "; ".join(f"sys.stdin.readline(); {answer}" for answer in answers)
    path.write_text(f"import sys, time, os\n{lines.replace('; ', chr(10))}\n")


def outcome(**found: object) -> str:
    return f"print('outcome: ' + {json.dumps(json.dumps(found))}, flush=True)"


def test_a_rehearsal_does_everything_in_the_emulator_and_writes_both_files(tmp_path, few, capsys):
    doctor.main(["--mac", "--rehearse", "--report", str(tmp_path / "out")])
    said = capsys.readouterr().out.splitlines()
    assert len(said) <= report.MOST_LINES + 1
    assert said[0] == "dflash-chat on a Mac" and "rehearsed, no Mac" in said[1]
    assert any(line.startswith("variants: 1 tried, 1 right, 0 not for") for line in said)
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["finished"] and list(kept["found"]) == [item["name"] for item in few]
    assert kept["found"]["head"]["error"] <= 1 and "us" not in kept["found"]["one"]
    assert said[1] in (tmp_path / "out.md").read_text()


def test_a_report_is_called_as_it_was_named(tmp_path):
    for name in ("macos-26.1", "macos-26.1.json"):
        assert command.file_of(tmp_path / name) == tmp_path / "macos-26.1.json"
    assert command.file_of(tmp_path) == tmp_path / f"{command.NAME}.json", "not beside a folder"
    assert command.file_of(Path()).parent == Path()


@pytest.mark.parametrize("words", [["--rehearse"], ["--report", "out"]])
def test_what_is_for_the_report_alone_is_refused_without_it(words, capsys):
    with pytest.raises(DFlashError, match="is for --mac alone"):
        doctor.main(words)
    assert capsys.readouterr().out == ""


def test_without_the_emulator_nothing_is_rehearsed_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "no_emulator", lambda: "the emulator is in a checkout")
    with pytest.raises(DFlashError, match="is in a checkout; a clone of the project with clang"):
        command.make(tmp_path / "out.json", rehearse=True)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["out.json", "out.md"])
@pytest.mark.parametrize("text", ["mine", "[]", '{"finished": true, "found": {}}'])
def test_a_report_that_is_there_is_left_alone(tmp_path, few, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DFlashError, match=f"{name} already exists"):
        command.make(tmp_path / "out.json", rehearse=True)
    assert (tmp_path / name).read_text() == text
    assert len([*tmp_path.iterdir()]) == 1


def test_a_second_start_goes_on_and_other_kernels_begin_anew(tmp_path, few, monkeypatch):
    file, asked = tmp_path / "out.json", []

    def ask(self: object, item: dict, seconds: float) -> dict:
        asked.append(item["name"])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(command.Children, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        command.make(file, rehearse=True)
    assert not json.loads(file.read_text())["finished"]
    command.make(file, rehearse=True, say=lambda line: None)
    assert asked == ["machine", "head", "one", "one"]
    kept = {**json.loads(file.read_text()), "finished": False, "made with": "others"}
    file.write_text(json.dumps(kept))
    (tmp_path / "out.md").unlink()
    command.make(file, rehearse=True, say=lambda line: None)
    assert asked[4:] == ["machine", "head", "one"]


def test_what_hangs_or_dies_costs_one_line_and_the_rest_goes_on(tmp_path, few, monkeypatch):
    script = tmp_path / "child.py"
    says(script, outcome(error=0.5), "os.abort()")
    monkeypatch.setattr(command, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(command, "limit", lambda item: 20.0)
    said: list[str] = []
    assert not command.make(tmp_path / "out.json", rehearse=True, say=said.append)
    found = json.loads((tmp_path / "out.json").read_text())["found"]
    assert found["machine"]["error"] == found["one"]["error"] == 0.5
    assert found["head"]["wrong"].startswith("ends the process with -6")
    assert any(line.startswith("  WRONG head: ends the process") for line in said)
    says(script, "time.sleep(60)")
    monkeypatch.setattr(command, "limit", lambda item: 0.5)
    monkeypatch.setattr(command, "GONE_MOST", 2)
    command.make(tmp_path / "again.json", rehearse=True, say=said.append)
    found = json.loads((tmp_path / "again.json").read_text())["found"]
    assert [each["wrong"][:9] for each in found.values()] == ["hangs: a ", "hangs: a ", "not tried"]


def test_without_a_mac_it_says_how_to_rehearse(tmp_path):
    if mx.metal.is_available():
        pytest.skip("there is Metal here")
    with pytest.raises(DFlashError, match="--rehearse"):
        command.make(tmp_path / "out.json", rehearse=False)


# What a child does


def test_a_refusal_is_none_of_a_kernels_faults_and_a_fault_is_told(monkeypatch):
    call = ["verify_qmm", "float16", {"rows": 33, "bits": 4, "group": 64, "gated": 0}, "matrix"]
    refused = measure.measured({"name": "wide", "kind": "variant", "call": call})
    assert "33" in refused["refused"] and "wrong" not in refused
    monkeypatch.setattr(measure, "error", lambda trial: 3.0)
    item = {**ITEMS[1], "rehearse": True}
    assert measure._answered(item)["wrong"].startswith("3.0 times as wrong")
    monkeypatch.setattr(measure, "error", lambda trial: float("inf"))
    assert json.loads(json.dumps(measure._answered(item)))["error"] == 1e30

    def fails(trial: object) -> float:
        raise RuntimeError("no\nprogram:1:2: error: that")

    monkeypatch.setattr(measure, "error", fails)
    assert "error: that" in measure._answered(item)["wrong"]


def test_the_largest_threadgroup_is_what_mlx_says_when_it_refuses_a_larger(monkeypatch):
    call = measure.Call(*ITEMS[1]["call"])
    assert len(measure.launches(call)) == 2

    def refuses(kernel: object, inputs: object, plan: object) -> list[mx.array]:
        raise ValueError("Thread group size (2048) is greater than the maximum allowed (448).")

    monkeypatch.setattr(measure, "metal", refuses)
    assert measure.threads(call) == {"draft_head": 448, "draft_head_merge": 448}


def test_races_on_a_mac_time_both_sides_and_stock_alone_where_refused():
    item, wide = ({**ITEMS[2], "sizes": {**ITEMS[2]["sizes"], "rows": n}} for n in (2, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CALLS", 2)
        patch.setattr(measure, "race", lambda operation, ways, calls, runs: dict.fromkeys(ways, 1))
        with measure.import_module("kernels_metal.emulator").emulated():
            assert measure.measured(item)["us"] == {"scalar": 1, "matrix": 1}
            found = measure.measured(wide)
    assert found["us"] == {} and "40" in found["refused"]
    assert found["bytes"] == 64 * 128 // 2 + 2 * 2 * 64 * 2


def test_the_hosts_table_is_what_the_script_prints_and_its_fault_is_told(tmp_path, monkeypatch):
    script = tmp_path / "host_cost.py"
    monkeypatch.setattr(measure, "HOST", script)
    item = {"name": "host", "kind": "host"}
    assert "clone" in measure.measured(item)["refused"]
    script.write_text("print('noise')\nprint('| plain | 1 |')")
    assert measure.measured(item) == {"table": ["| plain | 1 |"]}
    script.write_text("raise SystemExit('no such thing')")
    assert measure.measured(item) == {"wrong": "no such thing\n"}


# Facts and words


def test_facts_are_what_a_macs_programs_say_and_unknown_where_they_do_not():
    outputs = {
        "sw_vers": "ProductName:\t\tmacOS\nProductVersion:\t\t26.1\nBuildVersion:\t\t25B78\n",
        "system_profiler SPDisplaysDataType": "Chipset\n      Total Number of Cores: 16\n",
        "pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0",
    }
    found = command.mac_facts(lambda command: outputs.get(command, ""))
    assert (found["macos"], found["build"], found["gpu cores"]) == ("26.1", "25B78", "16")
    assert (found["power"], found["free memory"]) == ("Battery Power", "unknown")
    assert command.said("/nobody/here") == "" and command.said("false") == ""


def complete() -> dict:
    """What a Mac with 500 GB/s might find: kernels win from 4 rows on."""
    found: dict = {
        "machine": {"GB/s": 500.0, "us": 3.5, "float32": 14.0, "float16": 15.0},
        "sustained": {"passes": 900, "first": 60.0, "last": 66.0, "longest": 90.0},
        "host": {"table": ["| plain | mlx-lm | 1700 |", "| plain | ours, on | 1000 |"]},
    }
    for item in items.race_items():
        stock, ours = 100.0 + 10 * item["sizes"]["rows"], 130.0
        found[item["name"]] = {"kind": item["kind"], "us": {"stock": stock, "matrix": ours}}
    for i, item in enumerate(items.variant_items()):
        wrong = {"wrong": f"odd {i}\nerror: {i}"} if i % 20 == 0 else {}
        each = {"error": 0.5, "ms": 40.0, "threads": {"verify_qmm": 1024 - i}, **wrong}
        found[item["name"]] = {"kind": "variant", **each}
    return found


def test_the_summary_fits_and_says_what_auto_would_choose(monkeypatch):
    found = complete()
    monkeypatch.setattr(report, "MOST_LINES", 12)
    said = report.summary(command.rehearsed_facts(), found)
    assert (len(said), said[-1]) == (12, report.SEND)
    monkeypatch.undo()
    said = report.summary(command.rehearsed_facts(), found)
    assert len(said) <= report.MOST_LINES and said[-1] == report.SEND
    assert max(map(len, said)) <= 200
    text = "\n".join(said)
    assert "copy 500 GB/s, a launch 3.5 us" in text
    left = sum("wrong" in each for each in found.values()) - report.PROBLEMS
    assert "WRONG" in text and left > 0 and f"and {left} more, all in the files" in text
    assert (
        "auto, Qwen3-8B: kernels at 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32 rows; 8 rows cost 1.18 x "
        "of one (stock 1.64 x)" in text
    )
    assert "a minute of passes (27B, 8 rows): 900, 60.0 ms at first" in text
    assert "| plain | mlx-lm | 1700 |" in text
    model = items.MODELS[2]
    assert report.ways(found, model, 8) == dict.fromkeys(model.matrices, "matrix")
    assert report.ways(found, model, 2) == dict.fromkeys(model.matrices, "")
    assert report.times(found, model, 8) == pytest.approx((145 * 0.18, 145 * 0.13))
    # 7.6e9 weights of 0.5625 bytes at 500 GB/s; and 32 rows at MLX's 0.72 of 14 / 0.85 TFLOP/s
    weights = sum(k * n * count for k, n, count in model.matrices.values())
    assert report.predicted(found, model, 1) == pytest.approx(weights * 0.5625 / 5e8)
    assert report.predicted(found, model, 32) == pytest.approx(
        64 * weights / (0.72 * 14 / 0.85) / 1e9
    )


def test_every_item_has_a_name_of_its_own_and_there_are_all_kinds():
    report_of = command.Report(None, "", {}, complete())
    found = [item for stage in command.stages(report_of) for item in stage]
    assert len({item["name"] for item in found}) == len(found)
    assert {item["kind"] for item in found} == set(measure._KINDS)
    assert {way for _, way in found[-2]["products"]} == {"matrix"}

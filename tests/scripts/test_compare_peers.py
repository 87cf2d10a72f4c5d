"""Others beside us: pairs, ratios, rows with reasons, turns of clients; nobody else is started."""

from __future__ import annotations

import asyncio
import json

import compare_peers
import pytest
from peers import report, servers, worker
from peers.environment import last_line
from peers.runs import Runs
from peers.table import SERVERS, WITH_DRAFTS, WITHOUT, chosen

from dflash_mlx.core.errors import DFlashError

ROWS = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(12)]


def words(text):
    return len(text.split())


def said(text, seconds, most=64):
    return {"text": text, "seconds": seconds, "most": most}


def add_turns(runs, **answers):
    for name, given in answers.items():
        runs.add(clients=2, run=0, peer=name, answers=[said(*each) for each in given])


def test_a_rate_is_of_all_clients_and_a_ratio_of_the_same_requests(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl")
    add_turns(runs, one=[("a b c d", 2.0), ("a b", 1.0)], other=[("a b c d", 4.0), ("a b", 4.0)])
    one, other = (report.answers(runs.lines, 2, name) for name in ("one", "other"))
    rows = report.np.array(report.pairs(one, other, words))
    assert rows.tolist() == [[4, 2, 4, 4], [2, 1, 2, 4]]
    assert report.together(rows) == 2.0
    assert report.against(rows) == pytest.approx(8 / 3)


def test_only_requests_that_both_answered_are_compared():
    one, other = {(0, 0): said("a", 1.0), (0, 1): said("b", 1.0)}, {(0, 1): said("b", 2.0)}
    assert report.pairs(one, other, words) == [[1, 1.0, 1, 2.0]]
    assert report.same(one, other) == "1 of 1"
    assert report.pairs(other, {(0, 1): said("b c d", 2.0, most=2)}, words) == [[1, 2.0, 2, 2.0]]
    assert report.same(one, {}) == ""


def test_one_value_alone_has_no_interval():
    assert report.cell([[6.0, 2.0]], report.together) == "3.00"
    assert report.cell([], report.together) == ""
    assert report.cell([[6.0, 2.0], [6.0, 2.0]], report.together) == "3.00 [3.00, 3.00]"


def test_who_cannot_run_is_a_row_with_the_reason(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl")
    add_turns(runs, **{WITH_DRAFTS: [("a b", 1.0)], WITHOUT: [("a b", 2.0)]})
    lines = report.of_servers(runs, {"mlx-vlm": "it ends by itself (no module)"}, words)
    (row,) = (line for line in lines if line.startswith("| mlx-vlm") and "module" in line)
    assert row.count("|") == 3
    assert f"| {WITHOUT} | 2.00 |" in lines  # ours with drafts, times as fast


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    file = tmp_path / "runs.jsonl"
    Runs(file, requests=2).add(run=0, peer="one")
    with open(file, "a") as output:
        output.write('{"run": 1, "pe')
    runs = Runs(file, requests=2)
    assert runs.has(run=0, peer="one") and not runs.has(run=1)
    runs.add(run=1, peer="one")
    assert [json.loads(line)["run"] for line in file.read_text().splitlines()] == [0, 1]


def test_a_run_with_other_settings_is_refused(tmp_path):
    Runs(tmp_path / "runs.jsonl", requests=2).add(run=0)
    with pytest.raises(DFlashError, match="requests 2, not 3"):
        Runs(tmp_path / "runs.jsonl", requests=3)


def test_no_prompt_comes_twice_and_the_same_are_drawn_again():
    drawn = servers.requests(ROWS, 12)
    assert len({json.dumps(each["messages"]) for each in drawn}) == 12
    assert drawn == servers.requests(ROWS, 12)
    assert all(16 <= each["max_tokens"] <= 64 for each in drawn)
    with pytest.raises(DFlashError, match="13 requests"):
        servers.requests(ROWS, 13)


def test_turns_begin_with_another_server_in_each_run():
    plan = servers.Plan((1,), requests=1, runs=3)
    assert [name for _, name in plan.turns("ab")] == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize("name", ["every", "max-tokens", "requests", "runs"])
def test_a_number_below_one_is_refused_before_anything_is_made(name, tmp_path):
    words = ["--prompts", "none.jsonl", "--out", str(tmp_path / "out"), f"--{name}", "0"]
    with pytest.raises(DFlashError, match="is 0"):
        compare_peers.main(words)
    assert not (tmp_path / "out").exists()


def test_unknown_peers_are_named():
    assert chosen(None, list(SERVERS)) == list(SERVERS)
    assert chosen("mlx-vlm, ours without", list(SERVERS)) == ["mlx-vlm", "ours without"]
    with pytest.raises(DFlashError, match="'vllm'"):
        chosen("vllm", list(SERVERS))


class Crowd:
    """Answers after a while; notes how many were waiting with each request."""

    def __init__(self):
        self.waiting, self.company = 0, {}

    async def ask(self, client, request):
        self.waiting += 1
        for _ in range(3):
            await asyncio.sleep(0)
        self.company[request] = self.waiting
        self.waiting -= 1
        return f"answer to {request}", 1.0


def test_clients_keep_each_other_company_until_all_is_answered():
    asked, crowd = [f"question {i}" for i in range(7)], Crowd()  # a last round of one alone
    found = asyncio.run(servers.turn(crowd, asked, ["filler"], 3))
    assert [text for text, _ in found] == [f"answer to {each}" for each in asked]
    assert crowd.company["question 6"] == crowd.company["question 0"] == 3


def test_an_answer_ends_where_the_model_says_so():
    def answer(tokens, most):
        yield [5], 1.0
        yield [6, 7], 2.0
        yield [0, 8], 3.0
        raise AssertionError("nothing is asked for behind the end")

    found = worker.asked(answer, [1, 2], 9, {0})
    assert found["tokens"] == [5, 6, 7] and found["made"] == 5 and found["begun"] == 1
    assert found["seconds"] - found["first"] == 2.0
    assert worker.asked(answer, [1, 2], 2, {0})["tokens"] == [5, 6]


def test_our_speed_over_theirs_leaves_out_answers_of_one_pass():
    def told(made, begun, seconds):
        return {"made": made, "begun": begun, "first": 1.0, "seconds": seconds, "tokens": []}

    lines = [
        {"answers": {"ours": told(11, 1, 2.0), "mlx-lm": told(11, 1, 3.0)}},
        {"answers": {"ours": told(1, 1, 1.0), "mlx-lm": told(1, 1, 1.0)}},
        {"answers": {"ours": told(11, 1, 2.0)}},
    ]
    assert report.ratios(lines, "mlx-lm", report.rate) == [2.0]


def test_the_last_line_that_says_something_is_told():
    assert last_line("first\nERROR: no such package\n\n[notice] a new pip\n") == (
        "ERROR: no such package"
    )
    assert last_line("") == ""

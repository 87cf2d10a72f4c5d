"""Texts on the disk: damaged, of another model, shared by two programs, or cut off by a kill."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from dflash_mlx.drafters.continuations import files
from dflash_mlx.drafters.continuations.files import TextFile
from dflash_mlx.drafters.continuations.store import Store
from dflash_mlx.system.files import locked
from support.stores import held, plain, text_of

RNG = np.random.default_rng(0)
MANY = [RNG.integers(50_000, size=n).tolist() for n in (3, 40, 200, 1, 90)]
OPEN = 10**9  # no limit


@pytest.fixture
def file(tmp_path):
    return tmp_path / "said" / "a.texts"


@pytest.fixture
def kept(file):
    TextFile(file, "a").append([text_of(text, 1.5 + i) for i, text in enumerate(MANY)])
    return [(text, 1.5 + i) for i, text in enumerate(MANY)]


def reopened(file, **settings):
    store = Store(file=file, owner="a", **settings)
    assert store.wait(60)
    return store, plain(text for array in store._arrays for text in array.texts())


def test_texts_come_back_and_only_their_owner_can_read_them(file, kept):
    assert plain(TextFile(file, "a").read(OPEN)[0]) == kept == reopened(file)[1]
    assert file.stat().st_mode & 0o77 == 0 == file.parent.stat().st_mode & 0o77
    assert file.stat().st_size < 4 * sum(map(len, MANY)) + 64 * len(MANY)


def test_a_thousand_damaged_files_are_set_aside_and_what_is_whole_is_kept(file, kept):
    whole, told = file.read_bytes(), 0
    for _ in range(1000):
        data = bytearray(whole)
        at = int(RNG.integers(len(data)))
        match RNG.integers(4):
            case 0:
                data[at] ^= 1 << int(RNG.integers(8))
            case 1:
                del data[at:]
            case 2:
                del data[at : at + int(RNG.integers(1, 40))]
            case 3:
                data[at:at] = RNG.bytes(int(RNG.integers(1, 40)))
        file.write_bytes(data)
        try:
            texts, problem = TextFile(file, "a").read(OPEN)
        except PermissionError as error:  # the line that says whose it is was hit
            assert "another model" in str(error) and file.read_bytes() == data
            continue
        assert plain(texts) == kept[: len(texts)]
        ends = [len(whole) for _ in [0] if bytes(data) == whole]
        if problem:
            told += 1
            assert "a.damaged" in problem and file.with_suffix(".damaged").read_bytes() == data
            assert plain(TextFile(file, "a").read(OPEN)[0]) == kept[: len(texts)]
        else:  # as it was, or cut between two texts
            assert ends or whole.startswith(data)
    assert told > 900


def test_a_damaged_file_is_told_and_drafts_go_on(file, kept):
    file.write_bytes(file.read_bytes()[:-3])
    store, texts = reopened(file)
    assert "was damaged" in store.problem and texts == kept[:-1]
    store.add([7, 8, 9], 99.0)
    assert store.wait(60) and reopened(file)[1] == [*kept[:-1], ([7, 8, 9], 99.0)]


def test_a_file_of_another_model_stays_as_it_is(file, kept):
    before = file.read_bytes()
    store = Store(file=file, owner="b")
    store.add([1, 2, 3])
    assert store.wait(60) and "another model" in store.problem and str(file) in store.problem
    assert held(store) == 3 and file.read_bytes() == before


def test_a_full_disk_is_told_and_leaves_no_part_of_a_text(file, kept):
    program = """if True:
        import resource, sys
        from dflash_mlx.drafters.continuations.store import Store
        store = Store(file=__import__("pathlib").Path(sys.argv[1]), owner="a")
        assert store.wait(60)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
        store.add([*range(5000)])
        assert store.wait(60) and store.nbytes > 8 * 5000
        print(store.problem)"""
    ran = run(program, file, file.stat().st_size + 100)
    assert "cannot be kept" in ran.communicate()[0]
    store, texts = reopened(file)
    assert texts == kept and not store.problem


def test_the_oldest_texts_leave_the_file_too(file, kept):
    store, texts = reopened(file, limit=8 * 300)
    assert texts == kept[2:] and plain(TextFile(file, "a").read(OPEN)[0]) == kept[2:]
    store.forget()
    assert not file.exists() and reopened(file)[1] == []


def run(program, *arguments):
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


WRITER = """if True:
    import sys
    from pathlib import Path
    from dflash_mlx.drafters.continuations.store import Store
    store, mark = Store(file=Path(sys.argv[1]), owner="a"), int(sys.argv[2])
    print("begun", flush=True)
    for i in range(int(sys.argv[3])):
        store.add([mark, i, *range(2000)])
        store.wait()"""


def test_two_programs_share_a_file(file):
    for program in [run(WRITER, file, mark, 20) for mark in (70_001, 70_002)]:
        assert program.wait(120) == 0
    store, texts = reopened(file)
    said = {tuple(tokens[:2]) for tokens, _ in texts}
    assert not store.problem
    assert said == {(mark, i) for mark in (70_001, 70_002) for i in range(20)}


def test_a_store_waits_for_another_program_that_has_its_folder(file, kept):
    store, _ = reopened(file)
    with locked(file.parent, wait=True):
        store.add([1, 2, 3], 9.0)
        assert not store.wait(0.2)
    assert store.wait(60) and reopened(file)[1] == [*kept, ([1, 2, 3], 9.0)]


def test_a_program_that_is_killed_while_it_writes_leaves_whole_texts(file):
    for attempt in range(4):
        program = run(WRITER, file, attempt, 10_000)
        program.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.05 + 0.1 * attempt)
        os.kill(program.pid, signal.SIGKILL)
        program.communicate()
        for tokens, _ in reopened(file)[1]:
            assert tokens[2:] == [*range(2000)] and tokens[0] <= attempt
    assert len(reopened(file)[1]) > 4


def test_a_text_that_a_kill_cut_off_is_left_out(file, kept):
    record = files._record(text_of([5] * 100, 3.0))
    whole = file.read_bytes()
    for size in range(1, len(record)):
        file.write_bytes(whole + record[:size])
        texts, problem = TextFile(file, "a").read(OPEN)
        assert plain(texts) == kept and problem

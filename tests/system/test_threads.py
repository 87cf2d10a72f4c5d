"""OpenBLAS gets the cores that nothing else uses, and only looks now and then."""

import pytest

from dflash_mlx.system.blas import Threads, _busy_seconds, threads


class Machine:
    """Counters of a machine of several cores, which stand still unless it works."""

    def __init__(self, cores):
        self.now, self.ours, self.others, self.looks, self.used = 0.0, 0.0, 0.0, 0, []
        self.threads = Threads(cores, self.used.append, self.busy, lambda: self.now)

    def busy(self):
        self.looks += 1
        return self.ours + self.others, self.ours

    def work(self, seconds, others, ours=1.5):
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.ours += 0.1 * ours
            self.others += 0.1 * others
            self.threads.tick()
        return self.used


@pytest.mark.parametrize(("cores", "others", "left"), [(2, 0.95, 1), (8, 2.2, 6), (2, 6.0, 1)])
def test_within_a_second_threads_make_room_and_come_back(cores, others, left):
    machine = Machine(cores)
    assert machine.work(5, 0.1) == []
    assert machine.work(1, others)[-1] == left
    assert machine.work(1, 0.1)[-1] == cores
    assert machine.looks < 20


def test_one_thread_never_looks():
    machine = Machine(1)
    assert machine.work(3, 0.9) == [] and machine.looks == 0


def test_the_real_counters_grow_with_work():
    everybody, ours = _busy_seconds()
    sum(range(10**7))
    later, ours_later = _busy_seconds()
    assert later >= everybody and ours_later >= ours
    threads().tick()

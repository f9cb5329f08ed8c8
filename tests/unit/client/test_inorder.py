"""A thread that does things in order, and ends with whoever holds it."""

from __future__ import annotations

import gc
import threading

from gcclient.inorder import InOrder


def test_jobs_are_done_in_order_in_one_thread_whatever_one_of_them_raises() -> None:
    done: list[object] = []
    over = threading.Event()
    jobs = InOrder("unit", done.append)

    def fail() -> None:
        raise ValueError("second")

    threads = set()
    jobs.put(lambda: (done.append(1), threads.add(threading.get_ident())))  # type: ignore[func-returns-value]
    jobs.put(fail)
    jobs.put(lambda: (done.append(3), threads.add(threading.get_ident())))  # type: ignore[func-returns-value]
    jobs.put(over.set)
    assert over.wait(10)
    assert [str(d) for d in done] == ["1", "second", "3"]
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_the_thread_ends_with_whoever_holds_it() -> None:
    class Holder:
        def __init__(self) -> None:
            self.jobs = InOrder("unit-holder", lambda error: None)

        def nothing(self) -> None:
            pass

    holder = Holder()
    holder.jobs.put(holder.nothing)  # a job that holds it must not keep it
    (thread,) = (t for t in threading.enumerate() if t.name == "unit-holder")
    assert thread.daemon, "a process whose torch never answers must be able to end"
    del holder
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()

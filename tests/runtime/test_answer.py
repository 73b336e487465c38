"""An answer's status on its way, failures that stay its own, and the layout of what a round reads of it."""

from in_the_loop import new_request
from outrider.decoding.answer import Status, isolated
from outrider.decoding.loop import step
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.testing import FakeBackend
from outrider.types import Layout


def test_an_answer_waits_reads_decodes_and_ends() -> None:
    main = FakeBackend(6)
    scheduler = Scheduler(main, RowBudget(32))
    answer, other = new_request([1] * 40, max_new_tokens=2), new_request([2], max_new_tokens=9)
    scheduler.waiting.extend([answer, other])
    seen = [answer.status]
    while scheduler.waiting or scheduler.running:
        scheduler.settle()
        seen.append(answer.status)
        if len(other.sequence) == 4:
            other.fail(ValueError("of its own"))
        step(main, scheduler)
    assert [*dict.fromkeys(seen)] == [Status.WAITING, Status.READING, Status.DECODING, Status.FINISHED]
    assert (answer.finish_reason, other.status, len(other.sequence)) == ("length", Status.FAILED, 4)
    assert other.delivery.done


def test_a_failed_answer_stays_failed_with_its_first_error() -> None:
    first, second, other = (new_request([1]) for _ in range(3))
    error = ValueError("first")
    with isolated(first, second):
        raise error
    with isolated(first):
        raise KeyError("later")
    first.finish("stop")
    assert (first.status, first.error, second.error) == (Status.FAILED, error, error)
    assert (other.status, other.error) == (Status.WAITING, None)


def test_a_layout_has_branches_and_what_is_kept() -> None:
    tree = Layout(num_tokens=5, num_rows=4, parents=[-1, -1, 1])
    assert [[*branch] for branch in tree.branches] == [[0, 1, 2], [0, 1, 3, 4]]
    assert [*tree.kept([1, 2])] == [0, 1, 3, 4]
    chain = Layout(num_tokens=3, num_rows=2)
    assert [[*branch] for branch in chain.branches] == [[0, 1, 2]]
    assert [*chain.kept([0])] == [0, 1, 2]

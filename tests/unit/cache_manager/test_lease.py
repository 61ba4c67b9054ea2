import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_manager.core.lease import MAX_EPOCH, LeaseBook
from octavo.errors import InvalidRequest, StaleEpoch, Superseded, UnknownWorker
from octavo.ids import Epoch, Incarnation, WorkerId
from octavo.records.attend import Registration
from tests.support.books import pool_spec

NOW = 1_700_000_000.0


def registration(worker: str = "w1", incarnation: int = 7, first: int = 0, last: int = 0) -> Registration:
    return Registration(
        worker_id=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        address="host:1",
        pool=pool_spec(),
        first_epoch=Epoch(first),
        last_epoch=Epoch(last or first),
    )


def test_the_first_epoch_is_the_time_in_milliseconds():
    assert LeaseBook(5.0).register(registration(), NOW).epoch == 1_700_000_000_000


def test_epochs_grow_within_one_millisecond():
    book = LeaseBook(5.0)
    epochs = [book.register(registration(name), NOW).epoch for name in ("a", "b", "c")]
    assert epochs == [1_700_000_000_000, 1_700_000_000_001, 1_700_000_000_002]


def test_epochs_grow_over_a_restart():
    before = LeaseBook(5.0).register(registration(), NOW).epoch
    after = LeaseBook(5.0).register(registration(), NOW + 0.25).epoch
    assert after > before


def test_a_lease_lasts_as_long_as_it_is_renewed():
    book = LeaseBook(5.0)
    lease = book.register(registration(), NOW)
    renewed = book.renew(lease.worker_id, lease.epoch, NOW + 4)
    assert renewed.expires_at == NOW + 9
    assert book.expire(NOW + 8.9) == ()
    assert book.expire(NOW + 9) == (renewed,)
    assert len(book) == 0


def test_the_epoch_of_a_registration_is_known_before_it_is_made():
    book = LeaseBook(5.0)
    book.register(registration("a"), NOW)
    expected = book.next_epoch(registration("b"), NOW)
    assert book.register(registration("b"), NOW).epoch == expected


def test_a_worker_is_given_a_larger_epoch_by_every_manager():
    """Even by one whose clock is behind."""
    elsewhere = LeaseBook(5.0).register(registration(), NOW + 3600).epoch
    assert LeaseBook(5.0).register(registration(first=elsewhere), NOW).epoch == elsewhere + 1


@pytest.mark.parametrize(("first", "last"), [(2, 1), (1, MAX_EPOCH + 1)])
def test_epochs_that_were_never_given_are_refused(first, last):
    book = LeaseBook(5.0)
    with pytest.raises(InvalidRequest, match=f"first_epoch {first}, last_epoch {last}"):
        book.register(registration(first=first, last=last), NOW)
    assert len(book) == 0


class TestTwoProcessesUnderOneName:
    def test_the_later_one_takes_over(self):
        book = LeaseBook(5.0)
        old = book.register(registration(incarnation=1), NOW)
        new = book.register(registration(incarnation=2), NOW + 1)
        with pytest.raises(StaleEpoch):
            book.renew(old.worker_id, old.epoch, NOW + 1)
        assert list(book) == [new]

    def test_the_earlier_one_does_not_take_it_back(self):
        book = LeaseBook(5.0)
        old = book.register(registration(incarnation=1), NOW)
        new = book.register(registration(incarnation=2), NOW + 1)
        with pytest.raises(Superseded, match=str(new.epoch)):
            book.register(registration(incarnation=1, first=old.epoch), NOW + 2)
        assert list(book) == [new]

    @pytest.mark.parametrize("first_to_come", [1, 2])
    def test_a_manager_that_has_forgotten_both_decides_alike(self, first_to_come):
        book = LeaseBook(5.0)
        come = {
            incarnation: registration(incarnation=incarnation, first=int(NOW * 1000) + incarnation)
            for incarnation in (1, 2)
        }
        book.register(come[first_to_come], NOW + 10)
        if first_to_come == 1:
            book.register(come[2], NOW + 10)
        for _ in range(2):
            with pytest.raises(Superseded):
                book.register(come[1], NOW + 11)
        assert [lease.registration.incarnation for lease in book] == [2]

    def test_the_earlier_one_is_taken_when_the_other_is_not_heard_any_more(self):
        book = LeaseBook(5.0)
        old = book.register(registration(incarnation=1), NOW)
        book.register(registration(incarnation=2), NOW + 1)
        book.register(registration(incarnation=1, first=old.epoch), NOW + 6)
        assert [lease.registration.incarnation for lease in book] == [1]

    def test_the_same_process_may_always_come_again(self):
        book = LeaseBook(5.0)
        first = book.register(registration(), NOW)
        again = book.register(registration(first=first.epoch), NOW + 1)
        assert again.born == first.epoch
        assert list(book) == [again]


def test_asking_for_a_lease_does_not_extend_it():
    book = LeaseBook(5.0)
    lease = book.register(registration(), NOW)
    assert book.require(lease.worker_id, lease.epoch, NOW + 4) == lease
    assert book.expire(NOW + 5) == (lease,)
    with pytest.raises(StaleEpoch):
        book.require(lease.worker_id, lease.epoch, NOW + 5)


def test_the_next_expiry_is_that_of_the_worker_longest_unheard():
    book = LeaseBook(5.0)
    assert book.next_expiry() is None
    first = book.register(registration("a"), NOW)
    book.register(registration("b"), NOW + 1)
    assert book.next_expiry() == NOW + 5
    book.renew(first.worker_id, first.epoch, NOW + 3)
    assert book.next_expiry() == NOW + 6


def test_a_second_registration_makes_the_first_epoch_stale():
    book = LeaseBook(5.0)
    old = book.register(registration(incarnation=1), NOW)
    new = book.register(registration(incarnation=2), NOW + 1)
    with pytest.raises(StaleEpoch, match=f"epoch {old.epoch} of worker w1 .* {new.epoch}"):
        book.renew(old.worker_id, old.epoch, NOW + 2)
    assert list(book) == [new]


def test_nobody_loses_a_lease_while_nobody_can_be_heard():
    book = LeaseBook(5.0)
    over, held = (book.register(registration(name), now) for name, now in (("over", 0.0), ("held", 4.0)))
    book.excuse(6.0, 16.0)
    assert book.expire(18.9) == (over,)
    assert book.expire(19.0) == (held,)


def test_an_expired_lease_cannot_be_renewed_even_before_it_is_swept():
    book = LeaseBook(5.0)
    lease = book.register(registration(), NOW)
    with pytest.raises(StaleEpoch, match="expired"):
        book.renew(lease.worker_id, lease.epoch, NOW + 5)


@pytest.mark.parametrize("call", ["renew", "drain"])
def test_a_worker_without_a_lease_must_register(call):
    with pytest.raises(StaleEpoch, match="epoch 9 of worker w1 is over, it has no lease"):
        getattr(LeaseBook(5.0), call)(WorkerId("w1"), Epoch(9), NOW)


def test_a_worker_that_drains_stays_in_the_fleet():
    book = LeaseBook(5.0)
    lease = book.register(registration(), NOW)
    book.drain(lease.worker_id, lease.epoch, NOW + 1)
    assert book.renew(lease.worker_id, lease.epoch, NOW + 2).draining


def test_a_new_registration_takes_requests_again():
    book = LeaseBook(5.0)
    lease = book.register(registration(), NOW)
    book.drain(lease.worker_id, lease.epoch, NOW)
    assert not book.register(registration(incarnation=8), NOW).draining


def test_a_lease_can_be_given_back():
    book = LeaseBook(5.0)
    lease = book.register(registration(), NOW)
    assert book.end(lease.worker_id, lease.epoch) == lease
    assert len(book) == 0


def test_the_end_of_an_old_epoch_leaves_the_new_one_alone():
    book = LeaseBook(5.0)
    old = book.register(registration(), NOW)
    new = book.register(registration(), NOW)
    assert book.end(old.worker_id, old.epoch) is None
    assert list(book) == [new]


def test_an_unknown_worker_is_named():
    with pytest.raises(UnknownWorker, match="worker w9"):
        LeaseBook(5.0).lease(WorkerId("w9"))


class LeaseMachine(RuleBasedStateMachine):
    """Against a dict of (epoch, time last heard)."""

    def __init__(self):
        super().__init__()
        self.book = LeaseBook(5.0)
        self.now = NOW
        self.heard = {}
        self.epochs = []

    @rule(worker=st.sampled_from("abc"))
    def register(self, worker):
        lease = self.book.register(registration(worker), self.now)
        assert all(lease.epoch > epoch for epoch in self.epochs)
        self.epochs.append(lease.epoch)
        self.heard[worker] = lease.epoch, self.now

    @rule(worker=st.sampled_from("abc"), back=st.integers(0, 2))
    def renew(self, worker, back):
        if len(self.epochs) <= back:
            return
        epoch = self.epochs[-1 - back]
        current, heard = self.heard.get(worker, (None, 0.0))
        if epoch == current and self.now < heard + 5:
            self.book.renew(WorkerId(worker), epoch, self.now)
            self.heard[worker] = epoch, self.now
        else:
            with pytest.raises(StaleEpoch):
                self.book.renew(WorkerId(worker), epoch, self.now)

    @rule(seconds=st.sampled_from([0.0005, 1.0, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        over = {lease.worker_id for lease in self.book.expire(self.now)}
        assert over == {worker for worker, (_, heard) in self.heard.items() if heard + 5 <= self.now}
        for worker in over:
            del self.heard[worker]

    @invariant()
    def the_book_is_right(self):
        self.book.check()
        assert {lease.worker_id: lease.epoch for lease in self.book} == {
            worker: epoch for worker, (epoch, _) in self.heard.items()
        }


TestLeaseMachine = LeaseMachine.TestCase

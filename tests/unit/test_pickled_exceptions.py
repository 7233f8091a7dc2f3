import pickle

from accel_nb.errors import WorkerDied
from accel_nb.pool.sync.stream import pickling


class _Stopped(Exception):
    def __init__(self, epoch, *, best):
        super().__init__(f"stopped at {epoch}")
        self.best = best


def test_an_exception_is_rebuilt_without_a_call_of_its_init():
    stream, buffers = pickling.dump(_Stopped(3, best=0.5), namespace={}, shared={})
    again = pickling.load(stream, buffers, namespace={})
    assert (type(again), str(again), again.best) == (_Stopped, "stopped at 3", 0.5)


def test_a_death_of_a_worker_is_copied_by_any_pickler():
    again = pickle.loads(pickle.dumps(WorkerDied("rank 3 ended", rank=3)))
    assert (type(again), str(again), again.rank) == (WorkerDied, "rank 3 ended", 3)

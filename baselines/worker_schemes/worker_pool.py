"""A pool of workers of one kind, in this process or each a Ray actor, and the requests to them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

MOST_DEATHS = 3  # of one worker without an answer in between: another replacement would die, too


class _Host:
    """A Ray actor that makes and holds a worker."""

    def __init__(self, make: Callable[[int, int], Any], index: int, incarnation: int):
        self._worker = make(index, incarnation)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)


class WorkerPool:
    """Workers that each handle one request at a time. A Ray actor that dies is replaced and asked again.

    A pool of 0 Ray actors has one worker in this process, which handles a request when `take` is called.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[[int, int], Any],
        count: int,
        resources: dict[str, float] | None = None,
        places: Sequence[Any] = (),
    ):
        """Make the workers.

        Args:
          kind: what messages call them.
          make: makes a worker from its index and its incarnation, which is the number of workers of that
            index that have died.
          count: number of Ray actors; 0 for one worker in this process.
          resources: what Ray reserves for each of them, e.g. `{"num_cpus": 1}`.
          places: Ray's placement group of each worker and of the actors that it starts itself; empty to
            let Ray choose.
        """
        self.kind = kind
        self.size = max(count, 1)
        self.replaced: list[str] = []  # a message for each death; the reader may clear it
        self._make = make
        self._resources = resources or {}
        self._places = places
        self._incarnations = [0] * self.size
        self._deaths = [0] * self.size  # since the worker's last answer
        self._asked: dict[int, tuple[Any, ...]] = {}  # method and arguments, by worker
        self._answers: dict[Any, int] = {}  # worker, by the reference to its answer
        self._local = None if count else make(0, 0)
        self._actors = [self._start(index) for index in range(count)]

    @property
    def is_local(self) -> bool:
        """Whether the worker is in this process, so that nothing runs beside it."""
        return self._local is not None

    def _start(self, index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # A second thread handles `tell` while the first handles a request.
        named = type(f"{self.kind.capitalize()}Worker", (_Host,), {})  # as `ps` shows it
        options: dict[str, Any] = {"max_concurrency": 2, **self._resources}
        if self._places:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._places[index], placement_group_capture_child_tasks=True
            )
        host = ray.remote(named).options(**options)
        return host.remote(self._make, index, self._incarnations[index])

    def ask(self, index: int, method: str, *arguments: Any) -> None:
        """Send a request to a worker that has none."""
        self._asked[index] = (method, *arguments)
        if self._local is None:
            self._answers[self._actors[index].call.remote(method, *arguments)] = index

    def tell(self, index: int, method: str, *arguments: Any) -> None:
        """Call a method of a worker, possibly while it handles a request."""
        if self._local is not None:
            getattr(self._local, method)(*arguments)
        else:
            self._actors[index].call.remote(method, *arguments)

    def share(self, value: Any) -> Any:
        """Return a reference to use in several requests in place of a value, which is then sent once."""
        if self._local is not None:
            return value
        import ray

        return ray.put(value)

    def take(self) -> tuple[int, Any]:
        """Wait for the first answer; return the worker's index and the answer.

        Raises:
          Exception: an error of the worker, or of making it. A death is not an error: see the class.
          RuntimeError: if a worker and its replacements died `MOST_DEATHS` times without an answer.
        """
        if self._local is not None:
            method, *arguments = self._asked.pop(0)
            return 0, getattr(self._local, method)(*arguments)
        import ray
        from ray import exceptions

        # of the worker, of the machine that held its answer, and for lack of memory
        deaths = (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OutOfMemoryError)
        while True:
            (reference,), _ = ray.wait(list(self._answers))
            index = self._answers.pop(reference)
            try:
                answer = ray.get(reference)
            except deaths as error:
                if getattr(error, "actor_init_failed", False):
                    raise  # a replacement would fail as well
                self._replace(index, error)
                continue
            del self._asked[index]
            self._deaths[index] = 0
            return index, answer

    def _replace(self, index: int, error: Exception) -> None:
        self._incarnations[index] += 1
        self._deaths[index] += 1
        if self._deaths[index] == MOST_DEATHS:
            last = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(
                f"{self.kind} worker {index} has died {MOST_DEATHS} times in a row: {last}"
            )
        self.replaced.append(f"{self.kind} worker {index} has died, and was replaced")
        self._actors[index] = self._start(index)
        self.ask(index, *self._asked[index])

    def take_all(
        self, preemption_threshold: float = 1.0, preempt: tuple[Any, ...] | None = None
    ) -> list[Any]:
        """Wait for the answers to all requests; return them in the order of workers.

        Args:
          preemption_threshold: share of answers at which the other workers are preempted.
          preempt: method, and its arguments, that preempts a worker; None not to.
        """
        answers: dict[int, Any] = {}
        number = len(self._asked)
        while self._asked:
            index, answer = self.take()
            answers[index] = answer
            if preempt is not None and len(answers) == math.ceil(preemption_threshold * number):
                for late in self._asked:
                    self.tell(late, *preempt)
        return [answers[index] for index in sorted(answers)]

    def end(self) -> None:
        """Stop the workers."""
        if self._local is not None:
            self._local.end()
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        for place in self._places:
            remove_placement_group(place)

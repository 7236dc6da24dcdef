"""Workers of one kind, and how they are asked for something: in this process, or each a Ray actor."""

import math
from collections.abc import Callable, Sequence
from typing import Any

MOST_DEATHS = 3  # of one worker before it answers once: then another in its place would die, too


class _Host:
    """What Ray runs in a process of its own: a worker, whatever it is."""

    def __init__(self, make: Callable[[int, int], Any], index: int, life: int):
        self._worker = make(index, life)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)


class Crew:
    """Some workers, each asked for one thing at a time. A Ray actor that dies is replaced, and asked again.

    With no workers, there is one in this process, which does what it is asked when it is waited for.
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
          kind: what they are called where one has to be named.
          make: makes a worker from its index and from how many of that index have died.
          count: number of Ray actors; 0 for a worker in this process.
          resources: that Ray reserves for each of them, e.g. `{"num_cpus": 1}`.
          places: Ray's placement group of each of them and of what it starts itself; none for where Ray
            likes.
        """
        self.kind = kind
        self.size = max(count, 1)
        self.replaced: list[str] = []  # whoever died, in words; who reads it may clear it
        self._make = make
        self._resources = resources or {}
        self._places = places
        self._lives = [0] * self.size
        self._deaths = [0] * self.size  # since a worker has last answered
        self._asked: dict[int, tuple[Any, ...]] = {}  # method and arguments, by worker
        self._answers: dict[Any, int] = {}  # worker, by the reference to its answer
        self._local = None if count else make(0, 0)
        self._actors = [self._start(index) for index in range(count)]

    @property
    def is_local(self) -> bool:
        """Whether the worker is in this process: then nothing goes on beside it."""
        return self._local is not None

    def _start(self, index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # A second thread hears what a worker is told while it does what it was asked for.
        named = type(f"{self.kind.capitalize()}Worker", (_Host,), {})  # as `ps` shows it
        options: dict[str, Any] = {"max_concurrency": 2, **self._resources}
        if self._places:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._places[index], placement_group_capture_child_tasks=True
            )
        host = ray.remote(named).options(**options)
        return host.remote(self._make, index, self._lives[index])

    def ask(self, index: int, method: str, *arguments: Any) -> None:
        """Ask a worker for something; it must not be doing anything yet."""
        self._asked[index] = (method, *arguments)
        if self._local is None:
            self._answers[self._actors[index].call.remote(method, *arguments)] = index

    def tell(self, index: int, method: str, *arguments: Any) -> None:
        """Tell a worker something while it may be doing what it was asked for."""
        if self._local is not None:
            getattr(self._local, method)(*arguments)
        else:
            self._actors[index].call.remote(method, *arguments)

    def share(self, value: Any) -> Any:
        """Return what to ask several workers with in place of a value, so that it is sent but once."""
        if self._local is not None:
            return value
        import ray

        return ray.put(value)

    def take(self) -> tuple[int, Any]:
        """Wait for the first answer; return whose it is, and the answer.

        Raises:
          Exception: what the worker failed with, or could not be made for. Its death is no failure.
          RuntimeError: if a worker and those in its place have died `MOST_DEATHS` times without an answer.
        """
        if self._local is not None:
            method, *arguments = self._asked.pop(0)
            return 0, getattr(self._local, method)(*arguments)
        import ray
        from ray import exceptions

        # of the worker, of the machine that its answer was on, and for want of memory
        deaths = (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OutOfMemoryError)
        while True:
            (reference,), _ = ray.wait(list(self._answers))
            index = self._answers.pop(reference)
            try:
                answer = ray.get(reference)
            except deaths as error:
                if getattr(error, "actor_init_failed", False):
                    raise  # another would fail as well
                self._replace(index, error)
                continue
            del self._asked[index]
            self._deaths[index] = 0
            return index, answer

    def _replace(self, index: int, error: Exception) -> None:
        self._lives[index] += 1
        self._deaths[index] += 1
        if self._deaths[index] == MOST_DEATHS:
            last = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(
                f"{self.kind} worker {index} has died {MOST_DEATHS} times in a row: {last}"
            )
        self.replaced.append(f"{self.kind} worker {index} has died, and was replaced")
        self._actors[index] = self._start(index)
        self.ask(index, *self._asked[index])

    def take_all(self, enough: float = 1.0, then: tuple[Any, ...] | None = None) -> list[Any]:
        """Wait for the answers of all that were asked; return them in the order of workers.

        Args:
          enough: share of answers at which the others are told something.
          then: what they are told: a method, and its arguments.
        """
        answers: dict[int, Any] = {}
        number = len(self._asked)
        while self._asked:
            index, answer = self.take()
            answers[index] = answer
            if then is not None and len(answers) == math.ceil(enough * number):
                for late in self._asked:
                    self.tell(late, *then)
        return [answers[index] for index in sorted(answers)]

    def end(self) -> None:
        """End the workers; whoever has workers of its own ends those first."""
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

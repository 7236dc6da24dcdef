"""Tasks of the real-time strategy game µRTS, as two papers have them.

Harvesting is the task of "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms"
(https://arxiv.org/abs/2006.14171); attacking, producing and winning are those of "Action Guidance"
(https://arxiv.org/abs/2010.03956). The papers' versions of gym-microrts are in no registry. This module
builds the same tasks on the game of gym-microrts 0.4.3 (`make setup MICRORTS=1`; it needs Java): one action
per step for one unit, of eight components, and nine ticks without an action after it. docs/differences.md
lists what differs.

Each player has a base and a worker at first. The opponent does nothing, or acts at random.
"""

import functools
import importlib.util
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cleanba.run.command_line import BadInput


class Scenario(NamedTuple):
    """The rules of a task: map, length, rewards and opponent."""

    map_path: str
    episode_steps: int  # at most; the first reward function can end an episode earlier
    rewards: tuple[str, ...]  # the game's reward functions
    opponent: Literal["PassiveAI", "RandomBiasedAI"] = "PassiveAI"


# 1 for each resource that a worker harvests, and for each that it returns. Ends when no resource is left.
HARVESTING = ("ResourceGather",)
# Ends with the game. WinLoss is 1 or -1, CloserToEnemyBase the distance by which the nearest unit approached
# the enemy's base, and the others count events.
REWARDS = (
    "WinLoss", "ResourceGather", "ProduceWorker", "ProduceBuilding", "Attack", "ProduceCombatUnit",
    "CloserToEnemyBase",
)  # fmt: skip
_10X10 = "maps/10x10/basesWorkers10x10.xml"
SCENARIOS = {
    "MicrortsMining4x4F9-v0": Scenario("maps/4x4/basesWorkers4x4.xml", 200, HARVESTING),
    "MicrortsMining10x10F9-v0": Scenario(_10X10, 200, HARVESTING),
    "MicrortsMining16x16F9-v0": Scenario("maps/16x16/basesWorkers16x16.xml", 200, HARVESTING),
    "MicrortsAttackHRL-v1": Scenario(_10X10, 200, REWARDS),
    "MicrortsProduceCombatUnitHRL-v1": Scenario(_10X10, 400, REWARDS),
    "MicrortsRandomEnemyHRL3-v1": Scenario(_10X10, 600, REWARDS, "RandomBiasedAI"),
}
TICKS_PER_STEP = 10  # one with the action, nine without
UNIT_TYPES = 7
PLANES = (5, 5, 3, UNIT_TYPES + 1, 6)  # hit points, resources, owner, unit type, current action
REACH = 3  # the game takes targets of attacks as offsets of at most this many cells
_NO_LIMIT = 2**30  # ticks after which the game itself would end an episode

# Planes of an observation, and their values.
OWNER, UNIT_TYPE, CURRENT_ACTION = 2, 3, 4
MINE, ENEMY = 1, 2
NOOP = 0

INVALID = ("null", "busy", "owner")


class Task(NamedTuple):
    """The sizes of a task's map, observations and actions."""

    env_id: str
    height: int
    width: int

    @property
    def scenario(self) -> Scenario:
        """The task's rules."""
        return SCENARIOS[self.env_id]

    @property
    def cells(self) -> int:
        """Cells of the map."""
        return self.height * self.width

    @property
    def components(self) -> tuple[int, ...]:
        """Sizes of an action's components.

        Source unit, action type, directions of move, harvest, return and produce, produced type, attacked
        unit.
        """
        return (self.cells, 6, 4, 4, 4, 4, UNIT_TYPES, self.cells)

    @property
    def num_actions(self) -> int:
        """Number of actions, all components together."""
        return int(np.prod(self.components))

    @property
    def obs_shape(self) -> tuple[int, int, int]:
        """Shape of an observation: 5 planes of small integers."""
        return (len(PLANES), self.height, self.width)


class Step(NamedTuple):
    """The result of one action in each of B environments; an ended episode has been reset."""

    obs: np.ndarray  # uint8 [B, 5, height, width]
    rewards: np.ndarray  # float32 [B, R], of each reward function
    dones: np.ndarray  # bool [B]
    invalid: np.ndarray  # int32 [B, 3], see `invalid_counts`


def check_env_id(env_id: str, choices: Collection[str] = SCENARIOS) -> None:
    """Refuse a task that is unknown, or that a program does not have.

    Raises:
      ValueError: with one line.
    """
    if env_id not in choices:
        raise ValueError(f"--env-id {env_id}: choose from {', '.join(choices)}")


def game_folder() -> Path:
    """Return the folder of the installed game.

    Raises:
      BadInput: with one line, if the game or Java is missing.
    """
    found = importlib.util.find_spec("gym_microrts")
    if found is None or importlib.util.find_spec("jpype") is None:
        raise BadInput("µRTS is not installed: make setup MICRORTS=1")
    if not shutil.which("java"):
        raise BadInput("µRTS needs Java (Debian: apt install default-jre-headless)")
    return Path(found.origin).parent / "microrts"


@functools.cache
def _java() -> Any:
    """Start Java in this process, and return the module `jpype`."""
    import jpype

    jar = game_folder() / "microrts.jar"
    # -Xrs leaves signals to Python.
    jpype.startJVM("-Xrs", "-Xmx512m", "-XX:+UseSerialGC", classpath=[str(jar)])
    # The game prints each map that it loads.
    silent = jpype.JClass("java.io.OutputStream").nullOutputStream()
    jpype.JClass("java.lang.System").setOut(jpype.JClass("java.io.PrintStream")(silent))
    return jpype


def describe_task(env_id: str) -> Task:
    """Return the sizes of a task.

    Raises:
      ValueError: if it is unknown.
      BadInput: if the game is not installed.
    """
    from xml.etree import ElementTree

    check_env_id(env_id)
    root = ElementTree.parse(game_folder() / SCENARIOS[env_id].map_path).getroot()
    return Task(env_id, int(root.get("height")), int(root.get("width")))


class MicroRTS:
    """B games, stepped together, each with the same task and its own actions.

    Against a passive opponent, a trajectory depends on its actions alone.
    """

    def __init__(self, task: Task, num_envs: int):
        """Start the games; `reset` comes next."""
        jpype = _java()
        self._array, self._int = jpype.JArray, jpype.JInt
        self.task, self.num_envs = task, num_envs
        types = jpype.JClass("rts.units.UnitTypeTable")()
        scenario = task.scenario
        rewards = [
            jpype.JClass(f"ai.rewardfunction.{name}RewardFunction")() for name in scenario.rewards
        ]
        opponent = jpype.JClass(f"ai.{scenario.opponent}")
        client = jpype.JClass("tests.JNIGridnetVecClient")
        self._games = client(
            0, num_envs, _NO_LIMIT,
            self._array(jpype.JClass("ai.rewardfunction.RewardFunctionInterface"))(rewards),
            str(game_folder()), scenario.map_path,
            self._array(jpype.JClass("ai.core.AI"))([opponent(types) for _ in range(num_envs)]),
            types, False,
        )  # fmt: skip
        self._players = self._array(self._int)([0] * num_envs)
        nothing = self._array(self._int, 2)(0)
        self._no_actions = self._array(self._int, 3)([nothing] * num_envs)
        self._obs: np.ndarray | None = None
        self._lengths = np.zeros(num_envs, np.int64)

    def reset(self) -> np.ndarray:
        """Begin an episode in each game; return the observations, uint8 [B, 5, height, width]."""
        self._lengths[:] = 0
        self._obs = np.array(self._games.reset(self._players).observation, np.uint8)
        return self._obs

    def step(self, actions: np.ndarray) -> Step:
        """Take one action in each game.

        Args:
          actions: int32 [B, 8], see `Task.components`.
        """
        invalid = invalid_counts(self._obs, actions)
        orders = game_actions(actions, self.task.width)[:, None]
        response = self._games.gameStep(self._array.of(np.ascontiguousarray(orders)), self._players)
        earned = []
        ended = np.zeros(self.num_envs, bool)
        for tick in range(TICKS_PER_STEP):
            if tick:
                response = self._games.gameStep(self._no_actions, self._players)
            # What a game gives after its end is part of no episode.
            earned.append(np.array(response.reward, float) * ~ended[:, None])
            ended |= np.array(response.done, bool)[:, 0]
        self._lengths += 1
        dones = ended | (self._lengths >= self.task.scenario.episode_steps)
        obs = np.array(response.observation, np.uint8)
        for index in np.flatnonzero(dones):
            obs[index] = np.array(self._games.clients[index].reset(0).observation, np.uint8)
        self._lengths[dones] = 0
        self._obs = obs
        return Step(obs, step_rewards(np.stack(earned)), dones, invalid)

    def close(self) -> None:
        """Free the games. Java stays, because a process cannot start it twice."""
        self._games.close()


def step_rewards(earned: np.ndarray) -> np.ndarray:
    """Return the rewards of a step from those of its ticks.

    Of several reward functions, each is clipped to [-1, 1], as in the environment of the paper on action
    guidance: a player without mobile units is reported at a distance of 2e9 from the enemy's base.

    Args:
      earned: [ticks, B, functions].

    Returns:
      float32 [B, functions].
    """
    rewards = earned.sum(axis=0)
    return (rewards if rewards.shape[1] == 1 else rewards.clip(-1, 1)).astype(np.float32)


def source_mask(obs: np.ndarray) -> np.ndarray:
    """Return which cells have an own unit that is not busy.

    Args:
      obs: [..., 5, height, width].

    Returns:
      bool [..., cells].
    """
    free = (obs[..., OWNER, :, :] == MINE) & (obs[..., CURRENT_ACTION, :, :] == NOOP)
    return free.reshape(*free.shape[:-2], -1)


def target_mask(obs: np.ndarray) -> np.ndarray:
    """Return which cells have a unit of the enemy that is not busy; shapes as in `source_mask`."""
    free = (obs[..., OWNER, :, :] == ENEMY) & (obs[..., CURRENT_ACTION, :, :] == NOOP)
    return free.reshape(*free.shape[:-2], -1)


def invalid_counts(obs: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Return which actions choose a source unit that is not there, is busy, or is not the player's.

    A unit can be both busy and another player's. NOOP does not count for a busy unit, as in the game's own
    statistics.

    Args:
      obs: [B, 5, height, width], before the action.
      actions: [B, 8].

    Returns:
      int32 [B, 3], 0 or 1 in the order of `INVALID`.
    """
    planes = obs.reshape(*obs.shape[:2], -1)
    at_source = planes[np.arange(len(obs)), :, actions[:, 0]]
    there = at_source[:, UNIT_TYPE] != 0
    busy = there & (at_source[:, CURRENT_ACTION] != NOOP) & (actions[:, 1] != NOOP)
    of_another = there & (at_source[:, OWNER] != MINE)
    return np.stack([~there, busy, of_another], axis=1).astype(np.int32)


def game_actions(actions: np.ndarray, width: int) -> np.ndarray:
    """Translate actions for the game, which takes the attacked cell as an offset from the source unit.

    An attack out of reach becomes a NOOP, which is what comes of it in the game.

    Args:
      actions: int32 [B, 8], with cells as targets.
      width: of the map.

    Returns:
      int32 [B, 8], with offsets as targets.
    """
    source, target = actions[:, 0], actions[:, 7]
    dx, dy = target % width - source % width, target // width - source // width
    reached = (np.abs(dx) <= REACH) & (np.abs(dy) <= REACH)
    result = actions.copy()
    result[:, 7] = np.where(reached, (dy + REACH) * (2 * REACH + 1) + dx + REACH, 0)
    attack_in_vain = (actions[:, 1] == 5) & ~reached
    result[attack_in_vain, 1] = NOOP
    return result

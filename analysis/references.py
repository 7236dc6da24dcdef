"""Reference scores for normalization: random play is 0, the reference is 1."""

import re

NAN = float("nan")

# Game -> random play, professional human tester, human world record (points, whole game).
# Random and human: Wang et al., "Dueling network architectures" (arXiv 1511.06581), as in
# dqn_zoo/atari_data.py and in openrlbenchmark 0.3.1, with which the original Cleanba published its
# scores (up to 30 no-ops at the start, at most 108,000 frames per episode).
# World record: Toromanoff et al., "Is deep reinforcement learning really superhuman on Atari?"
# (arXiv 1908.04683), as in the `human_record` scores that accompany DreamerV2 (arXiv 2010.02193,
# scores/atari_baselines.json), which have none for Surround.
ATARI: dict[str, tuple[float, float, float]] = {
    "Alien": (227.8, 7127.7, 251916.0),
    "Amidar": (5.8, 1719.5, 104159.0),
    "Assault": (222.4, 742.0, 8647.0),
    "Asterix": (210.0, 8503.3, 1000000.0),
    "Asteroids": (719.1, 47388.7, 10506650.0),
    "Atlantis": (12850.0, 29028.1, 10604840.0),
    "BankHeist": (14.2, 753.1, 82058.0),
    "BattleZone": (2360.0, 37187.5, 801000.0),
    "BeamRider": (363.9, 16926.5, 999999.0),
    "Berzerk": (123.7, 2630.4, 1057940.0),
    "Bowling": (23.1, 160.7, 300.0),
    "Boxing": (0.1, 12.1, 100.0),
    "Breakout": (1.7, 30.5, 864.0),
    "Centipede": (2090.9, 12017.0, 1301709.0),
    "ChopperCommand": (811.0, 7387.8, 999999.0),
    "CrazyClimber": (10780.5, 35829.4, 219900.0),
    "Defender": (2874.5, 18688.9, 6010500.0),
    "DemonAttack": (152.1, 1971.0, 1556345.0),
    "DoubleDunk": (-18.6, -16.4, 22.0),
    "Enduro": (0.0, 860.5, 9500.0),
    "FishingDerby": (-91.7, -38.7, 71.0),
    "Freeway": (0.0, 29.6, 38.0),
    "Frostbite": (65.2, 4334.7, 454830.0),
    "Gopher": (257.6, 2412.5, 355040.0),
    "Gravitar": (173.0, 3351.4, 162850.0),
    "Hero": (1027.0, 30826.4, 1000000.0),
    "IceHockey": (-11.2, 0.9, 36.0),
    "Jamesbond": (29.0, 302.8, 45550.0),
    "Kangaroo": (52.0, 3035.0, 1424600.0),
    "Krull": (1598.0, 2665.5, 104100.0),
    "KungFuMaster": (258.5, 22736.3, 1000000.0),
    "MontezumaRevenge": (0.0, 4753.3, 1219200.0),
    "MsPacman": (307.3, 6951.6, 290090.0),
    "NameThisGame": (2292.3, 8049.0, 25220.0),
    "Phoenix": (761.4, 7242.6, 4014440.0),
    "Pitfall": (-229.4, 6463.7, 114000.0),
    "Pong": (-20.7, 14.6, 21.0),
    "PrivateEye": (24.9, 69571.3, 101800.0),
    "Qbert": (163.9, 13455.0, 2400000.0),
    "Riverraid": (1338.5, 17118.0, 1000000.0),
    "RoadRunner": (11.5, 7845.0, 2038100.0),
    "Robotank": (2.2, 11.9, 76.0),
    "Seaquest": (68.4, 42054.7, 999999.0),
    "Skiing": (-17098.1, -4336.9, -3272.0),
    "Solaris": (1236.3, 12326.7, 111420.0),
    "SpaceInvaders": (148.0, 1668.7, 621535.0),
    "StarGunner": (664.0, 10250.0, 77400.0),
    "Surround": (-10.0, 6.5, NAN),
    "Tennis": (-23.8, -8.3, 21.0),
    "TimePilot": (3568.0, 5229.2, 65300.0),
    "Tutankham": (11.4, 167.6, 5384.0),
    "UpNDown": (533.4, 11693.2, 82840.0),
    "Venture": (0.0, 1187.5, 38900.0),
    "VideoPinball": (16256.9, 17667.9, 89218328.0),
    "WizardOfWor": (563.5, 4756.5, 395300.0),
    "YarsRevenge": (3092.9, 54576.9, 15000105.0),
    "Zaxxon": (32.5, 9173.3, 83700.0),
}

# Environment -> random play, solved.
# Solved: the `reward_threshold` that Gymnasium 1.4 registers for the environment; for Catch (bsuite)
# the largest possible return, 1.
# Random: mean of 10,000 episodes of uniformly random actions in EnvPool 1.2.5, as printed by
# `python -m experiments.statistics_checks random`.
SOLVED: dict[str, tuple[float, float]] = {
    "CartPole-v1": (22.1, 475.0),
    "Acrobot-v1": (-498.9, -100.0),
    "Catch-v0": (-0.59, 1.0),
    "FrozenLake-v1": (0.017, 0.7),
    "LunarLander-v3": (-182.4, 200.0),
    "MountainCar-v0": (-200.0, -110.0),
}

NORMALIZATIONS = ("human", "record")


def game_name(env_id: str) -> str:
    """Return the Atari game of an environment's name: `ALE/Pong-v5` and `pong` are both `Pong`.

    An environment that is none of the 57 games keeps its own name.
    """
    name = re.sub(r"^(ALE/|atari_)", "", env_id)
    name = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", name)
    return _GAMES.get(_plain(name), env_id)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_GAMES = {_plain(game): game for game in ATARI}


def reference(env_id: str, normalization: str = "human") -> tuple[float, float] | None:
    """Return the scores that are normalized to 0 and to 1 on an environment.

    Args:
      env_id: name of the environment, of any version.
      normalization: `human` (professional tester) or `record` (human world record) on Atari;
        elsewhere both mean the score at which the environment counts as solved.

    Returns:
      Random and reference score, or None where there is no reference.
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"no such normalization: {normalization!r}")
    game = game_name(env_id)
    if game in ATARI:
        random, human, record = ATARI[game]
        one = human if normalization == "human" else record
        return None if one != one else (random, one)
    return SOLVED.get(env_id)


def normalize(score: float, env_id: str, normalization: str = "human") -> float:
    """Return (score - random) / (reference - random); NaN where there is no reference."""
    pair = reference(env_id, normalization)
    return (score - pair[0]) / (pair[1] - pair[0]) if pair else NAN

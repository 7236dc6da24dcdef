"""Every training command of the original's README, benchmark.sh and tpu.sh (d1f8979) is taken verbatim.

The exceptions are in `NOT_TAKEN`; docs/differences.md has a table of their replacements.
"""

import shlex
from pathlib import Path

import pytest

from cleanba import cleanba_impala, cleanba_ppo
from cleanba.run.command_line import BadInput, parse

DIFFERENCES = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
TRAINERS = {"cleanba_ppo.py": cleanba_ppo, "cleanba_impala.py": cleanba_impala}

README = """
poetry run python cleanba/cleanba_ppo.py
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 0 --local-num-envs 60 --track
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 0 1 --local-num-envs 60
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 --local-num-envs 60
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 3
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 3 4 --local-num-envs 60
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 3 4 5 6 --local-num-envs 60
python cleanba/cleanba_ppo.py --distributed --actor-device-ids 0 --learner-device-ids 1 2 3 --local-num-envs 60
poetry run python cleanrl/cleanba_ppo.py --distributed --learner-device-ids 1 2 3 --local-num-envs 60 --track --save-model --upload-model
"""  # noqa: E501

BENCHMARK = """
poetry run python cleanba/cleanba_impala.py --distributed --exp-name cleanba_impala_a0_l1_d4_cpu46 --local_num_envs 32 --num-actor-threads 1 --learner-device-ids 1 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_impala.py --distributed --no-concurrency --exp-name cleanba_impala_sync_a0_l1_d4_cpu46 --local_num_envs 32 --num-actor-threads 1 --learner-device-ids 1 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_impala.py --exp-name cleanba_impala_a0_l0_d1_cpu10 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_impala.py --exp-name cleanba_impala_a0_l0_d1_cpu40 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_ppo.py --distributed --exp-name cleanba_ppo_a0+1_l2+3_d2_cpu46 --local_num_envs 32 --num-actor-threads 1 --actor-device-ids 0 1 --learner-device-ids 2 3 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_ppo.py --distributed --exp-name cleanba_ppo_a0_l1+2+3_d2_cpu46 --local_num_envs 30 --num-actor-threads 2 --learner-device-ids 1 2 3 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_ppo.py --distributed --no-concurrency --exp-name cleanba_ppo_sync_a0_l0_d8_cpu46 --local_num_envs 16 --num-actor-threads 1 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_ppo.py --exp-name cleanba_ppo_a0_l0_d1_cpu10 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_ppo.py --exp-name cleanba_ppo_a0_l0_d1_cpu40 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_ppo.py --no-concurrency --exp-name cleanba_ppo_sync_a0_l0_d1_cpu10 --track --wandb-project-name cleanba
poetry run python cleanba/cleanba_ppo.py --no-concurrency --exp-name cleanba_ppo_sync_a0_l0_d1_cpu40 --track --wandb-project-name cleanba
"""  # noqa: E501

# benchmark.sh and cleanrl_utils.benchmark add these to each command.
ADDED = " --env-id Breakout-v5 --seed 1"

# Programs and flags that are not in the original's repository at d1f8979 either.
NOT_TAKEN = {
    "cleanba_ppo_fair.py": "no such program",
    "cleanba_ppo_envpool_impala_atari_wrapper.py": "no such program",
    "--async-batch-size": "no such flag",
}


@pytest.mark.parametrize("line", [*README.strip().splitlines(), *BENCHMARK.strip().splitlines()])
def test_a_command_of_the_original_is_taken_verbatim(line):
    words = shlex.split(line + ADDED)
    (script,) = [word for word in words if word.endswith(".py")]
    args = parse(TRAINERS[Path(script).name].Args, words[words.index(script) + 1 :])
    assert args.env_id == "Breakout-v5"
    assert (f"--exp-name {args.run.exp_name}" in line) == ("--exp-name" in line)


def test_what_is_not_taken_is_listed_with_what_to_write_instead():
    text = DIFFERENCES.read_text()
    for word in NOT_TAKEN:
        assert f"`{word}`" in text, word
    with pytest.raises(BadInput, match="async-batch-size"):
        parse(cleanba_ppo.Args, ["--async-batch-size", "60"])


# Of the original's `Args`, without those that it fills in itself.
DEFAULTS = {
    "seed": 1, "track": False, "wandb_entity": None, "capture_video": False, "save_model": False,
    "upload_model": False, "hf_entity": "", "env_id": "Breakout-v5", "total_timesteps": 50_000_000,
    "num_actor_threads": 2, "anneal_lr": True, "gamma": 0.99, "num_minibatches": 4,
    "gradient_accumulation_steps": 1, "ent_coef": 0.01, "vf_coef": 0.5, "actor_device_ids": (0,),
    "learner_device_ids": (0,), "distributed": False, "log_frequency": 10,
}  # fmt: skip
OF_PPO = {
    "learning_rate": 2.5e-4, "num_steps": 128, "gae_lambda": 0.95, "update_epochs": 4, "norm_adv": True,
    "clip_coef": 0.1, "max_grad_norm": 0.5, "concurrency": False,
}  # fmt: skip
OF_IMPALA = {"learning_rate": 6e-4, "num_steps": 20, "max_grad_norm": 40.0, "concurrency": True}


def every_value(args):
    """The values of a command line by name, those of nested dataclasses too."""
    for name, value in vars(args).items():
        yield from every_value(value) if hasattr(value, "__dataclass_fields__") else [(name, value)]


@pytest.mark.parametrize(("trainer", "own"), [(cleanba_ppo, OF_PPO), (cleanba_impala, OF_IMPALA)])
def test_defaults_are_the_original_s(trainer, own):
    """But for the number of environments and the project in Weights & Biases: docs/differences.md."""
    ours = dict(every_value(trainer.Args()))
    assert {name: ours[name] for name in DEFAULTS | own} == DEFAULTS | own

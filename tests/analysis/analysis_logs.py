"""Logs of other tools with known content."""

from tensorboardX import SummaryWriter


def write_tensorboard(
    folder,
    tag="charts/episodic_return",
    steps=40,
    total=400,
    config=True,
    system="cleanba_ppo",
    env_id="Breakout-v5",
    seed=3,
):
    """Write a run as Cleanba and CleanRL log it; without `config` its folder alone names it."""
    folder.mkdir(parents=True)
    writer = SummaryWriter(str(folder))
    if config:
        rows = {
            "exp_name": system,
            "seed": seed,
            "env_id": env_id,
            "total_timesteps": total,
            "batch_size": 10,
            "actor_device_ids": [0],
            "learner_device_ids": [1, 2],
            "num_actor_threads": 2,
            "world_size": 1,
        }
        text = "|param|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in rows.items())
        writer.add_text("hyperparameters", text)
    for i in range(1, steps + 1):
        writer.add_scalar(tag, float(i), 10 * i, walltime=5000.0 + i)
        writer.add_scalar("losses/value_loss", 1 / i, 10 * i, walltime=5000.0 + i)
    writer.close()
    return folder

"""How large a run is: its processes, and the parameters that they hold. Both disk and memory are reckoned from this."""

from dataclasses import dataclass
from pathlib import Path

from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight.model_folder import count_parameters


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """What a run holds, as far as it is known.

    Attributes:
        ranks: train workers.
        engines: rollout engines; 0 where nothing is generated.
        gpus: of this machine, None where the run goes to a cluster.
        parameters: of the trained model; 0 where its weights cannot be read.
        frozen_parameters: of reference and teacher together, as far as theirs can.
        compute_bytes: of one parameter in the precision computed in, which is that of the engines too.
    """

    ranks: int
    engines: int
    gpus: int | None
    parameters: int
    frozen_parameters: int
    compute_bytes: int


def run_size(config: DrivetrainConfig) -> RunSize:
    """Reckon the size of a run."""
    train, placement = config.train, config.placement
    generates = config.algorithm.generates or config.evaluation.eval_prompt_data is not None
    gpus = _gpus() if placement.ray_address is None else None
    frozen = [Path(one) for one in (train.ref_load, train.opd_teacher_load) if one is not None]
    fp32 = train.fp32 or (gpus == 0 and not (train.bf16 or train.fp16))
    return RunSize(
        ranks=placement.train_world_size,
        engines=placement.num_engines if generates else 0,
        gpus=gpus,
        parameters=parameters(Path(train.hf_checkpoint)),
        frozen_parameters=sum(map(parameters, frozen)),
        compute_bytes=4 if fp32 else 2,
    )


def gib(size: int) -> str:
    """Write a number of bytes as a person reads it."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size // unit}.{size % unit * 10 // unit} {name}"
    return f"{size} bytes"


def parameters(folder: Path) -> int:
    """Count the parameters in a model folder; 0 where its weights cannot be read."""
    try:
        return count_parameters(folder)
    except ValueError:  # found where the folder is checked
        return 0


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()

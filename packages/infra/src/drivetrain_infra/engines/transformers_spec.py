"""Spec of the embedded engine `transformers`; importing it imports neither torch nor transformers."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drivetrain_backend_api import OptionGroup, ProbeResult, option
from drivetrain_infra.engines.base import EngineSpec


@dataclass(frozen=True, kw_only=True)
class TransformersEngineConfig(OptionGroup):
    """Options of the transformers engine."""

    engine_max_batch_size: int = option(256, help="most sequences that one engine generates together", minimum=1)


def _probe() -> ProbeResult:
    try:
        found = f"transformers {version('transformers')}, torch {version('torch')}"
    except PackageNotFoundError as error:
        return ProbeResult(
            available=False, detail=f"{error.name} is not installed: pip install 'drivetrain-infra[transformers]'"
        )
    return ProbeResult(available=True, detail=found)


def _validate(config: Any) -> list[str]:
    per_engine = config.placement.rollout_num_gpus_per_engine
    if per_engine > 1:
        return [
            f"--rollout-num-gpus-per-engine {per_engine}: a transformers engine runs on one device; "
            "give 1, and more --rollout-num-gpus for more engines"
        ]
    return []


SPEC = EngineSpec(
    name="transformers",
    api_version=1,
    target="drivetrain_infra.engines.transformers_engine:TransformersEngine",
    config_class=TransformersEngineConfig,
    devices=("cpu", "cuda"),
    validate=_validate,
    probe=_probe,
)

import importlib

import pytest

from drivetrain_backend_api import (
    TRAIN_BACKENDS,
    DrivetrainError,
    PluginImportError,
    TrainConfig,
    load_implementation,
    load_spec,
    select_backend,
)

SENTENCE = "the Megatron backend is not built yet; use --train-backend fsdp (pip install drivetrain-backend-fsdp)"


def test_it_is_found_and_reports_that_it_cannot_work_yet() -> None:
    spec = load_spec(TRAIN_BACKENDS, "megatron")
    assert (spec.probe().available, spec.probe().detail) == (False, SENTENCE)
    assert spec.capabilities.devices == ()


def test_it_refuses_every_configuration_with_what_to_use() -> None:
    spec = load_spec(TRAIN_BACKENDS, "megatron")
    assert spec.validate(TrainConfig(hf_checkpoint="anything")) == [f"--train-backend megatron: {SENTENCE}"]


def test_it_is_preferred_to_fsdp_but_passed_over_while_it_is_unavailable() -> None:
    assert load_spec(TRAIN_BACKENDS, "megatron").preference > load_spec(TRAIN_BACKENDS, "fsdp").preference
    assert select_backend(None).name == "fsdp"


def test_loading_it_raises_the_same_sentence() -> None:
    with pytest.raises(DrivetrainError, match="not built yet; use --train-backend fsdp"):
        importlib.import_module("drivetrain_backend_megatron.backend")
    with pytest.raises(PluginImportError) as caught:
        load_implementation(TRAIN_BACKENDS, load_spec(TRAIN_BACKENDS, "megatron"))
    assert str(caught.value.__cause__) == SENTENCE

"""Read the configuration of a Hugging Face model folder; its weights are read by `drivetrain_backend_api.hf_folder`."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from drivetrain_backend_api.errors import DataError


def read_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read `config.json`.

    Raises:
        DataError: there is none, or transformers cannot read it.
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json; --hf-checkpoint needs a Hugging Face model folder")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / 'config.json'} cannot be read by transformers: {error}") from error
    return config

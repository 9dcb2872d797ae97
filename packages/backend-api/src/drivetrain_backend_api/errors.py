"""Every error the contract raises on purpose.

Each message says what was found, what was expected, and what to do. Knows nothing of torch or of any backend.
"""


def printable(text: str) -> str:
    """Quote text for a message of one line where it holds a line break or another character that does not print."""
    return text if text.isprintable() else repr(text)


def in_one_line(text: object) -> str:
    """Put the words of an error, which may be another library's page of text, into one line."""
    return " ".join(str(text).split())


class DrivetrainError(Exception):
    """Base of all errors that are shown to the user without a traceback."""


class ConfigError(DrivetrainError):
    """A configuration value or combination that cannot work; the message names the flag and the fix."""


class DataError(DrivetrainError):
    """Prompts, rollouts or model files that cannot be used; the message names the file or sample."""


class DiscoveryError(DrivetrainError):
    """A plugin (train backend, rollout engine, algorithm) cannot be used."""


class NotInstalledError(DiscoveryError):
    """No installed distribution provides the requested name."""


class PluginImportError(DiscoveryError):
    """The plugin is installed but importing it failed; the original error is chained."""


class ApiVersionError(DiscoveryError):
    """The plugin was written for another version of the contract."""


class DuplicateNameError(DiscoveryError):
    """Two installed distributions claim the same plugin name."""


class IllegalStateError(DrivetrainError):
    """A backend call that its lifecycle state does not allow; the message names both states."""


class UnsupportedModelError(DrivetrainError):
    """A model that the backend refuses, with the reason."""


class WeightExportAbortedError(DrivetrainError):
    """Another rank abandoned a collective weight export, so it ended here too."""

"""Find plugins through entry points, and tell apart the ways in which that fails.

The same three failures exist for train backends, rollout engines and algorithms: not installed; installed but its
import fails; installed but written for another version of the contract. Never imports torch.
"""

from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from drivetrain_backend_api.errors import (
    ApiVersionError,
    DiscoveryError,
    DuplicateNameError,
    NotInstalledError,
    PluginImportError,
)
from drivetrain_backend_api.spec import API_VERSION, AlgorithmSpec, BackendSpec, PluginSpec

SpecT = TypeVar("SpecT", bound=PluginSpec)


@dataclass(frozen=True, kw_only=True)
class PluginKind(Generic[SpecT]):
    """One kind of plugin.

    Attributes:
        group: the entry point group.
        noun: what a user calls it, for messages.
        flag: the flag that selects it.
        spec_class: what its entry points resolve to.
        distribution_prefix: where official ones are published, for the line to type.
    """

    group: str
    noun: str
    flag: str
    spec_class: type[SpecT]
    distribution_prefix: str | None = None

    def install_hint(self, name: str) -> str:
        """Return the line to type when `name` is not installed."""
        if self.distribution_prefix is None:
            return f"install the distribution that provides the entry point {name!r} in group {self.group!r}"
        return f"pip install {self.distribution_prefix}{name}"


TRAIN_BACKENDS: PluginKind[BackendSpec] = PluginKind(
    group="drivetrain.train_backends",
    noun="train backend",
    flag="--train-backend",
    spec_class=BackendSpec,
    distribution_prefix="drivetrain-backend-",
)
ALGORITHMS: PluginKind[AlgorithmSpec] = PluginKind(
    group="drivetrain.algorithms", noun="algorithm", flag="--algorithm", spec_class=AlgorithmSpec
)


def _distribution(entry: EntryPoint) -> Distribution:
    if entry.dist is None:
        raise DiscoveryError(f"entry point {entry.name!r} ({entry.value}) belongs to no distribution")
    return entry.dist


def installed(kind: PluginKind[Any]) -> dict[str, EntryPoint]:
    """List the installed plugins of a kind by name, without importing any.

    Raises:
        DuplicateNameError: two distributions claim one name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=kind.group):
        other = found.setdefault(entry.name, entry)
        # The same distribution may be visible twice (an editable install and its build), which is harmless.
        mine, theirs = _distribution(entry).name, _distribution(other).name
        if mine != theirs:
            raise DuplicateNameError(
                f"{kind.noun} {entry.name!r} is claimed by two distributions, {theirs} and {mine}; "
                f"remove one: pip uninstall {mine}"
            )
    return dict(sorted(found.items()))


def load_spec(kind: PluginKind[SpecT], name: str) -> SpecT:
    """Return the spec that `name` resolves to.

    Raises:
        NotInstalledError: nothing installed has that name.
        PluginImportError: importing the spec failed (the cause is chained).
        ApiVersionError: the spec was written for another version of the contract.
        DuplicateNameError: two distributions claim one name.
    """
    entries = installed(kind)
    if name not in entries:
        have = ", ".join(entries) or "none"
        raise NotInstalledError(
            f"{kind.noun} {name!r} is not installed (installed: {have}); "
            f"to use it: {kind.install_hint(name)}; or choose an installed one with {kind.flag}"
        )
    entry = entries[name]
    dist = _distribution(entry)
    try:
        spec = entry.load()
    except Exception as error:  # an import may raise anything
        _raise_if_api_mismatch(kind, name, dist, getattr(error, "api_version", None), error)
        raise PluginImportError(
            f"{kind.noun} {name!r} ({dist.name} {dist.version}) is installed, but importing {entry.value} failed: "
            f"{type(error).__name__}: {error}; repair it: pip install --force-reinstall {dist.name}"
        ) from error
    _raise_if_api_mismatch(kind, name, dist, getattr(spec, "api_version", None), None)
    if not isinstance(spec, kind.spec_class) or spec.name != name:
        raise PluginImportError(
            f"{kind.noun} {name!r} ({dist.name} {dist.version}): {entry.value} must be a {kind.spec_class.__name__} "
            f"named {name!r}, found {spec!r}; ask its author, or pip uninstall {dist.name}"
        )
    return spec


def load_implementation(kind: PluginKind[SpecT], spec: SpecT) -> Any:
    """Import what a spec stands for.

    Raises:
        PluginImportError: the import failed (the cause is chained).
    """
    try:
        return spec.load_target()
    except Exception as error:  # an import may raise anything
        dist = _distribution(installed(kind)[spec.name])
        raise PluginImportError(
            f"{kind.noun} {spec.name!r} ({dist.name} {dist.version}) is installed, but importing {spec.target} failed: "
            f"{type(error).__name__}: {error}; repair it: pip install --force-reinstall {dist.name}"
        ) from error


def _raise_if_api_mismatch(
    kind: PluginKind[Any], name: str, dist: Distribution, theirs: Any, cause: Exception | None
) -> None:
    if theirs is None or theirs == API_VERSION:
        return
    pin = next((one for one in dist.requires or [] if one.startswith("drivetrain-backend-api")), None)
    pin = pin.split(";")[0].strip() if pin else "drivetrain-backend-api"
    way_out = (
        f"upgrade it: pip install -U {dist.name}" if isinstance(theirs, int) and theirs < API_VERSION else "upgrade"
    )
    raise ApiVersionError(
        f"{kind.noun} {name!r} ({dist.name} {dist.version}) was written for API version {theirs}, but the installed "
        f"drivetrain-backend-api speaks API version {API_VERSION}; {way_out}, or pin the contract it was built "
        f"for: pip install '{pin}'"
    ) from cause


def select_backend(name: str | None) -> BackendSpec:
    """Return the spec of the chosen train backend, or of the preferred available one when `name` is None.

    Raises:
        NotInstalledError: none is installed, or none of those installed is available on this machine.
        DiscoveryError: as `load_spec`, or two are equally preferred.
    """
    if name is not None:
        return load_spec(TRAIN_BACKENDS, name)
    names = list(installed(TRAIN_BACKENDS))
    if not names:
        raise NotInstalledError(f"no train backend is installed; {TRAIN_BACKENDS.install_hint('fsdp')}")
    specs = [load_spec(TRAIN_BACKENDS, one) for one in names]
    probes = {spec.name: spec.probe() for spec in specs}
    usable = [spec for spec in specs if probes[spec.name].available]
    if not usable:
        why = "; ".join(f"{one}: {probe.detail}" for one, probe in probes.items())
        raise NotInstalledError(
            f"no installed train backend can work here ({why}); {TRAIN_BACKENDS.install_hint('fsdp')}"
        )
    best = max(spec.preference for spec in usable)
    preferred = [spec for spec in usable if spec.preference == best]
    if len(preferred) > 1:
        raise DiscoveryError(
            f"train backends {', '.join(spec.name for spec in preferred)} are installed; choose with --train-backend"
        )
    return preferred[0]

"""What a test asks of a backend: models and references on demand, actions on so many ranks, claims noted."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain_backend_api.spec import BackendSpec
from drivetrain_backend_api.testing.cases import BASE
from drivetrain_backend_api.testing.claims import Claims, Tolerance
from drivetrain_backend_api.testing.layouts import Layout
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.ranks import GRACE, Ranks
from drivetrain_backend_api.testing.reference import Trained, reference_train
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout

Action = Mapping[str, Any]

_NONE: Mapping[str, Any] = {}


def act(do: str, name: str = "", /, **arguments: Any) -> Action:
    """Write one action down; see `actions`."""
    return {"do": do, "as": name or do, **arguments}


@dataclass(kw_only=True)
class Check:
    """The claims of one test; broken ones fail it together, at its end."""

    claims: Claims
    test: str
    where: str
    broken: list[str] = field(default_factory=list)

    def close(self, what: str, difference: float, tolerance: Tolerance) -> None:
        """Claim that a difference is within a tolerance."""
        self._note(self.claims.close(self.test, what, self.where, difference, tolerance))

    def true(self, what: str, holds: bool, seen: object = "") -> None:
        """Claim a fact; `seen` is shown when it does not hold."""
        self._note(self.claims.true(self.test, what, self.where, holds, "" if holds else str(seen)))

    def same(self, what: str, names: Sequence[str]) -> None:
        """Claim bitwise equality; `names` is what `comparing.different` found."""
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        self.true(f"{what}, bit for bit", not names, f"different: {shown}")

    def _note(self, problem: str | None) -> None:
        if problem:
            self.broken.append(problem)


class Judge:
    """Holds one backend to its claims."""

    def __init__(self, spec: BackendSpec, options: Mapping[str, Any], ranks: Ranks, claims: Claims) -> None:
        self.spec = spec
        self.capabilities = spec.capabilities
        self.claims = claims
        self.ranks = ranks
        self.test = ""
        self.folder = ranks.folder
        self._options = options
        self._references: dict[str, Trained] = {}
        self._plays: dict[str, list[dict[str, Any]]] = {}

    def model(self, name: str, *, dtype: str = "float32", seed: int = 0) -> Path:
        """Make a model folder, once."""
        folder = self.folder / f"{name}-{dtype}-{seed}"
        return folder if folder.exists() else make_model(folder, name, dtype=dtype, seed=seed)

    def config(
        self, layout: Layout, *, model: Path, precision: str = "fp32", options: Mapping[str, Any] = _NONE
    ) -> dict[str, Any]:
        """Options of a run under a layout."""
        return (
            {**BASE, "hf_checkpoint": str(model), precision: True}
            | layout.options
            | dict(self._options)
            | dict(options)
        )

    def play(
        self,
        layout: Layout,
        actions: Sequence[Action],
        *,
        model: Path | None = None,
        precision: str = "fp32",
        once: bool = False,
        grace: float = GRACE,
        options: Mapping[str, Any] = _NONE,
    ) -> list[dict[str, Any]]:
        """Play actions on fresh processes under a layout; returns each rank's results by action name.

        Args:
            layout: decides how many ranks.
            actions: in order, the same on all ranks.
            model: folder; the tiny Qwen3 where None.
            precision: "fp32", "bf16" or "fp16".
            once: remember the results of equal calls.
            grace: seconds that the other ranks get after one has failed.
            options: of the backend's configuration.
        """
        config = self.config(layout, model=model or self.model("qwen3"), precision=precision, options=options)
        key = repr((layout, actions, sorted(config.items(), key=str)))
        if once and key in self._plays:
            return self._plays[key]
        results = self.ranks.run(layout.ranks, options=config, actions=actions, grace=grace)
        if once:
            self._plays[key] = results
        return results

    def exported(self, folder: Path, model: Path) -> Any:
        """Return the tensors of the Hugging Face folder, in float32, that a checkpoint is turned into."""
        action = act("exported_checkpoint", name=self.spec.name, folder=str(folder), model=str(model))
        return self.play(Layout(), [action])[0]["exported_checkpoint"]

    def reference(
        self,
        model: Path,
        rollout: Mapping[str, Any],
        algorithm: str = "TokenMean",
        options: Mapping[str, Any] = _NONE,
    ) -> Trained:
        """Train the plain reference on the same, once."""
        key = repr((str(model), sorted(rollout.items()), algorithm, sorted(options.items())))
        if key not in self._references:
            config = self.spec.config_class(**{**BASE, "hf_checkpoint": str(model), "fp32": True, **options})
            drawn = draw_rollout(RolloutSpec(**rollout))
            self._references[key] = reference_train(model, drawn, config, algorithm=algorithm)
        return self._references[key]

    @contextmanager
    def check(self, where: str) -> Iterator[Check]:
        """Collect claims of the present test.

        Raises:
            AssertionError: at the end, with every broken claim.
        """
        __tracebackhide__ = True
        check = Check(claims=self.claims, test=self.test, where=where)
        yield check
        if check.broken:
            raise AssertionError("\n".join(check.broken))

"""The flag list of each train backend, frozen: a flag is an interface, so that a change of one is a decision.

`uv run pytest tests/launcher/test_flag_lists.py --write-docs` writes the lists and the launcher's table of the official
backends' options anew; the difference is for review and for the changelog.
"""

import json
from pathlib import Path

import pytest

from drivetrain_backend_api import TRAIN_BACKENDS, Option, OptionGroup, TrainConfig, installed, load_spec, options
from drivetrain_launcher import arguments
from drivetrain_launcher.arguments import Surface, flags_of, known_options, load_surface, names_of

LISTS = Path(__file__).parent / "flags"
KNOWN = Path(arguments.__file__).parent / "known_backend_options.json"
OFFICIAL = ("fsdp", "megatron")


def described(one: Option) -> str:
    """Write everything about an option that a command line may depend on."""
    kind = one.type.__name__ + (" ..." if one.many else "") + (" or none" if one.optional else "")
    parts = ["/".join(flags_of(one)), kind, "required" if one.required else f"default {one.default!r}"]
    if one.choices:
        parts.append("one of " + ", ".join(one.choices))
    bounds = {"at least": one.minimum, "at most": one.maximum, "above": one.above}
    parts += [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
    if one.acts_with:
        parts.append(f"acts with {one.acts_with}")
    if one.runs_code:
        parts.append("runs code")
    return " | ".join(parts)


def flag_list(surface: Surface) -> str:
    lines = ["# selection"]
    lines += [f"--{name.replace('_', '-')}" for name in arguments.FLAG_ONLY]
    lines += [described(one) for _, one in arguments.SELECTORS.values()]
    for field in surface.groups:
        lines += ["", f"# {field} ({surface.groups[field].__name__})"]
        lines += [described(one) for one in surface.group_options(field)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("algorithm", ["grpo", "opd", "sft"])
@pytest.mark.parametrize("backend", OFFICIAL)
def test_the_flag_list_of_a_backend_changes_only_on_purpose(
    backend: str, algorithm: str, request: pytest.FixtureRequest
) -> None:
    found = flag_list(load_surface(backend, "transformers", algorithm))
    path = LISTS / f"{backend}_{algorithm}.txt"
    if request.config.getoption("--write-docs"):
        path.write_text(found, "utf-8")
    assert found == path.read_text("utf-8"), "if that is meant, run this test with --write-docs and review the change"


def test_the_launcher_knows_the_options_of_the_official_backends_even_where_they_are_not_installed(
    request: pytest.FixtureRequest,
) -> None:
    def names(config_class: type[OptionGroup]) -> set[str]:
        return {name for one in options(config_class) for name in names_of(one)}

    core = names(TrainConfig)
    found = {name: sorted(names(load_spec(TRAIN_BACKENDS, name).config_class) - core) for name in OFFICIAL}
    if request.config.getoption("--write-docs"):
        KNOWN.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    assert found == known_options()
    assert set(OFFICIAL) <= set(installed(TRAIN_BACKENDS))

"""The root README speaks of commands, flags and files that exist."""

import re
from pathlib import Path

from drivetrain_backend_api import select_backend
from drivetrain_launcher.arguments import load_surface

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_it_holds_no_placeholder() -> None:
    assert not re.findall(r"\b[A-Z]+_(?:OUTPUT|MINUTES)\b|@[A-Z]+@|TODO", README)


def test_every_flag_of_its_commands_exists() -> None:
    surface = load_surface(select_backend(None).name, "transformers", "grpo")
    known = {one.flag for one in surface.options.values()} | {"--recipe", "--print-config", "--help"}
    known |= {"--train-backend", "--out"}
    commands = "\n".join(re.findall(r"drivetrain train(?:.*\\\n)*.*", README))
    used = set(re.findall(r"--[a-z][a-z-]+", commands))
    assert used
    assert used <= known


def test_every_link_into_the_tree_leads_somewhere() -> None:
    links = [one for one in re.findall(r"\]\(([^)#]+)", README) if "://" not in one]
    assert links
    assert [one for one in links if not (ROOT / one).exists()] == []

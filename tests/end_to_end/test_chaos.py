"""A run whose processes are killed at any moment goes on, and is the run that nothing happened to: bit for bit.

What a run goes through is drawn from a deck of cards, each a victim and a moment, shuffled by a seed. A round is one
card. Where it ends the command, the same command is run again; where it does not, because an engine is replaced or
train workers are restarted, the next card comes in the same start. After each start every checkpoint that is there is
compared with the unbroken run's; at the end, everything. docs/chaos.md keeps the result of the last whole deck.
"""

import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from survival import AT_ONCE_SECONDS, BACKENDS, Finished, Place, place_of, require_durable, require_same_run
from trouble import DRIVER, ENGINE, PHASES, WORKER, Blow

from drivetrain_infra.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

ROUNDS = 30
"""Cards in the deck."""

CHAINS = 3
"""Tests that the deck is dealt to."""

MANY_ROLLOUTS = 8

MOST_BLOWS = 3
"""In one start."""

INSIDE = r"iter_\d+\.partial/"
"""Files of a save, in the order in which a process opens and names them."""

NAMED = r"^os\.rename \S+/iter_\d+\.partial "
LATEST_OPENED, LATEST = r"^open \S+/\.latest\.", r"^os\.rename \S+ \S+/latest$"
STATE_OPENED, STATE = r"^open \S+/\.resume_state\.json\.", r"^os\.rename \S+ \S+/resume_state\.json$"
PRUNED = r"^os\.rename \S+ \S+\.removed$"
ROLLOUT = r"^os\.rename \S+ \S+/rollout_\d+\.pt$"


def deck() -> list[Blow]:
    """Return all cards; a seed has still to place them."""
    phases = [Blow(victim=victim, phase=phase, after=0.0) for victim in (DRIVER, WORKER, ENGINE) for phase in PHASES]
    moments = (INSIDE, NAMED, LATEST_OPENED, LATEST, STATE_OPENED, STATE, PRUNED, ROLLOUT)
    files = [Blow(victim=DRIVER, file=moment) for moment in moments]
    # between the files that the ranks write
    ranks = [Blow(victim=DRIVER, file=INSIDE, by=WORKER)] * 2
    ranks += [Blow(victim=WORKER, rank=rank, file=INSIDE, by=WORKER) for rank in (0, 1)]
    others = [Blow(victim=WORKER, file=NAMED), Blow(victim=ENGINE, file=LATEST)]
    # a second signal, in the middle of the save that the first asked for
    others += [Blow(victim=DRIVER, signal="SIGTERM", file=NAMED)]
    cards = [*phases, *files, *ranks, *others]
    assert len(cards) == ROUNDS
    return cards


def placed(card: Blow, rng: random.Random) -> Blow:
    """Choose when exactly a card happens: in which turn, and how far into it."""
    if card.phase is not None:
        rank = rng.choice((0, 1)) if card.victim == WORKER else 0
        return replace(card, nth=rng.choice((1, 2)), after=rng.random(), rank=rank)
    if card.file == INSIDE:
        return replace(card, nth=rng.randint(1, 8))
    return card


def dealt(seed: int) -> list[Blow]:
    """Return the cards of one chain, placed and in order."""
    cards = deck()
    random.Random(ROUNDS).shuffle(cards)
    rng = random.Random(seed)
    return [placed(one, rng) for one in cards[seed::CHAINS]]


def first_start(cards: Sequence[Blow], rng: random.Random) -> tuple[list[Blow], int]:
    """Take the cards of the next start: up to one that ends it. Returns them, and the restarts that it may make."""
    blows: list[Blow] = []
    for card in cards[:MOST_BLOWS]:
        if card.signal == "SIGTERM":
            blows.append(Blow(victim=DRIVER, signal="SIGTERM", phase="train_on", after=0.1))
        blows.append(card)
        if card.victim == DRIVER:
            break
    workers = sum(one.victim == WORKER for one in blows)
    ends_here = blows[-1].victim == WORKER and rng.random() < 0.5
    return blows, workers - ends_here


def require_ended_as_told(finished: Finished, blows: Sequence[Blow], restarts: int) -> None:
    """Assert that a start ended as what hit it says: at once, with an error, or at its end."""
    hits = finished.hits
    if len(hits) == len(blows) and blows[-1].victim == DRIVER:
        assert finished.code == (143 if blows[-1].signal == "SIGTERM" else -9), finished.output
        if blows[-1].signal == "SIGTERM":
            assert finished.ended - hits[-1]["at"] < AT_ONCE_SECONDS
    elif finished.code != 0:
        lost = sum(one["victim"] == WORKER for one in hits)
        assert (finished.code, lost) == (1, restarts + 1), finished.output
        assert re.search(r"drivetrain: error: .*train rank \d", finished.output), finished.output


def go_through(place: Place, name: str, cards: Sequence[Blow], rng: random.Random) -> list[str]:
    """Bring all of the cards over runs, one after the other; returns what was hit, in words."""
    said: list[str] = []
    number, waiting = 0, list(cards)
    while number < ROUNDS:
        run = RunFolder(place.folder / f"{name}_{number}")
        blows, restarts = first_start(waiting, rng) if waiting else ([], 0)
        flags = ("--max-restarts", str(restarts), "--max-engine-restarts", "9", "--save-max-to-keep", "3")
        finished = place.train(run.root.name, *flags, blows=blows)
        said += [f"{one['signal']} to the {one['victim']}: {short(one['where'])}" for one in finished.hits]
        for one in finished.hits:
            if blows[one["number"]] in waiting:
                waiting.remove(blows[one["number"]])
        require_ended_as_told(finished, blows, restarts)
        if finished.code != 0:
            require_durable(run, place.straight)
            continue
        require_same_run(run, place.straight)
        if not waiting:
            return said
        number += 1
    raise AssertionError(f"not hit in {number} runs: {waiting}")


def short(where: str) -> str:
    """Leave out of paths what differs between rounds that are alike."""
    return re.sub(r"\d{2,}", "N", re.sub(r"/\S+/(?=iter_|rollout_|\.|latest|resume_state)", "", where))


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A working folder of the backend that the test names, whose unbroken run is three rollouts long."""
    return place_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("place", ["fsdp"], indirect=True)
def test_a_run_goes_on_without_an_engine_without_a_worker_and_after_its_driver(place: Place) -> None:
    blows = [
        Blow(victim=ENGINE, phase="generate", after=0.3, nth=2),
        Blow(victim=WORKER, rank=1, file=INSIDE, by=WORKER, nth=3),
        Blow(victim=DRIVER, file=LATEST_OPENED),
    ]
    finished = place.train("ROUNDS", "--max-restarts", "1", blows=blows)
    assert finished.code == -9, finished.output
    assert len(finished.hits) == 3
    run = RunFolder(place.folder / "ROUNDS")
    require_durable(run, place.straight)
    finished = place.train("ROUNDS", "--max-restarts", "1")
    assert finished.code == 0, finished.output
    require_same_run(run, place.straight)


@pytest.mark.parametrize("place", ["megatron"], indirect=True)
def test_a_second_signal_in_the_middle_of_a_save_leaves_the_run_whole(place: Place) -> None:
    blows = [
        Blow(victim=DRIVER, signal="SIGTERM", phase="train_on", after=0.1, nth=2),
        Blow(victim=DRIVER, signal="SIGTERM", file=NAMED),
    ]
    finished = place.train("TWICE", blows=blows)
    require_ended_as_told(finished, blows, 0)
    assert len(finished.hits) == 2
    run = RunFolder(place.folder / "TWICE")
    require_durable(run, place.straight)
    finished = place.train("TWICE")
    assert finished.code == 0, finished.output
    require_same_run(run, place.straight)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", range(CHAINS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_is_killed_again_and_again_is_the_unbroken_one(
    backend: str, chain: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = place_of(backend, tmp_path_factory.mktemp(backend), MANY_ROLLOUTS)
    cards = dealt(chain)
    said = go_through(place, f"CHAIN_{chain}", cards, random.Random(chain))
    for where, count in sorted(Counter(said).items()):
        print(f"{backend}, chain {chain}: {count} x {where}")
    assert len(said) >= len(cards)

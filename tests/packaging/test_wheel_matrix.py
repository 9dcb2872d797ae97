"""The wheel matrix: what it notices. CI runs the matrix itself."""

from pathlib import Path

import pytest
from clean_environments import Environment, PackagingError, build, closure, distributions, make_environment
from wheel_matrix import ROWS, Row, check_listing, check_training, chosen_rows, main, run_row


def test_every_backend_of_the_tree_has_a_row_that_ci_runs() -> None:
    backends = {one for one in distributions() if one.startswith("drivetrain-backend-")} - {"drivetrain-backend-api"}
    assert {row.distribution for row in chosen_rows([])} == backends
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_row_installs_one_backend_and_what_the_launcher_needs() -> None:
    needed, outside = closure(["drivetrain-launcher", "drivetrain-backend-megatron"])
    assert needed == set(distributions()) - {"drivetrain-backend-fsdp"}
    assert "ray>=2.60" in outside
    assert not any(one.startswith(("drivetrain", "pyarrow")) for one in outside)


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PackagingError, match="no row jax; choose of fsdp, "):
        main(["fsdp", "jax"])
    assert main(["--list"]) == 0
    assert "images/lowest.txt" in capsys.readouterr().out


def test_what_is_not_as_expected_is_told(tmp_path: Path) -> None:
    wheels = build(tmp_path / "wheels")
    environment = make_environment(tmp_path / "megatron")
    chosen = [wheels[one] for one in closure(["drivetrain-launcher", "drivetrain-backend-megatron"])[0]]
    environment.install(*chosen, "psutil", with_dependencies=False)
    with pytest.raises(PackagingError, match=r"it: drivetrain backends lists \['megatron'\], expected 'fsdp' alone"):
        check_listing(Row(name="it", backend="fsdp"), environment)
    with pytest.raises(
        PackagingError, match=r"it: drivetrain backends says .*'available': False.*megatron-core.* not "
    ):
        check_listing(Row(name="it", backend="megatron"), environment)
    with pytest.raises(PackagingError, match=r"(?s)drivetrain-launcher.*requires.*rich"):
        environment.check()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_row_trains_from_wheels_and_a_run_that_fails_is_told(tmp_path: Path) -> None:
    wheels = build(tmp_path / "wheels")
    row = next(row for row in ROWS if row.backend == "megatron")
    run_row(row, wheels, tmp_path / "row")
    # the folder of the first run is in use
    with pytest.raises(PackagingError, match="megatron: training failed: exit code 2"):
        check_training(row, Environment(tmp_path / "row"))

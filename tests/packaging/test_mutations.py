"""The mutations of `scripts/mutations` fit the present sources, and the verdicts of `scripts/mutate.py` are right."""

import ast
import json
import re
from pathlib import Path

import mutate
import pytest
from mutate import DOCS, MUTATIONS, PACKAGES, SUITE, TABLES, TITLES, Result, judged, passes
from mutations import Mutation, MutationError
from mutations.fsdp import FSDP
from mutations.megatron import MEGATRON

NODE = "lib/drivetrain_backend_api/testing/test_conformance.py::TestConformance::test_numbers[dp2-packed]"
ONE = Mutation(
    name="one",
    backend="fsdp",
    mistake="adds",
    file="backend-fsdp/src/a.py",
    old="1 - 1",
    new="1 + 1",
    test="test_numbers",
    where="dp2",
)


def suite_tests() -> set[str]:
    sources = "".join(path.read_text() for path in (PACKAGES / SUITE).glob("*.py"))
    return set(re.findall(r"^    def (test_\w+)\(", sources, re.MULTILINE))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[one.name for one in MUTATIONS])
def test_it_applies_once_and_leaves_code_that_compiles(mutation: Mutation) -> None:
    changed = mutate.mutated_text(mutation)
    original = (PACKAGES / mutation.file).read_text()
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(original))


def test_there_are_enough_of_them_and_their_names_are_unique() -> None:
    names = [one.name for one in MUTATIONS]
    assert len(names) == len(set(names))
    assert len({(one.file, one.old, one.new) for one in MUTATIONS}) == len(names)
    assert sum(one.file.startswith(FSDP) for one in MUTATIONS) >= 24
    assert sum(one.file.startswith(MEGATRON) for one in MUTATIONS) >= 20
    assert {one.backend for one in MUTATIONS} == set(TABLES) == set(TITLES)
    assert not [one.name for one in MUTATIONS if one.file.startswith(SUITE)]


@pytest.mark.skipif(not DOCS.exists(), reason="docs/mutations.md is not written yet")
def test_the_page_has_a_row_for_each_that_names_tests_of_the_suite() -> None:
    assert [line[3:] for line in DOCS.read_text().splitlines() if line.startswith("## ")] == [
        f"The {title} backend" for title in TITLES.values()
    ]
    rows = [line.split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert {re.findall(r"\(`([\w-]+)`\)", row[0])[-1] for row in rows} == {one.name for one in MUTATIONS}
    for row in rows:
        caught = re.findall(r"`(test_\w+)", row[2])
        assert caught, row
        assert set(caught) <= suite_tests()


def test_each_names_the_test_of_the_suite_that_must_catch_it() -> None:
    assert {one.test for one in MUTATIONS} <= suite_tests()
    assert ONE.chosen == "test_numbers and (dp2)"


@pytest.mark.parametrize(("text", "found"), [("x = 2\n", "0 times"), ("x = 1 - 1 + 1 - 1\n", "2 times")])
def test_old_text_that_is_not_there_once_is_an_error_with_name_and_file(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / ONE.file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(MutationError, match=f"^one: packages/{ONE.file} .*{found}"):
        mutate.mutated_text(ONE, tmp_path)


def test_a_file_that_is_gone_is_an_error_with_name_and_file(tmp_path: Path) -> None:
    with pytest.raises(MutationError, match=f"^one: packages/{ONE.file} does not exist"):
        mutate.mutated_text(ONE, tmp_path)


@pytest.mark.parametrize("backend", TABLES)
def test_the_mutated_copy_is_what_an_interpreter_imports(tmp_path: Path, backend: str) -> None:
    mutation = TABLES[backend][0]
    original = (PACKAGES / mutation.file).read_text()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    paths = mutate.copy_sources(backend, mutation, tmp_path)
    mutate.require_copy(backend, paths, mutate.environment(paths, temporary))
    assert (tmp_path / mutation.file).read_text() == mutate.mutated_text(mutation) != original
    assert (PACKAGES / mutation.file).read_text() == original


def test_another_installation_before_the_copy_is_refused(tmp_path: Path) -> None:
    variables = mutate.environment([PACKAGES / one / "src" for one in mutate.copied("fsdp")], tmp_path)
    with pytest.raises(MutationError, match="the copy is not what is imported"):
        mutate.require_copy("fsdp", [tmp_path / "one", tmp_path / "other"], variables)


@pytest.mark.parametrize(
    "reason",
    [
        "AssertionError: loss (dp2, packed): off by 0.5, allowed is 1e-05",
        "assert not ['weights']",
        "drivetrain_backend_api.testing.ranks.RanksFailedError: 2 ranks ended with codes [1, -1]",
        "Failed: DID NOT RAISE <class 'RanksFailedError'>",
    ],
)
def test_a_claim_that_breaks_is_a_catch(reason: str) -> None:
    output = f"..F\nE   {reason}\n=== short test summary info ===\nFAILED {NODE} - {reason}\n1 failed, 2 passed\n"
    assert judged(1, output) == (("test_numbers[dp2-packed]",), "")


@pytest.mark.parametrize(
    ("code", "output", "why"),
    [
        (0, "3 passed\n", "it survives"),
        (None, "..", "not done at the deadline"),
        (2, "ERROR lib/test_conformance.py - SyntaxError: invalid syntax\n1 error\n", "could not run"),
        (1, f"ERROR {NODE} - ValueError: no such model\n1 error\n", "could not run"),
        (1, f"FAILED {NODE} - KeyError: 'export'\n", "failed by no claim"),
        (1, f"FAILED {NODE}\n", "no reason is given"),
        (
            1,
            f"E   first error, on rank 1: NameError: name 'x'\nFAILED {NODE} - AssertionError: 2 ranks\n",
            "no working",
        ),
        (1, f"E   ImportError: cannot import name 'x'\nFAILED {NODE} - AssertionError: it ended\n", "no working code"),
        (3, "INTERNALERROR> boom\n", "code 3"),
        (4, "ERROR: --train-backend fsdp: no\n", "code 4"),
        (5, "no tests ran\n", "code 5"),
    ],
)
def test_what_is_no_catch_says_why(code: int | None, output: str, why: str) -> None:
    assert why in judged(code, output)[1]


def test_the_unmutated_copy_passes_only_where_something_ran() -> None:
    assert passes(0, "....\n41 passed, 9 skipped in 5.0s\n") == (True, "")
    assert not passes(0, "9 skipped in 5.0s\n")[0]
    assert not passes(5, "no tests ran\n")[0]
    passed, why = passes(1, f"FAILED {NODE} - AssertionError: loss\n1 failed\n")
    assert not passed
    assert "test_numbers[dp2-packed]" in why


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert mutate.read_results(path) == {}
    result = Result(name="one", digest="0", caught=True, by=("test_numbers[dp2]",), seconds=1.5, why="")
    mutate.write_results(path, {"one": result})
    assert mutate.read_results(path) == {"one": result}
    path.write_text(json.dumps([{"name": "one"}]))
    with pytest.raises(MutationError, match="holds no results"):
        mutate.read_results(path)


def test_a_result_is_valid_only_for_the_sources_that_it_came_of(tmp_path: Path) -> None:
    backend, suite = tmp_path / ONE.file, tmp_path / SUITE / "suite.py"
    for path in (backend, suite):
        path.parent.mkdir(parents=True)
        path.write_text("1 - 1")

    def digests() -> list[str]:
        choices = [(ONE, "test_numbers"), (ONE, "test_other"), (None, "test_numbers")]
        return [mutate.digest_of("fsdp", mutation, words, tmp_path) for mutation, words in choices]

    before = digests()
    assert len(set(before)) == 3
    suite.write_text("2 - 2")
    assert digests()[:2] == before[:2]
    assert digests()[2] != before[2]
    backend.write_text("2 - 2")
    assert not set(digests()) & set(before)


def test_the_page_tells_what_caught_what() -> None:
    result = Result(name="one", digest="0", caught=True, by=("test_numbers[dp2]",), seconds=1.5, why="")
    rendered = mutate.page({"fsdp": [ONE]}, {"one": result})
    assert rendered.endswith("| adds (`one`) | backend-fsdp: a.py | `test_numbers[dp2]` |\n")
    assert "1.5" not in rendered


def test_the_page_keeps_what_it_says_of_other_backends() -> None:
    result = Result(name="one", digest="0", caught=True, by=("test_numbers[dp2]",), seconds=1.5, why="")
    both = mutate.page({"megatron": [ONE], "fsdp": [ONE]}, {"one": result})
    assert both.index("## The FSDP backend") < both.index("## The Megatron backend")
    assert mutate.page({"fsdp": [ONE]}, {"one": result}, both) == both
    assert mutate.page({"megatron": [ONE]}, {"one": result}, both) == both


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nothing"], "--only nothing: no such mutation"),
        (["--only", MUTATIONS[0].name, "--write-docs"], "leave --only out"),
        (["--jobs", "0"], "--jobs 0: give 1 or more"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(words: list[str], message: str) -> None:
    with pytest.raises(MutationError, match=re.escape(message)):
        mutate.main(words)


def test_the_list_names_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.main(["--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [one.name for one in MUTATIONS]
    assert mutate.main(["--list", "--backend", "megatron"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [one.name for one in TABLES["megatron"]]

"""Tests of how a checkpoint is made: of which moment, in the background, without the optimizer; and taken in part."""

import os
from pathlib import Path

from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.damage import files_of
from drivetrain_backend_api.testing.judge import Action, Judge, act
from drivetrain_backend_api.testing.judging_state import FIRST, OPTIONS, SECOND, check_growth, check_refusal
from drivetrain_backend_api.testing.layouts import Layout

NEXT = act("train", "next", rollout=SECOND, rollout_id=1)
ENDING = (NEXT, act("export", dtype="float32"))


class SavesTests:
    """Saves in the foreground and in the background, weights alone."""

    def test_a_save_is_of_the_moment_it_began(self, judge: Judge, layout: Layout) -> None:
        """Training and sleep while a save is on its way to storage do not change what was saved.

        Where saves in the background are claimed, the storage keeps the save waiting for as long as training lasts; so
        such a save calls os.fsync, as what is to last must.
        """
        folder = str(judge.folder / f"background-{layout.label}")
        first, behind = act("train", rollout=FIRST), judge.capabilities.async_save
        save, sleep = act("save", folder=folder, between=[NEXT, act("sleep"), act("wake")]), [act("sleep"), act("wake")]
        if behind:
            save = act("save_behind", "save", name=judge.spec.name, folder=folder, between=[NEXT], then=sleep)
        options = {**OPTIONS, "async_save": behind}
        saved = judge.play(layout, [act("setup"), first, save], options=options)
        resumed = judge.play(layout, [act("setup"), *ENDING], options={**options, "load": folder})
        plain = judge.play(
            layout, [act("setup"), first, *ENDING], once=True, model=judge.model("qwen3"), options=OPTIONS
        )
        with judge.check(layout.label) as check:
            for rank, (one, other) in enumerate(zip(resumed, plain)):
                names = comparing.different(one["export"], other["export"])
                check.same(f"weights trained on from it on rank {rank}", names)
                metrics = comparing.different(one["next"]["metrics"], other["next"]["metrics"])
                check.same(f"metrics on rank {rank}", metrics)
            for rank, one in enumerate(saved if behind else ()):
                before, after = one["save"]["before"], one["save"]["after"]
                early = not before["poll"] and bool(before["findings"])
                check.true(f"training goes on before it is written on rank {rank}", early, before)
                whole = after["poll"] and not after["findings"]
                check.true(f"it is whole when that is said on rank {rank}", whole, after)

    def test_a_background_save_is_never_lost(self, judge: Judge, layout: Layout, background: str) -> None:
        """A failure is raised on all ranks; another save, and the end, wait for it; the host's memory does not grow."""
        root = judge.folder / f"{background}-{layout.label}"
        twice, left = [str(root / one) for one in ("first", "second")], root / "left"
        actions: list[Action] = [
            act("setup"),
            act("train", rollout=FIRST),
            act("failing_save", folder=str(root / "failing")),
            act("save_twice", name=judge.spec.name, folders=twice),
            act("save_often", folder=str(root / "often"), times=11),
            act("train", "next", rollout=SECOND, rollout_id=1),
            act("leave_a_save", folder=str(left)),
            act("close"),
        ]
        results = judge.play(layout, actions, options={**OPTIONS, "async_save": True})
        findings = judge.spec.load_check_checkpoint()(left, world_size=layout.ranks)
        with judge.check(layout.label) as check:
            for rank, one in enumerate(results):
                failed, second = one["failing_save"], one["save_twice"]
                for call in ("poll", "finalize"):
                    told = bool(failed[call]["kind"]) and str(root / "failing") in failed[call]["message"]
                    check.true(f"{call} raises on rank {rank} that a rank cannot write", told, failed[call])
                same = failed == results[0]["failing_save"]
                check.true(f"what is raised on rank {rank} is what all raise", same, failed)
                whole = second["poll"] and not second["findings"]
                check.true(f"a second save waits for the first on rank {rank}", whole, second)
                check_growth(check, one["save_often"], rank)
            check.true("close waits for a save", not findings, findings)

    def test_weights_alone_begin_a_new_run(self, judge: Judge, layout: Layout) -> None:
        """A checkpoint without the optimizer is smaller and resumes nothing; its weights begin a new run.

        So do those of a whole checkpoint, and nothing else of it is taken: the two new runs are the same.
        """
        bare, whole = (judge.folder / f"{one}-{layout.label}" for one in ("without-moments", "with-moments"))
        first = act("train", rollout=FIRST)
        saving = [act("setup"), act("random_state"), first, act("draw_random")]
        saved, _ = (
            judge.play(
                layout,
                [*saving, act("save", folder=str(folder)), act("export", dtype="float32")],
                options={**OPTIONS, "no_save_optim": folder is bare},
            )
            for folder in (bare, whole)
        )
        begun, other = (
            judge.play(
                layout,
                [act("setup"), act("random_state"), act("export", "initial", dtype="float32"), first, ENDING[1]],
                options={**OPTIONS, "load": str(folder), "finetune": True},
            )
            for folder in (bare, whole)
        )
        with judge.check(layout.label) as check:
            sizes = [_bytes_of(one) for one in (bare, whole)]
            check.true("it is smaller without the optimizer", sizes[0] < sizes[1], sizes)
            flags = ("--no-save-optim", "--finetune")
            said = f"{' and '.join(flags)} are named where it is to be resumed"
            check_refusal(check, judge, layout, bare, said, *flags, options=OPTIONS)
            for rank, (one, before) in enumerate(zip(begun, saved)):
                found = one["setup"]["next_rollout_id"]
                check.true(f"the next rollout id on rank {rank} is 0", found == 0, found)
                check.same(f"weights on rank {rank}", comparing.different(one["initial"], before["export"]))
                state = comparing.different(one["random_state"], before["random_state"])
                check.same(f"random state on rank {rank} as of a fresh start", state)
                rates = [[step["lr"] for step in run["train"]["metrics"]] for run in (one, before)]
                check.true(f"learning rates on rank {rank} as of a fresh start", rates[0] == rates[1], rates)
                names = comparing.different(one, other[rank])
                check.same(f"a run begun with a whole checkpoint's weights on rank {rank}", names)


def _bytes_of(folder: Path) -> int:
    return sum(os.path.getsize(folder / one) for one in files_of(folder))

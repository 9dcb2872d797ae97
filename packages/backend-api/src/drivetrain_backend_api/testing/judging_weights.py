"""Tests of weights on their way out: the plan, the buckets, the holders, the names."""

from typing import Any

from safetensors import safe_open

from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.judge import Check, Judge, act
from drivetrain_backend_api.testing.layouts import Layout

BUCKETS = {"one byte": 1, "four KiB": 4096, "one bucket": 2**30}


class WeightsTests:
    """Exports."""

    def test_an_export_is_what_save_pretrained_writes(self, judge: Judge, layout: Layout, exported: str) -> None:
        """Names, shapes, dtypes and values, through buckets of any size; tied weights once; no padding."""
        check_export(judge, layout, exported)

    def test_each_kind_of_holders_gets_the_data(self, judge: Judge, layout: Layout, holders: str) -> None:
        """Who asked for data has it all, who did not has only the plan, which all ranks know first and keep."""
        check_holders(judge, layout, holders, "qwen3")

    def test_an_export_that_one_rank_leaves_ends_on_all(self, judge: Judge, layout: Layout) -> None:
        """Nobody hangs, the others are told, and the next export and training work."""
        leaver = layout.ranks - 1
        actions = [
            act("setup"),
            act("export", "before", dtype="float32"),
            act("abandon_export", leaver=leaver),
            act("export", "after", dtype="float32"),
            act("train", rollout={"samples": 4}),
        ]
        results = judge.play(layout, actions)
        with judge.check(layout.label) as check:
            for rank, one in enumerate(results):
                expected = "left" if rank == leaver else "told"
                check.true(f"rank {rank} {expected}", one["abandon_export"] == expected, one["abandon_export"])
                check.same(f"the next export on rank {rank}", comparing.different(one["after"], one["before"]))


def check_export(judge: Judge, layout: Layout, exported: str) -> None:
    """Hold exports of a model, by its name, to its folder."""
    model = judge.model(exported, dtype="bfloat16", seed=3)
    actions = [act("export", name, bucket_bytes=size) for name, size in BUCKETS.items()]
    actions.append(act("export", "as float32", dtype="float32"))
    results = judge.play(layout, [act("setup"), *actions], model=model)
    with safe_open(model / "model.safetensors", framework="pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    with judge.check(f"{layout.label}, {exported}") as check:
        for name, size in BUCKETS.items():
            for rank, one in enumerate(results):
                found = one[name]["tensors"]
                same = comparing.different(found, expected)
                check.same(f"{name}: names, shapes, dtypes and values on rank {rank}", same)
            _check_plan(check, name, size, [one[name] for one in results])
        wide = {name: one.float() for name, one in expected.items()}
        check.same("as float32", comparing.different(results[0]["as float32"]["tensors"], wide))


def check_holders(judge: Judge, layout: Layout, holders: str, model: str) -> None:
    """Hold an export for some holders to one for all ranks; `model` is its name."""
    actions = [act("setup"), act("export", "all"), act("export", holders=holders)]
    results = judge.play(layout, actions, model=judge.model(model))
    whole: dict[str, Any] = {}
    with judge.check(f"{layout.label}, {holders}") as check:
        for rank, one in enumerate(results):
            found = one["export"]["tensors"]
            stages = {entry["stage"] for entry in one["export"]["plan"] if entry["name"] in found}
            leads = {"all": True, "rank0": rank == 0, "stage_lead": one["export"]["stage_lead"]}[holders]
            check.true(f"rank {rank} {'holds data' if leads else 'holds none'}", bool(found) == leads)
            if holders == "stage_lead":
                own = {one["setup"]["pp_rank"]} if leads else set()
                check.true(f"rank {rank} holds its own stage alone", stages == own, stages)
            whole |= found
            if holders == "all":
                check.same(f"weights of rank {rank}", comparing.different(found, results[0]["all"]["tensors"]))
        check.same("weights", comparing.different(whole, results[0]["all"]["tensors"]))
        _check_plan(check, holders, 4096, [one["export"] for one in results])


def _check_plan(check: Check, name: str, bucket_bytes: int, exports: list[dict[str, Any]]) -> None:
    first = exports[0]["plan"]
    check.true(f"{name}: the plan is the same on all ranks", all(one["plan"] == first for one in exports))
    check.true(f"{name}: the plan is kept", all(one["plan_kept"] for one in exports))
    names = [entry["name"] for entry in first]
    check.true(f"{name}: each weight is planned once", len(names) == len(set(names)), names)
    for rank, one in enumerate(exports):
        came = [entry for bucket in one["buckets"] for entry in bucket["entries"]]
        check.true(f"{name}: buckets come in plan order on rank {rank}", came == first)
        alone = [bucket for bucket in one["buckets"] if len(bucket["entries"]) > 1 and bucket["nbytes"] > bucket_bytes]
        check.true(f"{name}: no bucket is too large on rank {rank}", not alone, [one["index"] for one in alone])
        mixed = [one["index"] for one in one["buckets"] if len({entry["stage"] for entry in one["entries"]}) > 1]
        check.true(f"{name}: no bucket mixes stages on rank {rank}", not mixed, mixed)

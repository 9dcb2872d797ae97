"""How long training waits for a checkpoint that is written in the background, beside one that is not.

    python benchmarks/async_save.py --out DIR

Each backend saves in turns with and without --async-save, in the same processes, on the same model and disk; training
goes on while a background save is written. What is told is a ratio: the time that the caller of save_checkpoint is
blocked, with over without. Leaves async_save.json and async_save.md; exit code 1 says that a background save does not
block for less.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from drivetrain_backend_api.backend import TrainBackend
from drivetrain_backend_api.discovery import TRAIN_BACKENDS, load_spec
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_api.spec import BackendSpec
from drivetrain_backend_api.testing.algorithms import TokenMean
from drivetrain_backend_api.testing.ranks import free_port
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout

BACKENDS = ("fsdp", "megatron")
BLOCKED, WHOLE = "blocked", "whole"
"""Seconds until save_checkpoint returns, and until all is written."""

DEADLINE = 900.0
"""Seconds that the ranks of one backend get."""

Times = list[dict[str, float]]


# -- one rank ---------------------------------------------------------------------------------------------------------


def save_in_background(backend: TrainBackend, folder: Path, train: Callable[[], object]) -> dict[str, float]:
    begin = time.perf_counter()
    handle = backend.save_checkpoint(folder)
    blocked = time.perf_counter() - begin
    while not handle.poll():
        train()
    return {BLOCKED: blocked, WHOLE: time.perf_counter() - begin}


def save_in_foreground(backend: TrainBackend, folder: Path, train: Callable[[], object]) -> dict[str, float]:
    begin = time.perf_counter()
    backend.save_checkpoint(folder).finalize()
    seconds = time.perf_counter() - begin
    train()
    return {BLOCKED: seconds, WHOLE: seconds}


def run_rank(arguments: argparse.Namespace) -> None:
    """Save in turns, and leave each turn's times; the first save of a turn is not counted."""
    torch.set_num_threads(arguments.threads)
    spec = load_spec(TRAIN_BACKENDS, arguments.backend)
    assert isinstance(spec, BackendSpec)
    device = f"cuda:{arguments.rank}" if arguments.device == "cuda" else "cpu"
    found: dict[str, list[Times]] = {"async": [], "sync": []}
    staging = 0
    for turn, port in enumerate(arguments.ports):
        kind = ("sync", "async")[turn % 2]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        options = {"hf_checkpoint": str(arguments.work / "model"), "async_save": kind == "async", "lr": 1e-5}
        precision = {"bf16" if arguments.device == "cuda" else "fp32": True}
        config = spec.config_class(**options, **precision)
        with spec.load()(config, Role.POLICY, arguments.rank, arguments.ranks, device) as backend:
            backend.setup()
            shard = backend.preprocess_rollout_data(draw_rollout(RolloutSpec(samples=4, seed=turn)))

            def train(backend: TrainBackend = backend, shard: Any = shard) -> None:
                backend.train(0, shard, TokenMean())

            train()  # the first step is slower
            save = save_in_background if kind == "async" else save_in_foreground
            times: Times = []
            for number in range(arguments.saves + 1):
                folder = arguments.work / f"{kind}-{number}"
                if arguments.rank == 0:
                    folder.mkdir()
                if backend.groups.control is not None:
                    torch.distributed.barrier(group=backend.groups.control)
                times.append(save(backend, folder, train))
                if arguments.rank == 0:
                    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
                    shutil.rmtree(folder)
            found[kind].append(times[1:])
            staging = max(staging, backend._saver.staging_bytes)  # type: ignore[attr-defined]
    result = {"times": found, "staging_bytes": staging, "checkpoint_bytes": size if arguments.rank == 0 else 0}
    (arguments.work / f"rank{arguments.rank}.json").write_text(json.dumps(result))


# -- all ranks --------------------------------------------------------------------------------------------------------


def measure(backend: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the ranks of one backend; times are those of the slowest rank of each save."""
    ports = [str(free_port()) for _ in range(2 * arguments.turns)]
    command = [sys.executable, __file__, "--backend", backend, "--work", str(work), "--ports", *ports]
    for name in ("device", "ranks", "saves", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    children = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(arguments.ranks)]
    end = time.monotonic() + DEADLINE
    try:
        while any(one.poll() is None for one in children) and time.monotonic() < end:
            if any(one.poll() for one in children):
                break
            time.sleep(0.1)
        codes = [one.poll() for one in children]
    finally:
        for one in children:
            if one.poll() is None:
                one.kill()
            one.wait()
    if any(codes):
        raise SystemExit(f"{backend}: the ranks ended with {codes}; see above")
    if None in codes:
        raise SystemExit(f"{backend}: no end within {DEADLINE:.0f} s")
    ranks = [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(arguments.ranks)]

    def turns(kind: str, what: str) -> list[float]:
        """Median of each turn."""
        return [
            statistics.median(
                max(one[what] for one in saves) for saves in zip(*(rank["times"][kind][turn] for rank in ranks))
            )
            for turn in range(arguments.turns)
        ]

    blocked = {kind: turns(kind, BLOCKED) for kind in ("async", "sync")}
    ratios = [one / other for one, other in zip(blocked["async"], blocked["sync"])]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "blocked": blocked,
        "whole": turns("async", WHOLE),
        "checkpoint_bytes": ranks[0]["checkpoint_bytes"],
        "staging_bytes": [one["staging_bytes"] for one in ranks],
    }


def save_model(folder: Path, arguments: argparse.Namespace) -> int:
    """Save a random model of Qwen3's shape in bf16; returns its number of parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(one.numel() for one in model.parameters())


# -- report -----------------------------------------------------------------------------------------------------------


def facts(arguments: argparse.Namespace, command: str) -> dict[str, str]:
    names = [
        one
        for one in ("torch", "transformers", "megatron-core")
        if one != "megatron-core" or "megatron" in arguments.backends
    ]
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else "none"
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}",
        "card": card,
        "load average before": f"{os.getloadavg()[0]:.1f}",
        "versions": f"{', '.join(f'{one} {version(one)}' for one in names)}, Python {platform.python_version()}",
        "command": f"`{command}`",
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(one)} |" for one in (header, ["---"] * len(header), *rows))


def markdown(report: Mapping[str, Any]) -> str:
    rows = []
    for backend, one in report["found"].items():
        spread = f"{min(one['ratios']):.3f} to {max(one['ratios']):.3f}"
        seconds = [statistics.median(each) for each in (one["blocked"]["async"], one["blocked"]["sync"], one["whole"])]
        mib = [one["checkpoint_bytes"] / 2**20, max(one["staging_bytes"]) / 2**20]
        rows.append(
            [
                backend,
                f"{one['ratio']:.3f}",
                spread,
                *(f"{each:.3f}" for each in seconds),
                *(f"{each:.0f}" for each in mib),
            ]
        )
    return (
        "\n\n".join(
            [
                "# Time that training waits for a checkpoint",
                "\n".join(f"- {name}: {one}" for name, one in report["facts"].items()),
                f"A random model of Qwen3's shape, {report['parameters'] / 1e6:.0f} million parameters, on "
                f"{report['ranks']} data-parallel ranks. {report['turns']} turns of {report['saves']} saves each with "
                "and without `--async-save`, alternating; training goes on while a background save is written, on the "
                "same CPUs. The ratio is the time that `save_checkpoint` blocks its caller, with `--async-save` over "
                "without; median and range over the turns. Times are of the slowest rank, medians, in seconds.",
                table(
                    [
                        "",
                        "ratio",
                        "range",
                        "blocked, async",
                        "blocked, sync",
                        "until written, async",
                        "checkpoint, MiB",
                        "host copies a rank, MiB",
                    ],
                    rows,
                ),
            ]
        )
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5, help="with and without, each")
    parser.add_argument("--saves", type=int, default=3, help="saves of a turn that are counted")
    parser.add_argument("--threads", type=int, default=1, help="of each rank's computation")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--disk", type=Path, help="folder to save into (default: a temporary one)")
    # of one rank, by the command itself
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ports", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return 0
    command = " ".join(["python", "benchmarks/async_save.py", *sys.argv[1:]]).replace(str(arguments.out), "DIR")
    report: dict[str, Any] = {
        "facts": facts(arguments, command),
        **{name: getattr(arguments, name) for name in ("ranks", "turns", "saves")},
        "found": {},
    }
    with tempfile.TemporaryDirectory(dir=arguments.disk) as root:
        report["parameters"] = save_model(Path(root) / "model", arguments)
        for backend in arguments.backends:
            report["found"][backend] = measure(backend, arguments, Path(root))
    (arguments.out / "async_save.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "async_save.md").write_text(markdown(report))
    print(markdown(report))
    slow = [name for name, one in report["found"].items() if not one["ratio"] < 1]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())

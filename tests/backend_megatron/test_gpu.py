"""The backend on one GPU, and on two over NCCL: numbers, memory, sleep. Results are kept under benchmarks/.

Run as a program, this file imports Megatron once and forks fresh ranks for every job that a test sends it.
"""

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from drivetrain_backend_api.parallel import Role
from drivetrain_backend_api.testing import actions, comparing
from drivetrain_backend_api.testing.cases import BASE, packed
from drivetrain_backend_api.testing.judge import act
from drivetrain_backend_api.testing.layouts import Layout
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.ranks import free_port
from drivetrain_backend_api.testing.reference import Trained, reference_train
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout
from drivetrain_backend_api.testing.tolerances import LOW_PRECISION_UPDATE
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.spec import SPEC, worker_env

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROLLOUT = {"samples": 8}
NEXT_ROLLOUT = {"samples": 8, "seed": 2}
START_DEADLINE, JOB_DEADLINE = 240.0, 60.0
FP32 = 1e-4
"""fp32 matmuls without TF32, summed in another order than the CPU's."""

Options = Mapping[str, Any]


# -- what one rank does -----------------------------------------------------------------------------------------------


class Rank:
    """Makes this rank's backends, on a GPU of its own and on a port of their own."""

    def __init__(self, rank: int, ranks: int, ports: Iterator[int]) -> None:
        self.rank, self.ranks, self.ports = rank, ranks, ports

    def backend(self, options: Options) -> Any:
        """A backend that is not set up."""
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(next(self.ports)))
        return SPEC.load()(MegatronConfig(**options), Role.POLICY, self.rank, self.ranks, f"cuda:{self.rank}")


def train(rank: Rank, options: Options) -> dict[str, Any]:
    """Train on one rollout; also what kept the optimizer's state, and where."""
    with rank.backend(options) as backend:
        backend.setup()
        found = {
            "log_probs": actions.log_probs(backend, ROLLOUT),
            "metrics": actions.train(backend, ROLLOUT)["metrics"],
            "tensors": actions.export(backend, dtype="float32")["tensors"],
        }
        state = backend.optimizer.state()
        kinds = {name.partition(".")[0]: one for name, one in state.items()}
        kept = {kind: [one.device.type, one.is_pinned(), str(one.dtype)] for kind, one in kinds.items()}
        return found | {"state": state, "kept": kept, "kernel": str(backend._model.kernel)}


def untrained_export(rank: Rank, options: Options) -> dict[str, Any]:
    """The first export, in the dtypes of the files, in buckets that hold several tensors and less than one."""
    with rank.backend(options) as backend:
        backend.setup()
        found = [actions.export(backend, bucket_bytes=one)["tensors"] for one in (1 << 22, 1)]
        devices = {str(one.device) for tensors in found for one in tensors.values()}
    return {"tensors": found, "devices": sorted(devices)}


def sleep(rank: Rank, options: Options, cycles: int) -> dict[str, Any]:
    """Train, sleep and wake so many times, train on; the memory of each state, and all that came back changed."""
    memory: list[dict[str, Any]] = []
    changed: list[str] = []
    outlived = 0
    with rank.backend(options) as backend:
        backend.setup()
        actions.train(backend, ROLLOUT)
        state = snapshot(backend)
        for _ in range(cycles):
            groups = [weakref.ref(one._inner) for one in backend._all_groups.handles]
            seen = {"awake": used()}
            backend.sleep(keep_weights=True)
            seen["weights only"] = used()
            changed += comparing.different(weights(backend), state["weights"])
            backend.sleep()
            seen["asleep"] = used()
            outlived += sum(one() is not None for one in groups)
            backend.wake_up(weights_only=True)
            changed += comparing.different(weights(backend), state["weights"])
            backend.wake_up()
            changed += comparing.different(snapshot(backend), state)
            memory.append(seen)
        actions.train(backend, NEXT_ROLLOUT, rollout_id=1)
        return {"memory": memory, "changed": changed, "outlived": outlived, "tensors": weights(backend)}


def checkpoint(rank: Rank, options: Options, folder: str, other: Options) -> dict[str, Any]:
    """Save between two rollouts; what training on comes to, at once and from the files, and the weights elsewhere."""
    with rank.backend(options) as backend:
        backend.setup()
        actions.train(backend, ROLLOUT)
        saved = weights(backend)
        actions.save(backend, folder, between=[act("train", rollout=NEXT_ROLLOUT, rollout_id=1)])
        straight = snapshot(backend)
    with rank.backend({**options, "load": folder}) as backend:
        first = backend.setup()
        loaded = weights(backend)
        actions.train(backend, NEXT_ROLLOUT, rollout_id=1)
        changed = comparing.different(snapshot(backend), straight)
    with rank.backend({**options, **other, "load": folder}) as backend:
        backend.setup()
        elsewhere = weights(backend)
    return {
        "next": first,
        "changed": changed,
        "loaded": comparing.different(loaded, saved),
        "elsewhere": comparing.different(elsewhere, saved),
    }


def weights(backend: Any) -> dict[str, Tensor]:
    return cpu(actions.export(backend, bucket_bytes=1 << 24)["tensors"])


def snapshot(backend: Any) -> dict[str, Any]:
    return {"weights": weights(backend), "optimizer": cpu(backend.optimizer.state())}


def cpu(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().cpu().clone()
    if isinstance(found, Mapping):
        return {name: cpu(one) for name, one in found.items()}
    return [cpu(one) for one in found] if isinstance(found, list | tuple) else found


def used() -> dict[str, int]:
    """Bytes: of live tensors here, of torch's blocks here, and free on the whole device."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # of the library, in torch's blocks
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return {"live": torch.cuda.memory_allocated(), "blocks": torch.cuda.memory_reserved(), "free": free}


SCENARIOS: dict[str, Callable[..., Any]] = {one.__name__: one for one in (train, untrained_export, sleep, checkpoint)}


# -- the program ------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer one JSON job a line, {"scenario", "arguments", "ranks", "ports", "folder"}, with the ranks' exit codes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    torch.set_num_threads(1)
    SPEC.load()
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - once, not in each rank

    if torch.cuda.is_initialized():
        raise RuntimeError("something initialised CUDA before the ranks were forked")
    gc.freeze()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(run_job(json.loads(line))) + "\n")
        answers.flush()


def run_job(job: Mapping[str, Any]) -> list[int | None]:
    children = [fork(job, rank) for rank in range(job["ranks"])]
    codes: dict[int, int] = {}
    end = time.monotonic() + JOB_DEADLINE
    while len(codes) < len(children) and time.monotonic() < end:
        for child in children:
            gone, status = os.waitpid(child, os.WNOHANG) if child not in codes else (0, 0)
            if gone:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, time.monotonic() + 5)
        time.sleep(0.01)
    left = [child for child in children if child not in codes]
    for child in left:
        os.kill(child, signal.SIGUSR1)  # it writes where it is
    time.sleep(0.5 if left else 0.0)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [codes.get(child) for child in children]


def fork(job: Mapping[str, Any], rank: int) -> int:
    if child := os.fork():
        return child
    folder, code = Path(job["folder"]), 1
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    try:
        torch.cuda.set_device(rank)
        found = SCENARIOS[job["scenario"]](Rank(rank, job["ranks"], iter(job["ports"])), **job["arguments"])
        torch.save(cpu(found), folder / f"{rank}.pt")
        code = 0
    except BaseException:  # whatever it is, the test shows it
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


class Server:
    """The program, as the tests see it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.jobs = folder, 0
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # whether there are GPUs is asked without a CUDA context, which ranks could not inherit
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environment},
            )
        self.answer(START_DEADLINE)

    def answer(self, deadline: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline)
        line = self.process.stdout.readline() if ready else ""
        log = (self.folder / "log").read_text(errors="replace")[-4000:]
        assert line, f"no answer within {deadline:.0f} s, or the program ended:\n{log}"
        return line

    def run(self, scenario: str, *, ranks: int = 1, **arguments: Any) -> list[dict[str, Any]]:
        """Play a scenario; returns each rank's findings."""
        try:
            return self._run(scenario, ranks, arguments)
        except AssertionError as error:
            if "EADDRINUSE" not in str(error):
                raise
        return self._run(scenario, ranks, arguments)  # somebody took a port first

    def _run(self, scenario: str, ranks: int, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        self.jobs += 1
        folder = self.folder / f"job{self.jobs}"
        folder.mkdir()
        job = {"scenario": scenario, "arguments": dict(arguments), "ranks": ranks, "folder": str(folder)}
        self.process.stdin.write(json.dumps(job | {"ports": [free_port() for _ in range(3)]}) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.answer(JOB_DEADLINE + 60))
        said = sorted([*folder.glob("*.error"), *folder.glob("*.stack")])
        errors = [f"--- rank {one.stem}\n{text[-3000:]}" for one in said if (text := one.read_text())]
        log = (self.folder / "log").read_text(errors="replace")[-1500:]
        assert codes == [0] * ranks, "\n".join([f"{scenario}: exit codes {codes}", *errors, log])
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]

    def stop(self) -> None:
        """End the program; its ranks have ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


# -- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not torch.cuda.device_count():
        pytest.skip("needs a GPU")
    found = Server(tmp_path_factory.mktemp("server"), {})
    yield found
    found.stop()


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def bf16_model(folder: Path, *, hidden: int, vocabulary: int) -> Path:
    """A random model whose head size the fused kernel takes, stored in fp32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "fp32": make_model(root / "fp32", "qwen3"),
        "bf16": bf16_model(root / "bf16", hidden=128, vocabulary=67),
        # so large that what it takes stands out from what libraries take
        "large": bf16_model(root / "large", hidden=512, vocabulary=8192),
    }


def options_of(models: Mapping[str, Path], model: str, **others: Any) -> dict[str, Any]:
    precision = "fp32" if model == "fp32" else "bf16"
    settings = {"hf_checkpoint": str(models[model]), precision: True, "global_batch_size": 4}
    return {**BASE, **packed(40), **settings, **others}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, Trained]:
    """What plain transformers and torch make of each model, in fp32."""
    rollout = draw_rollout(RolloutSpec(**ROLLOUT))
    return {
        model: reference_train(
            models[model], rollout, MegatronConfig(**options_of(models, model)), algorithm="TokenMean"
        )
        for model in ("fp32", "bf16")
    }


def assert_fp32(results: Sequence[Mapping[str, Any]], expected: Trained) -> None:
    """Log-probs before, loss, gradient norm and weights after two steps, of every rank."""
    before, unequal = comparing.merged_log_probs([one["log_probs"] for one in results])
    assert unequal == []
    assert comparing.values(before, expected.before) < FP32
    for one in results:
        assert [step["loss"] for step in one["metrics"]] == pytest.approx(expected.losses, rel=FP32, abs=1e-6)
        assert [step["grad_norm"] for step in one["metrics"]] == pytest.approx(expected.grad_norms, rel=FP32)
        assert comparing.tensors(one["tensors"], expected.weights) < FP32


def assert_bf16(results: Sequence[Mapping[str, Any]], expected: Trained) -> None:
    """As far from the fp32 reference as 8 bits of each activation bring it; log-probs are of the order of 4."""
    before, unequal = comparing.merged_log_probs([one["log_probs"] for one in results])
    assert unequal == []
    assert before.keys() == expected.before.keys()
    for sample, found in before.items():
        torch.testing.assert_close(found, expected.before[sample], atol=0.05, rtol=0)
    for one in results:
        assert [step["grad_norm"] for step in one["metrics"]] == pytest.approx(expected.grad_norms, rel=0.03)


# -- one GPU ----------------------------------------------------------------------------------------------------------

ON_ONE = [one for one in SPEC.neutral_options if "num_layers_per_virtual_pipeline_stage" not in one]


@pytest.mark.parametrize(
    "others", [{}, {"optimizer_cpu_offload": True}, *ON_ONE], ids=lambda one: ",".join(one) or "plain"
)
def test_fp32_equals_the_reference(
    server: Server, models: dict[str, Path], expected: dict[str, Trained], others: Options
) -> None:
    results = server.run("train", options=options_of(models, "fp32", **others))
    assert_fp32(results, expected["fp32"])


@pytest.mark.parametrize("kernel", ["varlen", "per_sequence"])
def test_bf16_is_close_to_the_fp32_reference(
    server: Server, models: dict[str, Path], expected: dict[str, Trained], kernel: str
) -> None:
    results = server.run("train", options=options_of(models, "bf16", attention_backend=kernel))
    assert results[0]["kernel"] == kernel
    assert_bf16(results, expected["bf16"])


def test_offloaded_optimizer_state_is_pinned_on_the_host_and_steps_alike(
    server: Server, models: dict[str, Path]
) -> None:
    one_step = options_of(models, "bf16", global_batch_size=8)
    (here,) = server.run("train", options=one_step)
    (there,) = server.run("train", options={**one_step, "optimizer_cpu_offload": True})
    kinds = ("main", "exp_avg", "exp_avg_sq")
    assert here["kept"] == {kind: ["cuda", False, "torch.float32"] for kind in kinds}
    assert there["kept"] == {kind: ["cpu", True, "torch.float32"] for kind in kinds}
    # the same gradients; the CPU's kernel rounds in another order than the GPU's
    assert comparing.tensors(there["state"], here["state"]) < 1e-5


@pytest.mark.parametrize("offload", [False, True])
def test_optimizer_state_is_kept_in_the_dtypes_asked_for(
    server: Server, models: dict[str, Path], expected: dict[str, Trained], offload: bool
) -> None:
    dtypes = {"main_params_dtype": "fp16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    others = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": offload, **dtypes}
    (found,) = server.run("train", options=options_of(models, "bf16", **others))
    place = ["cpu", True] if offload else ["cuda", False]
    assert found["kept"] == {
        "main": [*place, "torch.float16"],
        "exp_avg": [*place, "torch.bfloat16"],
        "exp_avg_sq": [*place, "torch.bfloat16"],
    }
    off = comparing.updates(found["tensors"], expected["bf16"].weights, expected["bf16"].initial)
    assert off < LOW_PRECISION_UPDATE["bf16"].value


def test_an_export_lies_on_the_gpu_and_is_the_folder_bit_for_bit(server: Server, models: dict[str, Path]) -> None:
    options = {**options_of(models, "fp32"), "make_vocab_size_divisible_by": 32}
    (found,) = server.run("untrained_export", options=options)
    stored = AutoModelForCausalLM.from_pretrained(models["fp32"])
    whole = {name: one.detach() for name, one in stored.named_parameters()}
    assert [comparing.different(one, whole) for one in found["tensors"]] == [[], []]
    assert found["devices"] == ["cuda:0"]


def assert_slept(results: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]]) -> None:
    """Nothing changed, no group outlived its destruction, live memory went, and training goes on as if nothing was."""
    for one, other in zip(results, undisturbed, strict=True):
        assert one["changed"] == []
        assert one["outlived"] == 0
        assert comparing.different(one["tensors"], other["tensors"]) == []
        for seen in one["memory"]:
            assert seen["asleep"]["live"] < 2**20  # what is left are a few scalars and tables
            assert seen["asleep"]["live"] < seen["weights only"]["live"] < seen["awake"]["live"]
        awake = [seen["awake"]["live"] for seen in one["memory"]]
        assert awake[1:] == awake[1:2] * len(awake[1:]), awake  # nothing piles up
        assert max(awake, default=0) == max(awake[:1], default=0), awake


def test_sleep_gives_device_memory_back_and_wakes_bitwise(server: Server, models: dict[str, Path]) -> None:
    options = options_of(models, "large")
    results = server.run("sleep", options=options, cycles=3)
    print(json.dumps([one["memory"] for one in results]))
    assert_slept(results, server.run("sleep", options=options, cycles=0))
    parameters = sum(one.numel() for one in results[0]["tensors"].values())
    for seen in results[0]["memory"]:
        # bf16 weights; fp32 gradients, masters and Adam's moments
        assert seen["awake"]["live"] >= (2 + 4 + 12) * parameters
        assert 2 * parameters <= seen["weights only"]["live"] < 3 * parameters
        assert seen["asleep"]["free"] - seen["awake"]["free"] >= 17 * parameters


def test_state_on_the_host_stays_there_through_sleep(server: Server, models: dict[str, Path]) -> None:
    options = options_of(models, "large", optimizer_cpu_offload=True)
    results = server.run("sleep", options=options, cycles=2)
    assert_slept(results, server.run("sleep", options=options, cycles=0))


def test_the_tier_of_process_groups_keeps_all_tensors(server: Server, models: dict[str, Path]) -> None:
    options = options_of(models, "large", sleep_tier="process_groups")
    (found,) = server.run("sleep", options=options, cycles=2)
    (undisturbed,) = server.run("sleep", options=options, cycles=0)
    assert (found["changed"], found["outlived"]) == ([], 0)
    assert comparing.different(found["tensors"], undisturbed["tensors"]) == []
    assert all(seen["asleep"]["live"] == seen["awake"]["live"] for seen in found["memory"])


@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_resumes_bitwise(
    server: Server, models: dict[str, Path], tmp_path: Path, precision: str, in_background: bool
) -> None:
    options = options_of(models, precision, async_save=in_background)
    (found,) = server.run("checkpoint", options=options, folder=str(tmp_path / "saved"), other={})
    assert found == {"next": 1, "changed": [], "loaded": [], "elsewhere": []}


@pytest.fixture(scope="module")
def memory_saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not torch.cuda.device_count():
        pytest.skip("needs a GPU")
    pytest.importorskip("torch_memory_saver", reason="needs torch-memory-saver")
    environment = worker_env(MegatronConfig(hf_checkpoint="none", sleep_tier="memory_saver"))
    found = Server(tmp_path_factory.mktemp("memory_saver"), environment)
    yield found
    found.stop()


def assert_unmapped(results: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]]) -> None:
    """torch's blocks keep their addresses, and the device has their memory all the same."""
    for one, other in zip(results, undisturbed, strict=True):
        assert (one["changed"], one["outlived"]) == ([], 0)
        assert comparing.different(one["tensors"], other["tensors"]) == []
        for seen in one["memory"]:
            assert seen["asleep"]["free"] - seen["awake"]["free"] >= 0.95 * seen["awake"]["live"]


def test_memory_saver_unmaps_device_memory_and_brings_it_back_bitwise(
    memory_saver: Server, models: dict[str, Path]
) -> None:
    options = options_of(models, "large", sleep_tier="memory_saver")
    results = memory_saver.run("sleep", options=options, cycles=3)
    print(json.dumps([one["memory"] for one in results]))
    assert_unmapped(results, memory_saver.run("sleep", options=options, cycles=0))


# -- two GPUs ---------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    one.label: one.options for one in (Layout(dp=2), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2))
} | {
    "dp2-overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "pp2-interleaved": Layout(pp=2).options | {"num_layers_per_virtual_pipeline_stage": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_train_as_one(
    server: Server, models: dict[str, Path], expected: dict[str, Trained], layout: str, precision: str, two_gpus: None
) -> None:
    results = server.run("train", ranks=2, options=options_of(models, precision, **LAYOUTS[layout]))
    (assert_fp32 if precision == "fp32" else assert_bf16)(results, expected[precision])
    assert comparing.different(results[0]["tensors"], results[1]["tensors"]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sleep_destroys_nccl_groups_and_wakes_bitwise(
    server: Server, models: dict[str, Path], layout: str, two_gpus: None
) -> None:
    options = options_of(models, "large", **LAYOUTS[layout])
    results = server.run("sleep", ranks=2, options=options, cycles=3)
    print(json.dumps([one["memory"] for one in results]))
    assert_slept(results, server.run("sleep", ranks=2, options=options, cycles=0))
    for one in results:
        first = one["memory"][0]
        # what the device has more than torch's blocks came back from communicators; they are made anew when first used,
        # which not every layout does between two cycles
        back = first["asleep"]["free"] - first["weights only"]["free"]
        assert back > first["weights only"]["blocks"] - first["asleep"]["blocks"]
        asleep = [seen["asleep"]["free"] for seen in one["memory"]]
        assert min(asleep[1:]) >= asleep[0] - 2**22, asleep  # nothing piles up


@pytest.mark.parametrize(("layout", "other"), [("dp2", "tp2-sp"), ("tp2-sp", "pp2"), ("pp2", "cp2")])
def test_a_checkpoint_of_two_gpus_resumes_bitwise_and_loads_elsewhere(
    server: Server, models: dict[str, Path], tmp_path: Path, layout: str, other: str, two_gpus: None
) -> None:
    plain = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "pipeline_model_parallel_size": 1}
    results = server.run(
        "checkpoint",
        ranks=2,
        options=options_of(models, "bf16", **LAYOUTS[layout]),
        folder=str(tmp_path / "saved"),
        other=plain | LAYOUTS[other],
    )
    assert results == [{"next": 1, "changed": [], "loaded": [], "elsewhere": []}] * 2


def test_memory_saver_on_two_gpus(memory_saver: Server, models: dict[str, Path], two_gpus: None) -> None:
    options = options_of(models, "large", sleep_tier="memory_saver", **LAYOUTS["tp2-sp"])
    results = memory_saver.run("sleep", ranks=2, options=options, cycles=2)
    print(json.dumps([one["memory"] for one in results]))
    assert_unmapped(results, memory_saver.run("sleep", ranks=2, options=options, cycles=0))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve()

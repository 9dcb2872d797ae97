"""Ranks for the tests of checkpoints: `checkpoint_ranks.py FOLDER` runs the jobs of `jobs.json` in it, one by one.

One process imports everything once and forks the ranks of each job. A rank leaves what it found in `NAME.rankN.json`.
What each tensor must hold follows from its name alone, so that any layout is compared with the same whole model.
"""

import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from checkpoint_values import KINDS, NEXT_ROLLOUT, STEPS, hf_values

import drivetrain_backend_megatron.core  # noqa: F401 - patches what Megatron must be imported with

# isort: split
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from drivetrain_backend_api.errors import DrivetrainError
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_megatron.architectures import ModelShape
from drivetrain_backend_megatron.backend import MegatronBackend
from drivetrain_backend_megatron.checkpoint import load_checkpoint, load_weights, save_checkpoint
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.core.model import named_parameters, transformer_config
from drivetrain_backend_megatron.name_map import place_of, to_local

DEADLINE = 100.0


def expected(kind: str, name: str, backend: MegatronBackend) -> Tensor:
    """What a tensor-parallel rank's whole parameter, or an optimizer's copy of it, must hold; float32."""
    part = backend._model
    place = place_of(name, part.shape)
    return to_local(
        [hf_values(kind, hf, size) for hf, size in place.hf],
        place.rule,
        part.shape,
        tp_size=part.layout.tp_size,
        tp_rank=part.layout.tp_rank,
        padded_vocab=part.padded_vocab,
    )


def fill(backend: MegatronBackend) -> None:
    for name, own in backend._model.owned_slices().items():
        for kind in KINDS:
            flat = expected(kind, name, backend).flatten()
            backend.optimizer.slice_state(name)[kind].copy_(flat[own.start : own.start + len(own.weight)])
    backend.optimizer.give_weights()
    backend.optimizer.steps = STEPS


def differences(backend: MegatronBackend, *, weights_only: bool, stored: torch.dtype) -> list[str]:
    """Name every tensor that is not, bit for bit, what it must be.

    Args:
        weights_only: masters are the weights as stored, moments are zero.
        stored: dtype of the weights in the checkpoint; those of the optimizer are float32.
    """
    found = []
    for name, weight in backend._model.locals().items():
        whole = expected("main", name, backend)
        whole = whole.to(stored) if weights_only else whole
        if not torch.equal(weight, whole.to(weight.dtype)):
            found.append(f"weight {name}")
    for name, own in backend._model.owned_slices().items():
        for kind in KINDS:
            flat = expected(kind, name, backend).flatten()[own.start : own.start + len(own.weight)]
            if weights_only:
                flat = flat.to(stored) if kind == "main" else torch.zeros_like(flat)
            live = backend.optimizer.slice_state(name)[kind]
            if not torch.equal(live, flat.to(live.dtype)):
                found.append(f"{kind} {name}")
    return found


def save(backend: MegatronBackend, job: dict[str, Any]) -> dict[str, Any]:
    fill(backend)
    torch.manual_seed(100 + backend.rank)
    save_checkpoint(
        Path(job["folder"]),
        backend._model,
        backend.optimizer,
        backend._scaler,
        backend._saver,
        next_rollout_id=NEXT_ROLLOUT,
    ).finalize()
    return {}


def load(backend: MegatronBackend, job: dict[str, Any]) -> dict[str, Any]:
    if "damage" in job:
        damage(backend, job)
    torch.manual_seed(1)
    try:
        rollout = load_checkpoint(
            Path(job["folder"]),
            backend._model,
            backend.optimizer,
            backend._scaler,
            device=backend.device,
            control=backend.groups.control,
            weights_only=job.get("finetune", False),
            verify=True,
        )
    except DrivetrainError as error:
        return {"error": str(error)}
    drawn = torch.rand(2)
    seeds = {seed: torch.rand(2, generator=torch.Generator().manual_seed(seed)) for seed in (1, 100 + backend.rank)}
    return {
        "next": rollout,
        "steps": backend.optimizer.steps,
        "seed": next((seed for seed, one in seeds.items() if torch.equal(one, drawn)), None),
        "differences": differences(
            backend, weights_only=job.get("weights_only", False), stored=getattr(torch, job.get("stored", "bfloat16"))
        ),
    }


def load_reference(backend: MegatronBackend, job: dict[str, Any]) -> dict[str, Any]:
    """Weights alone, of whatever kind of folder."""
    part, control = backend._model, backend.groups.control
    try:
        load_weights(Path(job["folder"]), "--ref-load", part, backend.optimizer, control=control)
    except DrivetrainError as error:
        return {"error": str(error)}
    return {"differences": differences(backend, weights_only=True, stored=getattr(torch, job["stored"]))}


def damage(backend: MegatronBackend, job: dict[str, Any]) -> None:
    """Copy a checkpoint and change one byte of the last file of tensors."""
    if backend.rank == 0:
        folder = Path(shutil.copytree(Path(job["folder"]).with_name(job["damage"]), job["folder"]))
        shard = sorted((folder / "dcp").glob("*.distcp"))[-1]
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    torch.distributed.barrier()


def make_plain(backend: MegatronBackend) -> nn.Module:
    """A model as Megatron-LM itself would make it without TransformerEngine."""
    shape: ModelShape = backend._model.shape
    settings = transformer_config(shape, backend.config, dtype=torch.bfloat16)
    settings.sequence_parallel = False  # torch's norms refuse it
    if shape.experts is not None:
        settings.moe_layer_freq = [int(layer in shape.sparse_layers) for layer in range(shape.num_layers)]
        if all(settings.moe_layer_freq):
            settings.moe_layer_freq = 1
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=backend._model.padded_vocab,
        max_sequence_length=64,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",
    ).bfloat16()  # torch's norms are made in fp32


def save_plain(backend: MegatronBackend, job: dict[str, Any]) -> dict[str, Any]:
    """Megatron's own writer."""
    model = make_plain(backend)
    with torch.no_grad():
        for name, parameter in named_parameters([model]):
            parameter.copy_(expected("main", name, backend))
    # Megatron's writer starts a helper process; forked instead of spawned it need not import everything again
    helper = multiprocessing.get_context("fork").Manager()
    filesystem_async._results_queue = helper.Queue()
    own = {"async_strategy": "mcore"} if "async_strategy" in dist_checkpointing.save.__code__.co_varnames else {}
    dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 3}, job["folder"], **own)
    helper.shutdown()
    return {}


def load_plain(backend: MegatronBackend, job: dict[str, Any]) -> dict[str, Any]:
    """Megatron's own reader, of the tensors that we have written."""
    folder = Path(job["folder"])
    if backend.rank == 0:
        shutil.copytree(Path(job["ours"]) / "dcp", folder)
        for name in ("metadata.json", "common.pt"):
            shutil.copyfile(Path(job["plain"]) / name, folder / name)
    torch.distributed.barrier()
    model = make_plain(backend)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # no layer of ours has a scaling state of fp8
    state = {name: one for name, one in model.sharded_state_dict().items() if "_extra_state" not in name}
    loaded = dist_checkpointing.load({"model": state}, str(folder), strict=StrictHandling.ASSUME_OK_UNEXPECTED)
    model.load_state_dict(loaded["model"], strict=False)
    wrong = [
        name
        for name, parameter in named_parameters([model])
        if not torch.equal(parameter, expected("main", name, backend).to(parameter.dtype))
    ]
    return {"differences": wrong}


ACTIONS = {
    "save": save,
    "load": load,
    "load_reference": load_reference,
    "save_plain": save_plain,
    "load_plain": load_plain,
}


def run_rank(job: dict[str, Any], rank: int, out: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
    config = MegatronConfig(**job["config"])
    with MegatronBackend(config, Role.POLICY, rank, job["ranks"], "cpu") as backend:
        backend.setup()
        found = ACTIONS[job["action"]](backend, job)
    out.with_suffix(".partial").write_text(json.dumps(found))
    out.with_suffix(".partial").rename(out)


def run_job(job: dict[str, Any], root: Path) -> None:
    children = []
    for rank in range(job["ranks"]):
        child = os.fork()
        if not child:
            code = 1
            try:
                run_rank(job, rank, root / f"{job['name']}.rank{rank}.json")
                code = 0
            except BaseException:  # whatever it is, the test shows it
                (root / f"{job['name']}.rank{rank}.error").write_text(traceback.format_exc())
            os._exit(code)
        children.append(child)
    end, running = time.monotonic() + DEADLINE, set(children)
    while running:
        failed = False
        for child in list(running):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                running.discard(child)
                failed = failed or status != 0
        if failed:
            end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for child in running:
                os.kill(child, 9)
                os.waitpid(child, 0)
            return
        time.sleep(0.01)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    for job in json.loads((root / "jobs.json").read_text()):
        begin = time.monotonic()
        run_job(job, root)
        print(f"{job['name']}: {time.monotonic() - begin:.1f} s", flush=True)

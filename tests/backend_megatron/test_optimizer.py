"""`SlicedAdamW` on plain tensors, against torch's AdamW over the same slices in fp32."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain_backend_megatron import optimizer as optimizer_module
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.optimizer import OwnedSlice, SlicedAdamW

SIZES = {"matrix": 37, "norm": 5}
LR = 1e-2


def config(**options: Any) -> MegatronConfig:
    return MegatronConfig(hf_checkpoint="none", fp32=True, weight_decay=0.3, **options)


def slices(dtype: torch.dtype) -> dict[str, OwnedSlice]:
    """A matrix's slice, which decays, and a norm's, which does not; each a view into a larger buffer."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: OwnedSlice(
            start=3,
            weight=torch.randn(size + 7, generator=generator).to(dtype)[2 : 2 + size],
            gradient=torch.zeros(size + 7)[2 : 2 + size],
            decays=name == "matrix",
        )
        for name, size in SIZES.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def trained(made: dict[str, OwnedSlice], steps: int = 4, factor: float = 0.5, **options: Any) -> SlicedAdamW:
    adam = SlicedAdamW(made, config(**options))
    for step in range(steps):
        for name, gradient in gradients(step).items():
            made[name].gradient.copy_(gradient)
        adam.step(LR, factor)
    return adam


def reference(start: dict[str, Tensor], steps: int = 4, factor: float = 0.5) -> dict[str, Tensor]:
    settings = config()
    weights = {name: one.detach().clone().float().requires_grad_() for name, one in start.items()}
    adam = torch.optim.AdamW(
        [
            {"params": [weights["matrix"]], "weight_decay": settings.weight_decay},
            {"params": [weights["norm"]], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
    )
    for step in range(steps):
        for name, gradient in gradients(step).items():
            weights[name].grad = gradient * factor
        adam.step()
    return {name: one.detach() for name, one in weights.items()}


def weights_of(made: dict[str, OwnedSlice]) -> dict[str, Tensor]:
    return {name: one.weight.clone() for name, one in made.items()}


def masters_of(adam: SlicedAdamW) -> dict[str, Tensor]:
    return {name: adam.slice_state(name)["main"].float() for name in SIZES}


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name].float() - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("options", [{}, {"optimizer_cpu_offload": True}], ids=["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_takes_the_steps_of_adamw_on_fp32_masters(dtype: torch.dtype, options: dict[str, Any]) -> None:
    made = slices(dtype)
    expected = reference(weights_of(made))
    adam = trained(made, **options)
    # the fused kernel of torch rounds in another order than its loop
    assert largest(masters_of(adam), expected) < 1e-6
    assert all(torch.equal(made[name].weight, masters_of(adam)[name].to(dtype)) for name in SIZES)
    assert adam.steps == 4


def test_what_is_beside_a_slice_in_its_buffer_stays() -> None:
    made = slices(torch.float32)
    outside = {name: one.weight._base.clone() for name, one in made.items()}  # type: ignore[union-attr]
    trained(made)
    for name, one in made.items():
        base = one.weight._base
        assert base is not None
        assert torch.equal(base[:2], outside[name][:2])
        assert torch.equal(base[2 + SIZES[name] :], outside[name][2 + SIZES[name] :])


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "main"])
def test_state_in_a_smaller_dtype_is_kept_in_it_and_costs_no_more_than_its_rounding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "_CHUNK", 8)  # several pieces, the last one shorter
    made = slices(torch.float32)
    expected = reference(weights_of(made))
    flag = "main_params_dtype" if kind == "main" else f"{kind}_dtype"
    small = torch.float16 if kind == "main" else torch.bfloat16
    adam = trained(made, use_precision_aware_optimizer=True, **{flag: "fp16" if kind == "main" else "bf16"})
    assert adam.slice_state("matrix")[kind].dtype == small
    others = {"main", "exp_avg", "exp_avg_sq"} - {kind}
    assert {adam.slice_state("matrix")[one].dtype for one in others} == {torch.float32}
    # fp16 keeps 11 bits of a weight near 3, bf16 8 bits of what an update of at most LR is made of, in each of 4 steps
    bound = 4 * 3 * 2**-11 if kind == "main" else 4 * LR * 2**-6
    assert 0 < largest(weights_of(made), expected) < bound


def test_masters_in_fp16_keep_updates_that_are_smaller_than_their_last_bit() -> None:
    torch.manual_seed(0)
    count, steps, lr = 20_000, 100, 1e-6
    start = 0.02 * torch.randn(count)
    one = OwnedSlice(start=0, weight=start.half().float(), gradient=torch.zeros(count), decays=False)
    adam = SlicedAdamW({"weight": one}, config(use_precision_aware_optimizer=True, main_params_dtype="fp16"))
    before = adam.slice_state("weight")["main"].float()
    for _ in range(steps):
        one.gradient.fill_(1.0)
        adam.step(lr, 1.0)
    moved = float((adam.slice_state("weight")["main"].float() - before).mean())
    # each step moves every weight by lr; the mean of so many roundings is within a percent of that
    assert moved == pytest.approx(-steps * lr, rel=0.05)


def test_many_pieces_are_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = slices(torch.bfloat16)
    trained(at_once, optimizer_cpu_offload=True)
    monkeypatch.setattr(optimizer_module, "_CHUNK", 8)
    in_pieces = slices(torch.bfloat16)
    trained(in_pieces, optimizer_cpu_offload=True)
    assert all(torch.equal(at_once[name].weight, in_pieces[name].weight) for name in SIZES)


def test_masters_can_be_more_precise_than_the_weights_they_begin_with() -> None:
    made = slices(torch.bfloat16)
    adam = SlicedAdamW(made, config())
    whole = torch.arange(50.0) / 7
    adam.take_master("matrix", whole.view(10, 5))
    adam.take_master("owned by another rank", whole)
    assert torch.equal(masters_of(adam)["matrix"], whole[3 : 3 + SIZES["matrix"]])


def test_the_state_that_sleeps_has_no_weights_in_it() -> None:
    moments = ["exp_avg.matrix", "exp_avg.norm", "exp_avg_sq.matrix", "exp_avg_sq.norm"]
    assert sorted(SlicedAdamW(slices(torch.float32), config()).state()) == moments
    in_bf16 = SlicedAdamW(slices(torch.bfloat16), config()).state()
    assert sorted(in_bf16) == [*moments, "main.matrix", "main.norm"]

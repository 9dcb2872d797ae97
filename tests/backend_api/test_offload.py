"""Tensors that go to the host and come back."""

import pytest
import torch

from drivetrain_backend_api.errors import IllegalStateError
from drivetrain_backend_api.offload import HostCopies


def test_storages_are_freed_and_come_back_bit_for_bit_with_their_views() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(100, generator=generator)
    view = flat[10:20].view(2, 5)
    half = torch.randn(7, 3, generator=generator).to(torch.bfloat16)
    special = torch.tensor([float("nan"), -0.0, float("inf")])
    before = {name: one.clone() for name, one in {"flat": flat, "half": half, "special": special}.items()}
    copies = HostCopies()
    for _ in range(2):  # the second time on the buffers of the first
        copies.send_away({"flat": flat, "view": view, "half": half, "special": special, "empty": torch.empty(0)})
        assert copies.away
        for one in (flat, view, half, special):
            assert one.untyped_storage().nbytes() == 0
        copies.bring_back()
        assert not copies.away
        for name, one in {"flat": flat, "half": half, "special": special}.items():
            assert torch.equal(one.view(torch.uint8), before[name].view(torch.uint8)), name
        assert torch.equal(view, before["flat"][10:20].view(2, 5))
        view.fill_(3.0)
        assert torch.equal(flat[10:20], torch.full((10,), 3.0))  # still the same storage
        before["flat"][10:20] = 3.0


def test_a_parameter_keeps_its_gradient_and_its_optimizer() -> None:
    def trained(sleep_between: bool) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        copies = HostCopies()
        for step in range(3):
            (parameter.sin().sum() * (step + 1)).backward()
            if sleep_between:
                state = {name: one for name, one in optimizer.state[parameter].items() if isinstance(one, torch.Tensor)}
                assert parameter.grad is not None
                copies.send_away({"parameter": parameter, "grad": parameter.grad, **state})
                copies.bring_back()
            optimizer.step()
            optimizer.zero_grad()
        return parameter.detach()

    assert torch.equal(trained(True), trained(False))


def test_going_away_in_two_parts_and_twice_is_harmless() -> None:
    one, other = torch.ones(4), torch.full((3,), 2.0)
    copies = HostCopies()
    copies.send_away({"one": one})
    copies.send_away({"one": one, "other": other})
    copies.bring_back()
    copies.bring_back()
    assert one.tolist() == [1.0] * 4
    assert other.tolist() == [2.0] * 3


def test_the_only_copy_is_never_dropped() -> None:
    tensor = torch.ones(4)
    copies = HostCopies()
    copies.send_away({"tensor": tensor})
    with pytest.raises(IllegalStateError, match=r"call bring_back\(\) first"):
        copies.drop_buffers()
    copies.bring_back()
    copies.drop_buffers()
    copies.send_away({"tensor": tensor})
    copies.bring_back()
    assert tensor.tolist() == [1.0] * 4

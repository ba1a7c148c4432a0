"""Watchers of calls, and where they rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qdqtool import qat
from qdqtool.qat.modules import observing
from qdqtool.qat.sites import CallWatcher, resting
from tests.qat import nets

X = torch.randn(2, 16, 16, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A skip around a branch that holds a skip itself."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = nn.Sequential(nets.conv(), nn.BatchNorm2d(16), nn.ReLU(), inner or nn.Identity(), nets.conv())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.branch(x))


class Network(nn.Module):
    """Nested skips, with a pool behind everything."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nets.conv(), nn.BatchNorm2d(16), Block(), Block(Block()))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.features(x), 1)
        return self.last(pooled.flatten(1))


class Counting(TorchFunctionMode):  # type: ignore[misc]
    """A mode of the user's own."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.calls += 1
        return func(*args, **(kwargs or {}))


def _prepared() -> tuple[nn.Module, qat.Plan]:
    torch.manual_seed(0)
    model = Network().eval()
    return model, qat.prepare(model, X, report=None)


def _seen(model: nn.Module, counted: dict[str, list[str]] | None) -> tuple[list[tuple[str, str, Tensor]], int]:
    """What observers see, and how many calls the watchers were shown."""
    found: list[tuple[str, str, Tensor]] = []
    names = {id(m): n for n, m in model.named_modules()}
    shown = 0
    original = CallWatcher.__torch_function__

    def counting(self: CallWatcher, *given: Any) -> Any:
        nonlocal shown
        shown += 1
        return original(self, *given)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(CallWatcher, "__torch_function__", counting)
        with observing(lambda module, name, value: found.append((names[id(module)], name, value))):
            if counted is None:
                model(X)
            else:
                with resting(model, counted):
                    model(X)
    return found, shown


def test_the_same_is_seen_where_watchers_rest_and_few_calls_are_shown_to_them() -> None:
    model, plan = _prepared()
    assert set(plan.counted) == {"add", "pool"} and plan.counted["pool"] == [""]
    assert {a.site.kind for a in plan.activations} == {"input", "add", "pool"}
    wanted, many = _seen(model, None)
    found, few = _seen(model, plan.counted)
    assert [f[:2] for f in found] == [w[:2] for w in wanted]
    assert all(torch.equal(f[2], w[2]) for f, w in zip(found, wanted, strict=True))
    assert few < many / 3
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nothing_rests_where_it_is_not_known_what_a_module_calls() -> None:
    model, plan = _prepared()
    _, many = _seen(model, None)
    found, all_of_them = _seen(model, {})
    assert all_of_them == many and len(found) == len(_seen(model, plan.counted)[0])


def test_modes_of_the_user_go_on_and_errors_leave_nothing_behind() -> None:
    model, plan = _prepared()
    Counting.calls = 0
    with torch.no_grad(), observing(lambda *_: None), resting(model, plan.counted), Counting():
        model(X)
        outside = Counting.calls
    assert outside > 20
    handle = model.features[2].branch[2].register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"), observing(lambda *_: None), resting(model, plan.counted):
        model(X)
    handle.remove()
    assert torch.overrides._get_current_function_mode() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(_seen(model, plan.counted)[0]) == len(_seen(model, None)[0])


def _fail(*_: Any) -> None:
    raise RuntimeError("on purpose")

from __future__ import annotations

import copy

import torch
from torch import nn

from qdqtool.qat.norms import freeze, untrained


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def test_frozen_statistics_stay_until_training_is_switched_on_again() -> None:
    network = _network().train()
    freeze(network)
    before = copy.deepcopy(network.state_dict())
    network(torch.randn(4, 3, 8, 8))
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items()) and network[0].training
    network.train()(torch.randn(4, 3, 8, 8))
    assert not torch.equal(network[1].running_mean, before["1.running_mean"])


def test_a_network_has_seen_data_when_its_statistics_say_so() -> None:
    network = _network()
    assert untrained(network)
    network.train()(torch.randn(4, 3, 8, 8))
    for norm in (network[1], network[3]):  # as in a copy by moving averages, which leaves out integers
        norm.num_batches_tracked.zero_()
    assert not untrained(network)
    assert not untrained(nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert not untrained(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))

"""Two trainings in one process, in turns and in threads, are what each is by itself."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import backoff, batch, network
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag

KINDS = {
    "fp16": {"level": "O1", "overrides": {"dtype": "fp16", "fp32_operations": ["conv2d"]}},
    "bf16": {"level": "O1", "overrides": {"dtype": "bf16", "low_operations": ["cross_entropy"]}},
    "masters": {"level": "O2", "overrides": {"dtype": "bf16"}},
    "plain": {"level": "O0", "overrides": {}},
}


def train(kind, model, take_turns=lambda: None):
    """Four steps; yields control in each, and returns the weights at last."""
    options = KINDS[kind]
    overrides = mpdiag.PrecisionOverrides(**options["overrides"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.MixedPrecision(
        model, optimizer, backoff(64.0), level=options["level"], overrides=overrides
    ) as mp:
        for i in range(4):
            x, y = batch(i)
            with mp.autocast():
                take_turns()  # each enters autocast before the other has left it
                half = options["level"] == "O2"  # which casts at the whole model's edge
                hidden = x if half else checkpoint(model[:3], x, use_reentrant=False)
                loss = nn.functional.cross_entropy((model if half else model[3:])(hidden), y)
                take_turns()
            mp.step(loss)
            take_turns()
        return {name: value.clone() for name, value in mp.fp32_state_dict().items()}


@pytest.mark.parametrize("pair", [("fp16", "bf16"), ("masters", "bf16"), ("bf16", "plain")])
def test_two_trainings_in_threads_do_not_see_each_other(pair):
    torch.set_num_threads(1)
    alone = {kind: train(kind, network()) for kind in pair}
    models = {kind: network() for kind in pair}
    together, turn = {}, threading.Barrier(2, timeout=60)

    def run(kind):
        torch.set_num_threads(1)
        try:
            together[kind] = train(kind, models[kind], turn.wait)
        except BaseException:
            turn.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, pair))
    for kind in pair:
        for name, value in alone[kind].items():
            if "fp16" in pair:  # emulation switches oneDNN, for every thread
                torch.testing.assert_close(value, together[kind][name], rtol=1e-2, atol=1e-3)
            else:
                assert torch.equal(value, together[kind][name]), (kind, name)
    assert torch._C._get_mkldnn_enabled()

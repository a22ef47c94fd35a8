"""A wrapped model is copied, pickled and sent to other processes as any other."""

import copy
import io
import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support import LEVELS, backoff, batch, loss_of_batch, network, wrapped
from torch import nn

import mpdiag
from mpdiag.plan import Fp32Choice

PLAN = replace(
    backoff(),
    fp32_modules=(Fp32Choice("Linear", "4"),),
    fp32_operations=(Fp32Choice("relu", ""), Fp32Choice("conv2d", "0")),
)


def trained(level):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    mp = mpdiag.MixedPrecision(model, optimizer, PLAN, level=level)
    loss = loss_of_batch(model, mp)
    mp.step(loss)
    model.eval()
    return model, optimizer, mp


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapped_model_is_pickled_saved_and_copied(level):
    model, optimizer, mp = trained(level)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x, _ = batch()
    expected = model(x)
    copies = [
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        pickle.loads(ForkingPickler.dumps(model)),  # as mp.spawn sends it to another process
    ]
    assert copies[2][0].weight.is_shared()  # as torch's own reductions make it
    for other in copies:
        assert torch.equal(other(x), expected)
        assert [p.dtype for p in other.parameters()] == [p.dtype for p in model.parameters()]
        assert all(map(torch.equal, other.parameters(), model.parameters()))
    twin = copy.deepcopy(model)  # of half-precision weights it has what they stand for, in FP32
    full = mp.fp32_state_dict()
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    assert all(torch.equal(p, full[n]) for n, p in twin.named_parameters())
    tolerance = 0.0 if level in ("O0", "O1") else 1e-2
    torch.testing.assert_close(twin(x), expected, rtol=tolerance, atol=tolerance)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["momentum"] == 0.9
    mp.close()
    for other in (copies[1], twin):  # they live on
        assert torch.isfinite(other(x)).all()


def test_a_trainer_itself_is_not_pickled():
    _, _, mp = trained("O1")
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(mp)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_half_outputs_on_request(level):
    x, y = batch()
    outputs = {}
    for half in (False, True):
        model = network()
        options = mpdiag.TrainerOptions(half_outputs=half)
        with wrapped(model, level=level, options=options) as mp:
            with mp.autocast():
                outputs[half] = model(x)
                loss = nn.functional.cross_entropy(outputs[half].float(), y)
            assert not mp.step(loss).skipped
    assert (outputs[False].dtype, outputs[True].dtype) == (torch.float32, torch.float16)
    assert torch.equal(outputs[True].float(), outputs[False])

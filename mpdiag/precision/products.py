"""In which dtypes each parameter is multiplied, from the recorded operations.

A parameter reaches a product through casts and copies; its views have its number already. The products
of the backward pass belong to the forward operation whose autograd node they run for: the one that
reads the parameter again gives the gradient of the input, the other that of the weight.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mpdiag.runs.operations import Operation, TensorRecord

PRODUCTS = frozenset(
    "mm addmm bmm baddbmm mv addmv dot convolution _convolution linear "
    "_scaled_mm _grouped_mm _scaled_grouped_mm".split()
)
_BOTH = frozenset(("convolution_backward",))
"""Operations of the backward pass that give both gradients."""
PASSES_ON = frozenset(
    "_to_copy copy_ clone contiguous alias detach t transpose view reshape _unsafe_view expand "
    "permute slice select unsqueeze squeeze cat stack split chunk".split()
)
"""Operations whose result has the values that they are given, but for rounding."""


@dataclass(frozen=True)
class Computed:
    """The dtypes of a parameter's products; None where none was recorded.

    Attributes:
        forward: That the parameter has where it is first read, in a product if it is in any.
        input_grad, weight_grad: Of the products of the backward pass; of what is in no product, the
            dtype read by the operation that gives its gradient.
        others: Further dtypes in which the forward pass reads it.
    """

    forward: str | None = None
    input_grad: str | None = None
    weight_grad: str | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Products:
    """What a training multiplies in, by the first recorded step in which each product ran.

    Attributes:
        parameters: By a parameter's name.
        modules: By a module's name, of the products in its own code. Under FSDP a module multiplies
            by what was gathered of a parameter, which has no name.
    """

    parameters: Mapping[str, Computed]
    modules: Mapping[str, Computed]

    def of(self, name: str) -> Computed | None:
        """Of a parameter, or of the module that owns it; None where neither was seen."""
        return self.parameters.get(name) or self.modules.get(name.rpartition(".")[0])


NO_PRODUCTS = Products({}, {})


def computed_in(operations: Iterable[Operation]) -> Products:
    """What each parameter is multiplied in; the first recorded step of a rank decides."""
    steps: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for operation in operations:
        steps[operation.rank, operation.step].append(operation)
    parameters: dict[str, Computed] = {}
    modules: dict[str, Computed] = {}
    for place in sorted(steps, key=lambda key: key[::-1]):
        named, inside = _in_step(steps[place])
        for name, now in named.items():  # of two models, one step shows one backward pass
            known = parameters.get(name, now)
            grads = known.input_grad or now.input_grad, known.weight_grad or now.weight_grad
            parameters[name] = replace(known, input_grad=grads[0], weight_grad=grads[1])
        modules = {**inside, **modules}
    return Products(parameters, modules)


def _in_step(operations: Sequence[Operation]) -> tuple[dict[str, Computed], dict[str, Computed]]:
    origin = origins(operations)
    backward: dict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.phase == "backward" and operation.forward >= 0:
            backward[operation.forward].append(operation)
    readers: dict[str, list[tuple[Operation, TensorRecord]]] = defaultdict(list)
    for operation in operations:
        if operation.phase == "forward" and operation.op not in PASSES_ON:
            for tensor in operation.inputs:
                name = origin.get(tensor.tensor)
                if name:
                    readers[name].append((operation, tensor))
    named = {name: _computed(name, uses, backward, origin) for name, uses in readers.items()}
    inside: dict[str, Computed] = {}
    for operation in operations:
        if operation.phase == "forward" and operation.op in PRODUCTS and operation.module:
            dtypes = {
                b.inputs[0].dtype
                for b in backward.get(operation.index, ())
                if b.op in PRODUCTS | _BOTH
            }
            gradient = dtypes.pop() if len(dtypes) == 1 else None
            own = Computed(operation.inputs[0].dtype, gradient, gradient)
            inside.setdefault(operation.module, own)
    return named, inside


def origins(operations: Sequence[Operation], through: frozenset[str] = PASSES_ON) -> dict[int, str]:
    """The parameter or buffer that each tensor is, or comes from alone, by the tensor's number.

    Args:
        operations: Of a step.
        through: Operations that are followed, by default those that copy.
    """
    origin: dict[int, str] = {}
    for operation in operations:
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.parameter:
                origin.setdefault(tensor.tensor, tensor.parameter)
        for place, name, *_ in operation.scalars.get("parts", ()):  # views of a parameter
            origin.setdefault(operation.inputs[place].tensor, name)
        if operation.op in through:
            names = {origin[t.tensor] for t in operation.inputs if t.tensor in origin}
            if len(names) == 1:
                for tensor in operation.outputs:
                    origin.setdefault(tensor.tensor, next(iter(names)))
    return origin


def _computed(
    name: str,
    uses: Sequence[tuple[Operation, TensorRecord]],
    backward: Mapping[int, Sequence[Operation]],
    origin: Mapping[int, str],
) -> Computed:
    ordered = sorted(uses, key=lambda use: use[0].op not in PRODUCTS)
    tensor = ordered[0][1]
    dtypes = dict.fromkeys(t.dtype for _, t in ordered)
    dtypes.pop(tensor.dtype)
    input_grad = weight_grad = None
    for used, operation in ((o, b) for o, _ in ordered for b in backward.get(o.index, ())):
        if operation.op in PASSES_ON:
            continue
        if used.op not in PRODUCTS:
            # A sparse gradient is built from its indices first.
            floating = (t.dtype for t in operation.inputs if "float" in t.dtype)
            weight_grad = weight_grad or next(floating, None)
        elif operation.op in _BOTH:
            input_grad = weight_grad = operation.inputs[0].dtype
        elif operation.op in PRODUCTS:
            if any(origin.get(t.tensor) == name for t in operation.inputs):
                input_grad = input_grad or operation.inputs[0].dtype
            else:
                weight_grad = weight_grad or operation.inputs[0].dtype
    return Computed(tensor.dtype, input_grad, weight_grad, tuple(dtypes))

"""What ``--help`` of each command ends with: lines to copy, and the names that an option takes."""

from pathlib import Path

from mpdiag.hardware.tables import read_table

EXAMPLES: dict[str, list[str]] = {}
for _row in read_table(Path(__file__).with_name("examples.tsv")):
    EXAMPLES.setdefault(_row["command"], []).append(_row["example"])
"""By command."""
FRAMEWORKS = (
    "torch", "lightning", "huggingface", "accelerate", "deepspeed", "megatron", "keras", "tensorflow",
    "fsdp2", "torchtitan", "torchao", "transformer_engine", "modelopt",
    "openseq2seq", "mxnet", "chainer", "theano", "cntk", "torch7", "caffe2", "nvcaffe",
)  # fmt: skip
"""What ``export --to`` takes, as the registry of exports has it, which would be slow to import here."""
WORKLOADS = ("digits", "gpt", "ssd")
"""What ``demo`` and ``search`` take, as ``workloads.names()`` has it."""
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "demo": ("Workloads", WORKLOADS),
    "search": ("Workloads", WORKLOADS),
    "export": ("Names for --to", FRAMEWORKS),
}
"""By command, what names are called, and the names."""


def epilog(command: str) -> str:
    """The end of a command's help."""
    examples = EXAMPLES[command]
    head = "Example:" if len(examples) == 1 else "Examples:"
    text = "\n".join(["\b", head, *(f"  {line}" for line in examples)])
    if command in NAMES:
        title, names = NAMES[command]
        text += f"\n\n{title}: {', '.join(names)}."
    return text

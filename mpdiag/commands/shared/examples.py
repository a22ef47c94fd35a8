"""What ``--help`` of each command ends with: lines to copy, and the names that an option takes."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("mpdiag demo digits --record-only", "mpdiag demo my_training.py --seed 1"),
    "search": ("mpdiag search ssd --budget 10",),
    "record": (
        "mpdiag record -- train.py --epochs 1",
        "mpdiag record --out runs/mine --max-steps 300 -- train.py",
    ),
    "train": ("mpdiag train --plan plan.json -- train.py --epochs 1",),
    "profile": (
        "mpdiag profile trace.json --json",
        "mpdiag profile after.json --against before.json",
        "mpdiag profile --steps 5 -- train.py",
    ),
    "analyze": (
        "mpdiag analyze runs/train -o plan.json",
        "mpdiag analyze runs/train --target bf16 -v",
        "mpdiag analyze runs/train --against plan.json --strict",
    ),
    "why": ("mpdiag why runs/train", "mpdiag why runs/train encoder.0"),
    "explain": ("mpdiag explain", "mpdiag explain loss-scale-needed"),
    "replay": ("mpdiag replay runs/train --init-scale 65536 --growth-interval 100",),
    "compare": (
        "mpdiag compare runs/train runs/train-fp16",
        "mpdiag compare fp32 fp16 --margin accuracy=0.002 --strict",
    ),
    "report": ("mpdiag report runs/train -o report.html", "mpdiag report trace.json"),
    "dashboard": ("mpdiag dashboard runs --port 8600",),
    "runs": ("mpdiag runs", "mpdiag runs experiments --json"),
    "doctor": ("mpdiag doctor --json",),
    "export": ("mpdiag export plan.json --to torch", "mpdiag export runs/train --to deepspeed"),
    "board": ("mpdiag board runs/train --to tensorboard -o logs",),
}
"""By command."""
FRAMEWORKS = (
    "torch", "lightning", "huggingface", "accelerate", "deepspeed", "megatron", "keras", "tensorflow",
    "openseq2seq", "mxnet", "chainer", "theano", "cntk", "torch7", "caffe2", "nvcaffe",
)  # fmt: skip
"""What ``export --to`` takes, as the registry of exports has it, which would be slow to import here."""
WORKLOADS = ("digits", "gpt", "language_model", "ssd")
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

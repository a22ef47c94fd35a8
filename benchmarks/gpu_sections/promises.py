"""What is promised of a GPU, sentence by sentence. The one place for these texts.

A promise is *held*, *broken* or *not testable*. It stands in the part (see ``parts``) that settles it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["exact", "card", "aim"]

SECTIONS = {
    "a": "Counting",
    "b": "Recording",
    "c": "FP16 of the card against emulated FP16",
    "d": "Training by a plan",
    "e": "Tensor Cores",
    "f": "The device's facts",
    "g": "Memory",
    "h": "FP8",
    "i": "Workloads too large for a CPU",
}


@dataclass(frozen=True)
class Promise:
    """One sentence that is true of a GPU, or not.

    Attributes:
        id: Its name in the JSON document; begins with the letter of its section.
        part: The part that settles it, see ``parts``.
        kind: ``exact``: has to hold on a CPU, too, so a rehearsal may break it; ``card``: says
            something of a GPU alone; ``aim``: a figure on this side of a bound.
        sentence: What is promised.
        shown_by: How it is settled.
    """

    id: str
    part: str
    kind: Kind
    sentence: str
    shown_by: str

    @property
    def section(self) -> str:
        """The letter of its section."""
        return self.id.partition("-")[0]


def _models(
    start: str, part: str, names: tuple[str, ...], kind: Kind, sentence: str, shown_by: str
) -> tuple[Promise, ...]:
    """The same promise for several models; ``{}`` in the sentence is the model's title."""
    return tuple(
        Promise(f"{start}-{n}", part, kind, sentence.format(MODELS[n]), shown_by) for n in names
    )


MODELS = {
    "cnn": "a CNN of ResNet-50's size",
    "gpt": "a GPT of 124 M parameters",
    "lstm": "an LSTM language model",
    "xl": "a GPT of 1.5 B parameters",
}
_SMALL = ("cnn", "gpt", "lstm")

PROMISES: tuple[Promise, ...] = (
    # -- a -----------------------------------------------------------------------------------------
    Promise(
        "a-counts", "a-counting", "exact",
        "Counting on the device gives the CPU's counts, extremes and special values, in FP32, BF16, "
        "FP16 and float64, in every layout.",
        "row by row against the counter of the CPU, in twelve layouts",
    ),
    Promise(
        "a-updates", "a-counting", "exact",
        "Weight updates counted on the device equal those counted on the CPU.",
        "rows, facts and ratios against the counter of the CPU",
    ),
    Promise(
        "a-triton", "a-counting", "card",
        "The Triton kernel counts on CUDA, and gives what plain torch operations give.",
        "the counter chosen for the device; both on the same tensors",
    ),
    Promise(
        "a-no-sync", "a-counting", "card",
        "Counting a tensor and counting a weight update never wait for the device.",
        'torch.cuda.set_sync_debug_mode("error") around both',
    ),
    Promise(
        "a-step-no-sync", "a-counting", "card",
        "A recorded step waits for the device only where rows are read back.",
        'torch.cuda.set_sync_debug_mode("error") over steps that read nothing back',
    ),
    Promise(
        "a-speed", "a-counting", "aim",
        "From 16 M values on, FP32 tensors are counted at 0.5 of the copy bandwidth or more.",
        "bytes read a second over the bytes that a copy reads and writes, CUDA events",
    ),
    Promise(
        "a-launches", "a-counting", "aim",
        "A counted tensor takes one kernel launch, updates at once three, 300 tensors at once three.",
        "kernels, fills and copies seen by torch.profiler",
    ),
    # -- b -----------------------------------------------------------------------------------------
    *_models(
        "b-identical", "b-identity", _SMALL, "exact",
        "Recording every step of {} changes no loss and no weight by a bit.",
        "deterministic algorithms, the same training with and without",
    ),
    Promise(
        "b-operations", "b-identity", "exact",
        "The operations of a step are recorded with their modules and lines, as on a CPU.",
        "the modules of recorded operations, here and on the CPU; nine tenths with a line",
    ),
    *_models(
        "b-every", "b-steps", _SMALL, "aim",
        "Recording every step of {} takes at most 1.25 of the step.",
        "step time with over step time without, in turns (TF32 on); how far the steps without lie apart "
        "is allowed for",
    ),
    *_models(
        "b-default", "b-steps", _SMALL, "aim",
        "Recording {} at the default cadence takes at most 1.02 of the step.",
        "the same, over whole periods of 20 steps",
    ),
    *_models(
        "b-peers", "b-steps", _SMALL, "aim",
        "Recording every step of {} is cheaper than histograms written by hand.",
        "hooks with torch.histc, and SummaryWriter.add_histogram where its step is no longer than 12 s, "
        "one after another on the same model",
    ),
    *_models(
        "b-memory", "b-steps", _SMALL, "aim",
        "Recording {} takes at most one copy of the weights and 256 MiB more.",
        "torch.cuda.max_memory_allocated with and without",
    ),
    *_models(
        "b-every", "b-large", ("xl",), "aim",
        "Recording every step of {} takes at most 1.25 of the step.",
        "as above",
    ),
    *_models(
        "b-default", "b-large", ("xl",), "aim",
        "Recording {} at the default cadence takes at most 1.02 of the step.",
        "as above",
    ),
    *_models(
        "b-memory", "b-large", ("xl",), "aim",
        "Recording {} takes at most one copy of the weights and 256 MiB more.",
        "as above",
    ),
    # -- c -----------------------------------------------------------------------------------------
    *(
        Promise(f"c-{what}-{name}", f"c-{name}", kind, sentence.format(title), shown_by)  # type: ignore[arg-type]
        for name, title in (("ssd", "the SSD"), ("language_model", "the language model"))
        for what, kind, sentence, shown_by in (
            (
                "histograms", "card",
                "Native FP16 makes the same share of {}'s activation gradients zero as emulated FP16.",
                "recorded in both; the shares differ by at most 2 percentage points",
            ),
            (
                "predicted", "card",
                "The FP32 recording of {} predicts what native FP16 loses.",
                "predicted against observed share of zeros, at most 2 percentage points apart",
            ),
            (
                "curves", "card",
                "By the plan, the loss curve of {} in native FP16 follows the one of emulated FP16.",
                "loss of the first 30 steps, on average at most 5 % apart; skipped steps alike",
            ),
            (
                "plan", "card",
                ("In native FP16 {} needs its scale: by the plan it ends within 10 % of FP32's loss, "
                "without a scale farther off."),
                "mean loss of the last fifth of the steps",
            ),
        )
    ),
    # -- d -----------------------------------------------------------------------------------------
    *_models(
        "d-equal-fp16", "d-equality", _SMALL, "card",
        "Level O1 in FP16 trains {} to the bit as torch.autocast and GradScaler do.",
        "deterministic algorithms, the same scale, losses and weights compared",
    ),
    *_models(
        "d-equal-bf16", "d-equality", _SMALL, "card",
        "Level O1 in BF16 trains {} to the bit as torch.autocast does.",
        "the same, without a scale",
    ),
    Promise(
        "d-skip", "d-equality", "exact",
        "An overflowing step is skipped: weights, optimizer state and buffers stay as they were.",
        "an infinite input in one step",
    ),
    Promise(
        "d-optimizers", "d-equality", "exact",
        "Fused, foreach and plain AdamW train alike under the trainer.",
        "weights after ten steps, relative difference at most 1e-3",
    ),
    Promise(
        "d-fused-scale", "d-equality", "card",
        "Gradients recorded under GradScaler with a fused optimizer carry no loss scale.",
        "the largest recorded gradient of each weight: fused against foreach",
    ),
    Promise(
        "d-nccl", "d-equality", "card",
        "Under DistributedDataParallel over NCCL a step is taken, skipped and recorded as without.",
        "a process group of one rank: losses to the bit, one step skipped, every step recorded",
    ),
    *_models(
        "d-ratio-fp16", "d-steps", _SMALL, "aim",
        "A step of {} at O1 in FP16 takes no longer than torch.autocast with GradScaler.",
        "step times in turns with two such loops; 0.5 % and how far the two lie apart are allowed for",
    ),
    *_models(
        "d-ratio-bf16", "d-steps", _SMALL, "aim",
        "A step of {} at O1 in BF16 takes no longer than torch.autocast.",
        "step times in turns with two such loops; 0.5 % and how far the two lie apart are allowed for",
    ),
    *_models(
        "d-levels", "d-steps", _SMALL, "aim",
        "Levels O1, O2 and O3 train {} faster than FP32, in FP16 and in BF16.",
        "step times over FP32's (TF32 on)",
    ),
    Promise(
        "d-compile", "d-compile", "exact",
        "A model compiled by torch.compile trains under the trainer as the eager one.",
        "losses of ten steps, at most 2 % apart; step times over those of autocast and GradScaler",
    ),
    Promise(
        "d-graphs", "d-compile", "card",
        "A model compiled with CUDA graphs (mode reduce-overhead) trains under the trainer.",
        "losses of ten steps, at most 2 % apart",
    ),
    # -- e -----------------------------------------------------------------------------------------
    Promise(
        "e-verdicts", "e-verdicts", "card",
        "No verdict on a matrix product, a convolution, an LSTM or an attention contradicts what the "
        "measured rate proves, whatever the dtype and the alignment.",
        "mpdiag.profile of each case against CUDA events: what multiplies faster than CUDA cores "
        "can ran on Tensor Cores; FP32 with TF32 off did not; at least half of the proven cases named",
    ),
    Promise(
        "e-padding", "e-verdicts", "aim",
        "Padding a misaligned layer gains no more than the profile's bound, and half of the gain it "
        "estimates or more.",
        "Amdahl bound and estimate of the profile against step times with odd and with padded sizes",
    ),
    Promise(
        "e-trainer", "e-verdicts", "card",
        "The trainer says after its first steps whether Tensor Cores are in use, and names the cause "
        "where they are not.",
        "in use in FP16; not in use, and TF32 named, where FP32 is forced on every module with TF32 off",
    ),
    Promise(
        "e-command", "e-command", "card",
        "`mpdiag profile -- script.py` captures an unmodified script, links nine tenths of kernel "
        "time to operations, and finds Tensor Cores in BF16.",
        "the command's JSON",
    ),
    Promise(
        "e-counters", "e-counters", "card",
        "Hardware counters contradict no kernel's name.",
        "ncu's counts of Tensor Core instructions, kernel by kernel; unknown names are counted apart",
    ),
    # -- f -----------------------------------------------------------------------------------------
    Promise(
        "f-nvml", "f-device", "card",
        "NVML's facts are read, and agree with torch's.",
        "name, compute capability and memory; driver, clocks, power and temperature unless NVML "
        "itself refuses them",
    ),
    Promise(
        "f-doctor", "f-device", "exact",
        "`mpdiag doctor` names every device that torch has, and the formats of its Tensor Cores.",
        "the command's JSON against torch's devices and their compute capability",
    ),
    Promise(
        "f-throttling", "f-device", "card",
        "Every reason for lower clocks that NVML gives under load is reported in words.",
        "products for some seconds; NVML's bits against the words; not testable if it gives none",
    ),
    # -- g -----------------------------------------------------------------------------------------
    *_models(
        "g-memory", "g-memory", ("cnn", "gpt"), "aim",
        "The memory predicted for O0 to O3 of {} is within 30 % of the most that is allocated.",
        "the plan's figures against torch.cuda.max_memory_allocated, in FP16 from O1 on",
    ),
    *_models(
        "g-batch", "g-memory", ("cnn", "gpt"), "aim",
        "The larger batch that the plan allows {} at O1 and O2 fits into the memory of O0.",
        "peak with that batch over O0's peak, at most 1.1",
    ),
    # -- h -----------------------------------------------------------------------------------------
    *(
        Promise(
            f"h-{name}", "h-fp8", "exact",
            f"FP8 {title}: within its range our rounding is that of torch's casts on the device, bit by "
            "bit.",
            "every FP16 value, every tie and random FP32 patterns, against Tensor.to; what torch "
            "makes of values out of range is reported apart",
        )
        for name, title in (("e4m3", "E4M3"), ("e5m2", "E5M2"))
    ),
    Promise(
        "h-hardware", "h-fp8", "card",
        "The card's own conversion instructions round to FP8 as we do, within the format's range.",
        "a Triton kernel that casts to E4M3 and E5M2",
    ),
    Promise(
        "h-product", "h-fp8", "card",
        "torch._scaled_mm multiplies the values that our rounding to E4M3 predicts.",
        "against a float64 product of them: within 2^-10 of the sum of |a||b|, fast accumulation off",
    ),
    Promise(
        "h-blocks", "h-fp8", "exact",
        "Block formats (MX and NVFP4) round on the device as on the CPU, bit by bit.",
        "mpdiag.fake_quantize here and there, on normal, on widely spread and on sparse values",
    ),
    # -- i -----------------------------------------------------------------------------------------
    *(
        Promise(
            f"i-{name}", "i-families", "aim",
            f"`mpdiag demo {name} --size large --device cuda` trains by its plan as in FP32.",
            "few steps; the mean loss of the last fifth at most 10 % off FP32's, or the metric within "
            "the workload's margin",
        )
        for name in ("language_model", "ssd", "gpt", "digits", "vit")
    ),
)  # fmt: skip


def of_part(part: str) -> tuple[Promise, ...]:
    """The promises that a part settles, in the table's order."""
    return tuple(p for p in PROMISES if p.part == part)


def named(name: str) -> Promise:
    """A promise by its id.

    Raises:
        KeyError: If there is none.
    """
    return next((p for p in PROMISES if p.id == name), None) or _unknown(name)


def _unknown(name: str) -> Promise:
    message = f"there is no promise {name!r}"
    raise KeyError(message)

"""What a message or a page names exists: options, scripts, result files."""

import re

from calls import COMMANDS
from source_texts import texts

OPTIONS = {
    name: {o for p in c.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for name, c in COMMANDS.items()
}
EVERY = {o for options in OPTIONS.values() for o in options} | {"--version", "--install-completion"}
OTHERS = {
    "nsys": {"--type", "--trace", "--report", "--format"},
    "ncu": {"--csv", "--metrics", "--import", "--page"},
    "rocprof, rocprofv3": {"--pmc", "--output-format", "--kernel-trace", "--hip-trace", "--stats"},
    "nvprof": {"--print-gpu-trace"},
    "pip": {"--force-reinstall"},
    "tensorboard": {"--logdir"},
    "torchrun": {"--nproc-per-node", "--module", "--nnodes", "--standalone", "--rdzv-backend"},
    "a script of a page, a benchmark": {"--epochs", "--peers"},
}
"""Options of other programs that messages and pages name."""
OF_FRAMEWORKS = ("mpdiag/exports/",)
"""Files whose options are those of the frameworks they write for."""
OF_TOOLS = re.compile(r"python |make |pytest|ruff|git |mkdocs|uv |pip |docker|streamlit")
"""Lines of pages that call something else."""

_OPTION = re.compile(r"(?<![\w`-])--[a-z][a-z0-9-]+\b(?!\.)")
_CALL = re.compile(r"mpdiag (\w+)((?: [^`\n|;]*)?)")


def unknown(text):
    """Options in a text that no command has, and those that the command named before them has not."""
    known = EVERY.union(*OTHERS.values())
    found = {option for option in _OPTION.findall(text) if option not in known}
    for name, rest in _CALL.findall(text):
        own = rest.partition(" -- ")[0]
        if name in OPTIONS:
            found |= {
                f"mpdiag {name} {o}"
                for o in _OPTION.findall(own)
                if o in EVERY and o not in OPTIONS[name]
            }
    return found


def test_the_check_sees_an_option_that_does_not_exist():
    assert unknown("choose another with --prot") == {"--prot"}
    assert unknown("mpdiag record --target fp16 -- x.py --json") == {"mpdiag record --target"}
    assert unknown("mpdiag analyze RUN --target bf16; nsys export --type sqlite") == set()


def test_options_in_messages_exist(root):
    found = {}
    for path in sorted([*(root / "mpdiag").rglob("*.py"), *(root / "app").rglob("*.py")]):
        place = path.relative_to(root).as_posix()
        if not place.startswith(OF_FRAMEWORKS):
            found[place] = set().union(*map(unknown, texts(path.read_text(encoding="utf-8"))))
    assert {place: options for place, options in found.items() if options} == {}


def test_options_in_pages_exist(root):
    found = {}
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        lines = [line for line in path.read_text("utf-8").splitlines() if not OF_TOOLS.search(line)]
        ours = [line.partition(" -- examples/")[0] for line in lines]  # then come a script's own
        found[path.name] = set().union(*map(unknown, ours))
    assert {name: options for name, options in found.items() if options} == {}


_PATH = re.compile(r"\b(?:benchmarks|studies|sample_runs)/[\w/-]+\.(?:py|json(?:\.gz)?)\b")
FOLDERS = ("mpdiag", "app", "benchmarks", "studies", "sample_runs", "docs", "examples")


def test_scripts_and_result_files_that_are_named_exist(root):
    texts = [root / "README.md", root / "CONTRIBUTING.md", root / "Makefile"]
    for folder in FOLDERS:
        texts += [p for p in (root / folder).rglob("*") if p.suffix in (".py", ".md")]
    missing = {
        f"{text.relative_to(root)}: {path}"
        for text in texts
        for path in _PATH.findall(text.read_text(encoding="utf-8"))
        if not (root / path).exists()
    }
    assert missing == set()

"""The README's commands and examples are what CI and users really run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_ci_runs_the_readme_test_command():
    _, test_command = blocks("bash")[:2]
    install, _, run = test_command.strip().partition(" && ")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert run in script and install.removeprefix("pip install ") in script


def test_torch_example_runs():
    pytest.importorskip("torch")
    (example,) = [block for block in blocks("python") if "import torch" in block]
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    # An all-zero cache: every score is 0, so the LSE is the logarithm of the number of visible keys.
    assert scope["out"].shape == (2, 64, 128) and not scope["out"].any()
    assert scope["lse"].exp().mean(dim=1).round().tolist() == [100.0, 128.0]


def test_a_runner_with_compile_disabled_serves_compiled_code():
    """As the limits say. The example's arrays are zero, so its values are set here: 1.0 everywhere."""
    torch = pytest.importorskip("torch")
    assert "torch.compiler.disable(runner)" in README
    (example,) = [block for block in blocks("python") if "import torch" in block]
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    scope["pool"].fill_(0x22)
    for scales in (scope["views"].k_scale, scope["views"].v_scale):
        scales.fill_(0x38)
    launch = torch.compiler.disable(scope["runner"])
    compiled = torch.compile(lambda addend: launch() + addend, backend="eager")
    for addend in (1.0, 2.0):
        assert (compiled(torch.tensor(addend, device=scope["device"])) == 1 + addend).all()


@pytest.mark.gpu
def test_cupy_example_runs():
    pytest.importorskip("cupy")
    (example,) = [block for block in blocks("python") if "import cupy" in block]
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == (2, 64, 128) and not scope["out"].get().astype("float32").any()


def test_links_point_to_files():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", README):
        assert (ROOT / target).exists(), target

"""Where the emulator's compiled code is kept, and that it runs where it is kept nowhere."""

from __future__ import annotations

import pytest

from msa_cudacore.ptx.emulator import jit


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """A working folder of its own, and a cache root that is looked up anew."""
    monkeypatch.chdir(tmp_path)
    jit.cache_root.cache_clear()
    yield
    jit.cache_root.cache_clear()


def difference(a, b):
    return a - b


@pytest.mark.parametrize(("setting", "kept"), [("off", False), ("folder", True)])
def test_compiled_code_is_kept_in_the_folder_or_not_at_all(monkeypatch, tmp_path, setting, kept):
    monkeypatch.setenv("MSA_CUDACORE_CACHE", setting)
    assert jit.unit("i", "i i")(difference)(5, 3) == 2
    assert any(tmp_path.iterdir()) == kept
    assert any((tmp_path / setting / "emulator").rglob("*.nbc")) == kept


def test_a_folder_that_cannot_be_written_warns_and_compiles(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MSA_CUDACORE_CACHE", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="the emulator's cache .* cannot be written .*MSA_CUDACORE_CACHE"):
        assert jit.unit("i", "i i")(difference)(5, 3) == 2

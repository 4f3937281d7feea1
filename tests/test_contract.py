"""Every refusal: each bad argument gives one error that names it, and leaves no trace."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from msa_cudacore import api, contract
from msa_cudacore import prepare_msa_nvfp4_sparse_decode as prepare
from msa_cudacore.arguments import describe
from msa_cudacore.launch import device as device_module
from msa_cudacore.launch.device import DeviceFacts

BF16 = ml_dtypes.bfloat16
BATCH, SEQLEN_Q, HKV, GROUP, PAGES, TOPK, MAX_PAGES = 2, 2, 2, 4, 5, 16, 6
ROWS = BATCH * SEQLEN_Q


def legal() -> dict:
    """Arguments of a legal call on host arrays; tests replace one and expect its name in the message."""
    rng = np.random.default_rng()
    return dict(
        q=rng.standard_normal((ROWS, HKV * GROUP, 128)).astype(BF16),
        k=rng.integers(0, 256, (PAGES, HKV, 128, 64), dtype=np.uint8),
        v=rng.integers(0, 256, (PAGES, HKV, 128, 64), dtype=np.uint8),
        q2k_indices=np.tile(np.r_[0, 1, np.full(TOPK - 2, -1)].astype(np.int32), (HKV, ROWS, 1)),
        k_scale=np.full((PAGES, HKV, 128, 8), 0x38, np.uint8),
        v_scale=np.full((PAGES, HKV, 128, 8), 0x38, np.uint8),
        page_table=rng.integers(0, PAGES, (BATCH, MAX_PAGES), dtype=np.int32),
        seqused_k=np.array([130, 7], np.int32),
        k_global_scale=0.5,
        v_global_scale=2.0,
        seqlen_q=SEQLEN_Q,
    )


def strided(array: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def spaced(array: np.ndarray, axis: int, pad: int) -> np.ndarray:
    """The same values with a gap of `pad` elements along the stride of `axis`."""
    shape = list(array.shape)
    shape[axis + 1] += pad
    base = np.zeros(shape, array.dtype)
    view = base[tuple(slice(0, n) for n in array.shape)]
    view[...] = array
    return view


REFUSALS = {
    # name in the message, what replaces what, error, words that must appear
    "q not an array": ("q", lambda a: [1.0, 2.0], TypeError, "list"),
    "q float16": ("q", lambda a: a["q"].astype(np.float16), TypeError, "bfloat16"),
    "q uint16 without the flag": ("q", lambda a: a["q"].view(np.uint16), TypeError, "bf16_as_uint16"),
    "q two-dimensional": ("q", lambda a: a["q"][:, 0], ValueError, "[batch * seqlen_q, num_q_heads, 128]"),
    "q head size 64": ("q", lambda a: a["q"][:, :, :64], ValueError, "128"),
    "q rows no multiple": ("q", lambda a: a["q"][:3], ValueError, "seqused_k 2 requests and seqlen_q is 2"),
    "q heads no multiple of KV heads": ("q", lambda a: np.zeros((ROWS, 7, 128), BF16), ValueError, "multiple"),
    "q no heads": ("q", lambda a: np.zeros((ROWS, 0, 128), BF16), ValueError, "multiple"),
    "q group 17": ("q", lambda a: np.zeros((ROWS, 34, 128), BF16), ValueError, "at most 16"),
    "q inner stride": ("q", lambda a: np.zeros((ROWS, 8, 256), BF16)[:, :, ::2], ValueError, "inner"),
    "q head stride no multiple of 16": ("q", lambda a: spaced(a["q"], 1, 4), ValueError, "multiples of 16"),
    "q misaligned base": ("q", lambda a: np.zeros(ROWS * 8 * 128 + 1, BF16)[1:].reshape(ROWS, 8, 128), ValueError, "16"),
    "q negative stride": ("q", lambda a: a["q"][::-1], ValueError, "negative"),
    "k int8": ("k", lambda a: a["k"].view(np.int8), TypeError, "uint8"),
    "k complex": ("k", lambda a: a["k"].astype(np.complex64), TypeError, "accepted is uint8"),
    "k_scale bool": ("k_scale", lambda a: a["k_scale"] > 0, TypeError, "accepted is uint8 or float8_e4m3fn"),
    "seqused_k objects": ("seqused_k", lambda a: a["seqused_k"].astype(object), TypeError, "accepted is int32"),
    "lse overlapping rows": (
        "lse", lambda a: strided(np.zeros((ROWS, 8), np.float32), (4, 4)), ValueError, "row and head strides",
    ),
    "k three-dimensional": ("k", lambda a: a["k"][0], ValueError, "[num_pages, num_kv_heads, 128, 64]"),
    "k unpacked": ("k", lambda a: np.zeros((PAGES, HKV, 128, 128), np.uint8), ValueError, "64"),
    "k page size 64": ("k", lambda a: a["k"][:, :, :64], ValueError, "128"),
    "k token stride 128": ("k", lambda a: spaced(a["k"], 2, 64), ValueError, "dense"),
    "k inner stride 2": ("k", lambda a: np.zeros((PAGES, HKV, 128, 128), np.uint8)[..., ::2], ValueError, "dense"),
    "k permuted heads and tokens": (
        "k", lambda a: np.zeros((PAGES, 128, HKV, 64), np.uint8).transpose(0, 2, 1, 3), ValueError, "dense",
    ),
    "k overlapping heads": (
        "k", lambda a: strided(a["k"], (HKV * 8192, 4096, 64, 1)), ValueError, "overlap",
    ),
    "k overlapping pages": (
        "k", lambda a: strided(a["k"], (8192, 8192, 64, 1)), ValueError, "overlap",
    ),
    "k page stride no multiple of 16": ("k", lambda a: strided(a["k"], (HKV * 8192 - 8, 64, 64, 1)), ValueError, "16"),
    "k head stride no multiple of 16": (
        "k", lambda a: np.zeros((PAGES, HKV, 8200), np.uint8)[..., :8192].reshape(PAGES, HKV, 128, 64, copy=False),
        ValueError, "multiples of 16",
    ),
    "v float8": ("v", lambda a: a["v"].view(ml_dtypes.float8_e4m3fn), TypeError, "uint8"),
    "v other page count": ("v", lambda a: a["v"][:-1], ValueError, "as in k"),
    "v other head count": ("v", lambda a: a["v"][:, :1], ValueError, "as in k"),
    "k_scale float32": ("k_scale", lambda a: a["k_scale"].astype(np.float32), TypeError, "float8_e4m3fn"),
    "k_scale group of 32": ("k_scale", lambda a: a["k_scale"][..., :4], ValueError, "8"),
    "v_scale transposed": ("v_scale", lambda a: a["v_scale"].transpose(0, 1, 3, 2), ValueError, "128"),
    "v_scale misaligned": (
        "v_scale", lambda a: np.zeros(a["v_scale"].size + 8, np.uint8)[8:].reshape(a["v_scale"].shape), ValueError, "16",
    ),
    "q2k_indices int64": ("q2k_indices", lambda a: a["q2k_indices"].astype(np.int64), TypeError, "int32"),
    "q2k_indices token-major": ("q2k_indices", lambda a: a["q2k_indices"].transpose(1, 0, 2), ValueError, "num_kv_heads"),
    "q2k_indices top-k 65": ("q2k_indices", lambda a: np.full((HKV, ROWS, 65), -1, np.int32), ValueError, "1 to 64"),
    "q2k_indices top-k 0": ("q2k_indices", lambda a: a["q2k_indices"][:, :, :0], ValueError, "1 to 64"),
    "q2k_indices misaligned": (
        "q2k_indices", lambda a: np.zeros(HKV * ROWS * 64 + 1, np.uint8)[1:].view(np.int32).reshape(HKV, ROWS, 16),
        ValueError, "multiples of 4",
    ),
    "page_table stride no multiple of 4": (
        "page_table", lambda a: strided(np.zeros((2, 16), np.int32).view(np.uint8)[:, :24].view(np.int32), (26, 4)),
        ValueError, "multiples of 4",
    ),
    "page_table too wide": (
        "page_table", lambda a: np.lib.stride_tricks.as_strided(a["page_table"], (BATCH, 2**31), (0, 0)),
        ValueError, "2147483648; accepted are at most 2147483647",
    ),
    "page_table uint32": ("page_table", lambda a: a["page_table"].astype(np.uint32), TypeError, "int32"),
    "page_table other batch": ("page_table", lambda a: a["page_table"][:1], ValueError, "[batch, max_pages]"),
    "page_table one-dimensional": ("page_table", lambda a: a["page_table"][0], ValueError, "[batch, max_pages]"),
    "seqused_k int64": ("seqused_k", lambda a: a["seqused_k"].astype(np.int64), TypeError, "int32"),
    "seqused_k two-dimensional": ("seqused_k", lambda a: a["seqused_k"][None], ValueError, "[batch]"),
    "seqused_k list": ("seqused_k", lambda a: [130, 7], TypeError, "list"),
    "seqused_k big-endian": ("seqused_k", lambda a: a["seqused_k"].astype(">i4"), TypeError, "byte order"),
    "k_global_scale zero": ("k_global_scale", lambda a: 0.0, ValueError, "positive"),
    "k_global_scale negative": ("k_global_scale", lambda a: -1.0, ValueError, "positive"),
    "k_global_scale infinite": ("k_global_scale", lambda a: float("inf"), ValueError, "finite"),
    "k_global_scale NaN": ("k_global_scale", lambda a: float("nan"), ValueError, "finite"),
    "k_global_scale array": ("k_global_scale", lambda a: np.ones(1, np.float32), TypeError, "float(k_global_scale)"),
    "k_global_scale string": ("k_global_scale", lambda a: "1", TypeError, "str"),
    "k_global_scale boolean": ("k_global_scale", lambda a: True, TypeError, "bool"),
    "k_global_scale beyond float64": ("k_global_scale", lambda a: 10**400, ValueError, "an integer of 1329 bits; accepted are positive"),
    "k_global_scale beyond float32": ("k_global_scale", lambda a: 1e40, ValueError, "float32"),
    "v_global_scale zero": ("v_global_scale", lambda a: 0, ValueError, "positive"),
    "v_global_scale below float32": ("v_global_scale", lambda a: 1e-40, ValueError, "float32"),
    "softmax_scale negative": ("softmax_scale", lambda a: -0.1, ValueError, "positive"),
    "softmax_scale NaN": ("softmax_scale", lambda a: float("nan"), ValueError, "finite"),
    "seqlen_q zero": ("seqlen_q", lambda a: 0, ValueError, "1 to 32"),
    "seqlen_q 33": ("seqlen_q", lambda a: 33, ValueError, "1 to 32"),
    "seqlen_q of 5001 digits": ("seqlen_q", lambda a: 10**5000, ValueError, "an integer of 16610 bits; accepted are"),
    "seqlen_q of many negative digits": ("seqlen_q", lambda a: -(10**5000), ValueError, "a negative integer of 16610 bits"),
    "seqlen_q a long list of long integers": ("seqlen_q", lambda a: [10**5000], TypeError, "is a list (list)"),
    "seqlen_q a long string": ("seqlen_q", lambda a: "x\n" * 10**5, TypeError, "... (str)"),
    "seqlen_q float": ("seqlen_q", lambda a: 2.0, TypeError, "integers"),
    "seqlen_q boolean": ("seqlen_q", lambda a: True, TypeError, "integers"),
    "out float32": ("out", lambda a: np.zeros((ROWS, 8, 128), np.float32), TypeError, "bfloat16"),
    "out other shape": ("out", lambda a: np.zeros((ROWS, 4, 128), BF16), ValueError, "as q"),
    "out is q": ("out", lambda a: a["q"], ValueError, "overlaps q"),
    "out inner stride": ("out", lambda a: np.zeros((ROWS, 8, 256), BF16)[..., ::2], ValueError, "inner"),
    "out misaligned": ("out", lambda a: np.zeros(ROWS * 1024 + 1, BF16)[1:].reshape(ROWS, 8, 128), ValueError, "16"),
    "out negative stride": ("out", lambda a: np.zeros((ROWS, 8, 128), BF16)[::-1], ValueError, "negative"),
    "out read-only": ("out", lambda a: _read_only(np.zeros((ROWS, 8, 128), BF16)), ValueError, "read-only"),
    "out broadcast": ("out", lambda a: strided(np.zeros((ROWS, 8, 128), BF16), (0, 256, 2)), ValueError, "overlap"),
    "lse float64": ("lse", lambda a: np.zeros((ROWS, 8)), TypeError, "float32"),
    "lse misaligned": (
        "lse", lambda a: np.zeros(ROWS * 32 + 2, np.uint8)[2:].view(np.float32).reshape(ROWS, 8), ValueError, "multiples of 4",
    ),
    "lse broadcast": ("lse", lambda a: strided(np.zeros((ROWS, 8), np.float32), (32, 0)), ValueError, "overlap"),
    "lse other shape": ("lse", lambda a: np.zeros((8, ROWS), np.float32), ValueError, "num_q_heads"),
    "lse inside k": ("lse", lambda a: a["k"].reshape(-1)[: ROWS * 32].view(np.float32).reshape(ROWS, 8), ValueError, "overlaps k"),
    "backend unknown": ("backend", lambda a: "cuda", ValueError, "portable"),
    "backend not a string": ("backend", lambda a: 3, TypeError, "auto"),
    "backend portable on host arrays": ("backend", lambda a: "portable", ValueError, "host"),
    "splits zero": ("splits", lambda a: 0, ValueError, "accepted are None and the positive integers that the backend"),
    "splits 65": ("splits", lambda a: 65, ValueError, "backend 'reference' accepts 1"),
    "splits of 5001 digits": ("splits", lambda a: 10**5000, ValueError, "an integer of 16610 bits"),
    "splits float": ("splits", lambda a: 2.0, TypeError, "integers"),
    "splits not served by the backend": ("splits", lambda a: 2, ValueError, "accepts 1"),
    "backend a long string": ("backend", lambda a: "x" * 10**5, ValueError, "..."),
    "bf16_as_uint16 an array": ("bf16_as_uint16", lambda a: a["k"] > 0, TypeError, "True and False"),
    "bf16_as_uint16 not a flag": ("bf16_as_uint16", lambda a: 1, TypeError, "True and False"),
    "enable_pdl not a flag": ("enable_pdl", lambda a: None, TypeError, "True and False"),
}


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_argument_is_refused_by_name(case):
    name, replace, error, words = REFUSALS[case]
    arguments = legal()
    arguments[name] = replace(arguments)
    with pytest.raises(error) as caught:
        prepare(**arguments)
    message = str(caught.value)
    assert name in message and words in message
    assert "\n" not in message and len(message) < 400


TENSORS = ("k", "v", "k_scale", "v_scale", "q2k_indices", "page_table", "seqused_k", "out", "lse", "workspace_buffer")


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_on_another_device_is_refused_by_name(name, monkeypatch):
    """As if it lay on a GPU: no byte of it is touched."""

    def elsewhere(given, value):
        tensor = describe(given, value)
        return dataclasses.replace(tensor, device="cuda", ordinal=1) if given == name else tensor

    monkeypatch.setattr(contract, "describe", elsewhere)
    monkeypatch.setattr(api, "describe", elsewhere)
    extra = dict(
        out=np.zeros((ROWS, 8, 128), BF16), lse=np.zeros((ROWS, 8), np.float32), workspace_buffer=np.zeros(64, np.uint8)
    )
    with pytest.raises(ValueError, match=f"^{name} lies on cuda:1 and q on cpu"):
        prepare(**legal(), **extra)


def test_outputs_that_overlap_each_other_are_refused():
    raw = np.zeros(ROWS * 8 * 256, np.uint8)
    out, lse = raw.view(BF16).reshape(ROWS, 8, 128), raw[-ROWS * 32 :].view(np.float32).reshape(ROWS, 8)
    with pytest.raises(ValueError, match="out overlaps lse"):
        prepare(**legal(), out=out, lse=lse)


def test_pages_may_lie_in_the_gaps_of_others():
    """Heads 16 KiB apart leave room for another page's between them: no tile overlaps another."""
    arguments = legal()
    raw = np.zeros(PAGES * 24576 + 8192, np.uint8)
    woven = np.lib.stride_tricks.as_strided(raw, arguments["k"].shape, (24576, 16384, 64, 1))
    woven[...] = arguments["k"]
    expected = prepare(**arguments)()
    np.testing.assert_array_equal(prepare(**(arguments | dict(k=woven)))().view(np.uint16), expected.view(np.uint16))


def test_workspace_of_one_byte_less_than_needed_is_refused():
    call = contract.validate(**legal(), softmax_scale=None, out=None, lse=None, bf16_as_uint16=False)
    workspace = describe("workspace_buffer", np.zeros(64, np.uint8))
    contract.check_workspace(workspace, 64, call)
    with pytest.raises(ValueError, match="workspace_buffer holds 64 bytes; this call needs at least 65"):
        contract.check_workspace(workspace, 65, call)


def test_legal_arguments_are_accepted():
    runner = prepare(**legal())
    assert runner() is runner.out
    assert runner.out.shape == (ROWS, HKV * GROUP, 128) and runner.lse.shape == (ROWS, HKV * GROUP)


def test_workspace_is_checked_although_the_host_backend_needs_none():
    arguments = legal()
    arguments["lse"] = np.zeros((ROWS, HKV * GROUP), np.float32)
    prepare(**arguments, workspace_buffer=np.zeros(0, np.uint8))
    for workspace, words in (
        (np.zeros(64, np.uint8)[1:], "multiples of 16"),
        (np.zeros(64, np.uint8)[::2], "contiguous"),
        (arguments["q"], "overlaps q"),
        (arguments["lse"].reshape(-1), "overlaps lse"),
        (_read_only(np.zeros(64, np.uint8)), "read-only"),
    ):
        with pytest.raises(ValueError, match="workspace_buffer.*" + words):
            prepare(**arguments, workspace_buffer=workspace)


@pytest.mark.filterwarnings("error")
def test_queries_that_are_not_finite_and_results_beyond_float32_pass_in_silence():
    arguments = legal()
    arguments["q"][0, 0], arguments["q"][1, 0, 0] = np.nan, np.inf
    runner = prepare(**(arguments | dict(k_global_scale=1e37)))
    assert np.isnan(runner()[0, 0].astype(float)).all() and not np.isnan(runner.out[0, 1].astype(float)).any()


def test_strides_of_size_one_dimensions_are_ignored():
    arguments = legal()
    arguments |= dict(
        q=arguments["q"][:, :GROUP].copy(), q2k_indices=arguments["q2k_indices"][:1], page_table=np.zeros((2, 1), np.int32)
    )
    for name in ("k", "v", "k_scale", "v_scale"):
        arguments[name] = arguments[name][:1, :1].copy()
    expected = prepare(**arguments)()
    for page, head in ((1, 1), (7, 64), (0, 8192), (3, 0)):
        odd = dict(arguments)
        for name in ("k", "v", "k_scale", "v_scale"):
            odd[name] = strided(arguments[name], (page, head, *arguments[name].strides[2:]))
        np.testing.assert_array_equal(prepare(**odd)().view(np.uint16), expected.view(np.uint16))


def test_interleaved_output_rows_do_not_count_as_overlap():
    arguments = legal()
    fused = np.zeros((ROWS, 2, HKV * GROUP, 128), BF16)
    fused[:, 0] = arguments["q"]
    arguments["q"] = fused[:, 0]
    prepare(**arguments, out=fused[:, 1])()
    with pytest.raises(ValueError, match="out overlaps q"):
        prepare(**arguments, out=fused[:, 0])


def test_bfloat16_bits_as_uint16_give_uint16_back():
    arguments = legal()
    expected = prepare(**arguments)()
    arguments["q"] = arguments["q"].view(np.uint16)
    out = prepare(**arguments, bf16_as_uint16=True)()
    assert out.dtype == np.uint16
    np.testing.assert_array_equal(out, expected.view(np.uint16))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runner_is_not_copied(duplicate):
    """A deep copy would return an `out` of its own, which its launches never write."""
    with pytest.raises(TypeError, match="prepare another"):
        duplicate(prepare(**legal()))


def test_empty_batch_and_empty_pool_are_legal():
    arguments = legal()
    nothing = dict(arguments)
    nothing |= dict(
        q=arguments["q"][:0], q2k_indices=arguments["q2k_indices"][:, :0], page_table=arguments["page_table"][:0],
        seqused_k=arguments["seqused_k"][:0],
    )
    assert prepare(**nothing)().shape == (0, HKV * GROUP, 128)
    for name in ("k", "v", "k_scale", "v_scale"):
        arguments[name] = arguments[name][:0]
    runner = prepare(**arguments)
    assert not runner().view(np.uint16).any() and np.isneginf(runner.lse).all()


def test_import_and_a_refusal_load_neither_driver_nor_frameworks():
    script = (
        "import sys\n"
        "from msa_cudacore import prepare_msa_nvfp4_sparse_decode as prepare\n"
        "try: prepare(1, 2, 3, 4, k_scale=5, v_scale=6, page_table=7, seqused_k=8, k_global_scale=1., v_global_scale=1.)\n"
        "except TypeError as error: print(error)\n"
        "print([m for m in ('torch', 'cupy', 'cuda.bindings.driver', 'cuda.core') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [
        "q is a int; accepted are torch tensors, CuPy and NumPy arrays, and objects with __dlpack__", "[]",
    ]


ON_A_DEVICE = {
    # What only the device can refuse: one of compute capability 8.0, which merges splits through a workspace.
    "splits not served": (dict(splits=3), "splits is 3"),
    "enable_pdl": (dict(enable_pdl=True), "enable_pdl is True"),
    "workspace too small": (dict(splits=8, workspace_buffer=np.zeros(16, np.uint8)), "workspace_buffer holds 16 bytes"),
    "workspace overlaps": (dict(splits=1, workspace_buffer="q"), "workspace_buffer overlaps q"),
}


@pytest.fixture
def on_a_device(monkeypatch):
    """Host arrays described as if they lay on a GPU; lists what a call allocates, and reads of the device."""
    traces = []

    def facts(ordinal):
        traces.append("properties")
        return DeviceFacts(ordinal, "part", (8, 0), 108, 164 * 1024, 164 * 1024, clusters=False)

    for module in (contract, api):
        monkeypatch.setattr(
            module, "describe", lambda name, value: dataclasses.replace(describe(name, value), device="cuda")
        )
        monkeypatch.setattr(module, "allocate_like", lambda q, name, shape, dtype: traces.append(name))
    monkeypatch.setattr(device_module, "facts", facts)
    return traces


@pytest.mark.parametrize("case", [case for case in REFUSALS if REFUSALS[case][0] != "splits" and "host" not in case])
def test_a_refused_call_allocates_nothing_and_reads_no_device(on_a_device, case):
    name, replace, error, words = REFUSALS[case]
    arguments = legal()
    arguments[name] = replace(arguments)
    with pytest.raises(error) as caught:
        prepare(**arguments)
    assert words in str(caught.value) and on_a_device == []


@pytest.mark.parametrize("splits", [0, 2.0, "2", -1])
def test_what_is_no_split_factor_is_refused_before_the_device_is_read(on_a_device, splits):
    with pytest.raises((TypeError, ValueError), match="^splits is "):
        prepare(**legal(), splits=splits)
    assert on_a_device == []


@pytest.mark.parametrize("case", ON_A_DEVICE)
def test_a_call_that_the_device_refuses_allocates_nothing(on_a_device, case):
    change, words = ON_A_DEVICE[case]
    arguments = legal()
    arguments |= {name: arguments.get(value, value) if isinstance(value, str) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=f"^{words}"):
        prepare(**arguments)
    assert on_a_device == ["properties"]

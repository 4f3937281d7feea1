"""A toy decode engine around the attention: two layers, pages for the requests, two batch buckets, one workspace.

What to copy: `CacheWriter`, which may be captured in a CUDA graph, and how `Engine` binds its arrays once and
overwrites them for each step. On a GPU each bucket is a CUDA graph, from the model's input to its output; on a
CPU the same code runs eagerly on the reference backend. The model itself is noise.
"""

import numpy as np
import torch

from msa_cudacore import msa_nvfp4_decode_workspace_size, prepare_msa_nvfp4_sparse_decode
from msa_cudacore.pool import PAGE_SIZE, page_bytes, pool_views, slot_mapping
from msa_cudacore.reference import compare, decode
from msa_cudacore.transfer import to_numpy

LAYERS, Q_HEADS, KV_HEADS, HIDDEN, TOPK = 2, 16, 2, 64, 16
NUM_PAGES, MAX_PAGES, BUCKETS = 60, 24, (2, 4)  # pages of the pool, pages of a request, batch sizes
GLOBAL_SCALES = {"k_global_scale": 0.01, "v_global_scale": 0.02}  # at least the largest |value| / 2688


def rounding_bounds(values: torch.Tensor) -> torch.Tensor:
    """Up to where a number rounds to each of these, for torch.bucketize: to nearest, ties to even ranks."""
    middle = (values[:-1] + values[1:]) / 2
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros_like(middle[1::2]))
    return middle


class CacheWriter:
    """Quantises new tokens into one layer's pages: the bytes of `msa_cudacore.pool.write_tokens`.

    Nothing depends on values, waits for the device or comes from the host, so a call may be captured. K and V must
    be finite and slots lie in the pool: a captured writer cannot refuse them. A negative slot goes to the scratch
    page, which no page table may name; skipping it would need a shape that depends on values.
    """

    def __init__(self, views, k_global_scale: float, v_global_scale: float, scratch_page: int):
        device = views.k.device
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        self.e4m3, self.e4m3_bounds = e4m3.to(device), rounding_bounds(e4m3).to(device)
        self.e2m1_bounds = rounding_bounds(e2m1).to(device)
        # On the device, because torch's CUDA kernels multiply by the reciprocal of a number from the host.
        self.scales = torch.tensor([k_global_scale, v_global_scale], dtype=torch.float64, device=device)
        self.scratch_slot = scratch_page * PAGE_SIZE
        self.k, self.v, k_scale, v_scale = views
        self.k_scale = k_scale.view(torch.uint8)
        # The swizzle keeps one group's scales of four tokens side by side: [page, head, four tokens, group, token].
        self.v_scale = v_scale.view(torch.uint8).view(*v_scale.shape[:2], PAGE_SIZE // 4, 8, 4)

    def __call__(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write k and v [tokens, KV heads, 128] to slots [tokens], page * 128 + offset; negative is padding."""
        slots = slots.long().masked_fill(slots < 0, self.scratch_slot)
        page, token = slots // PAGE_SIZE, slots % PAGE_SIZE
        self.k[page, :, token], self.k_scale[page, :, token] = self.quantize(k, self.scales[0])
        self.v[page, :, token], self.v_scale[page, :, token // 4, :, token % 4] = self.quantize(v, self.scales[1])

    def quantize(self, values: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # float64, as on the host: rounded to float32 on the way, a near tie would fall to the other side.
        blocks = values.double().unflatten(-1, (-1, 16))
        scales = torch.bucketize(blocks.abs().amax(-1) / (6 * global_scale), self.e4m3_bounds)
        step = self.e4m3[scales] * global_scale
        # A block whose scale is zero gets zeros, with their signs.
        scaled = blocks / step.masked_fill(step == 0, float("inf")).unsqueeze(-1)
        codes = (torch.bucketize(scaled.abs(), self.e2m1_bounds) + 8 * scaled.signbit()).flatten(-2)
        return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), scales.to(torch.uint8)


class Engine:
    def __init__(self, device: str):
        torch.manual_seed(0)
        bf16, int32 = ({"dtype": dtype, "device": device} for dtype in (torch.bfloat16, torch.int32))
        most = max(BUCKETS)
        # One allocation: a page of every layer lies under one page id. The last page is scratch.
        self.pool = torch.zeros(NUM_PAGES + 1, LAYERS, page_bytes(KV_HEADS), dtype=torch.uint8, device=device)
        self.views = [pool_views(self.pool[:, layer], KV_HEADS) for layer in range(LAYERS)]
        self.writers = [CacheWriter(views, **GLOBAL_SCALES, scratch_page=NUM_PAGES) for views in self.views]
        self.free_pages, self.requests = list(range(NUM_PAGES)), {}

        sizes = torch.tensor([Q_HEADS, KV_HEADS, KV_HEADS]) * 128
        self.sizes, self.to_qkv, self.to_hidden, self.scores = sizes.tolist(), [], [], []
        for _ in range(LAYERS):
            self.to_qkv.append((torch.randn(HIDDEN, int(sizes.sum())) / HIDDEN**0.5).to(**bf16))
            self.to_hidden.append((torch.randn(Q_HEADS * 128, HIDDEN) / (Q_HEADS * 128) ** 0.5).to(**bf16))
            self.scores.append(torch.rand(KV_HEADS, 1, MAX_PAGES, device=device))  # a model has an indexer instead
        self.blocks = torch.arange(MAX_PAGES, **int32)

        # What the host writes before a step. All buckets and layers share these arrays and those below.
        self.hidden = torch.zeros(most, HIDDEN, **bf16)
        self.page_table = torch.full((most, MAX_PAGES), -1, **int32)
        self.seqused_k = torch.zeros(most, **int32)
        self.slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        # What a step writes itself.
        self.q, self.out = torch.zeros(2, most, Q_HEADS, 128, **bf16)
        self.lse = torch.empty(most, Q_HEADS, device=device)
        self.q2k = torch.full((KV_HEADS, most, TOPK), -1, **int32)
        self.result = torch.zeros(most, HIDDEN, **bf16)

        size = msa_nvfp4_decode_workspace_size(most, KV_HEADS, device, topk=TOPK, group=Q_HEADS // KV_HEADS)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        # A graph does not keep its runners alive; the engine does.
        self.runners = {
            (layer, n): prepare_msa_nvfp4_sparse_decode(
                self.q[:n], views.k, views.v, self.q2k[:, :n], k_scale=views.k_scale, v_scale=views.v_scale,
                page_table=self.page_table[:n], seqused_k=self.seqused_k[:n], **GLOBAL_SCALES,
                workspace_buffer=workspace, out=self.out[:n], lse=self.lse[:n],
            )
            for n in BUCKETS for layer, views in enumerate(self.views)
        }  # fmt: skip
        self.graphs = {}
        if device == "cuda":
            for n in BUCKETS:
                self.forward(n)  # cuBLAS allocates on its first call; all rows are padding still
                self.graphs[n] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[n]):
                    self.forward(n)

    def forward(self, n: int, after_attention=lambda layer: None) -> None:
        """All layers for the first n rows of the bound arrays: what a graph captures."""
        hidden = self.hidden[:n]
        for layer in range(LAYERS):
            q, k, v = (part.unflatten(-1, (-1, 128)) for part in (hidden @ self.to_qkv[layer]).split(self.sizes, -1))
            self.q[:n] = q
            self.writers[layer](k, v, self.slots[:n])
            self.select(layer, n)
            attention = self.runners[layer, n]()
            after_attention(layer)
            hidden = hidden + attention.flatten(1) @ self.to_hidden[layer]
        self.result[:n] = hidden

    def select(self, layer: int, n: int) -> None:
        """The newest block and the best of the others; ascending, padded with -1."""
        newest = (self.seqused_k[:n] - 1).div(PAGE_SIZE, rounding_mode="floor").unsqueeze(-1)
        scores = self.scores[layer].masked_fill(self.blocks == newest, float("inf"))
        best = scores.masked_fill(self.blocks > newest, -1.0).topk(TOPK).indices
        best = best.masked_fill(best > newest, MAX_PAGES).sort().values
        self.q2k[:, :n] = best.masked_fill(best == MAX_PAGES, -1)

    def extend(self, request: int, tokens: int) -> np.ndarray:
        """Slots for new tokens of a request, with pages for them."""
        state = self.requests.setdefault(request, {"pages": [], "length": 0})
        positions = state["length"] + np.arange(tokens)
        state["length"] += tokens
        while len(state["pages"]) * PAGE_SIZE < state["length"]:
            state["pages"].append(self.free_pages.pop())
        return slot_mapping(np.array([state["pages"]]), 0, positions)

    def add(self, request: int, prompt: torch.Tensor) -> None:
        """Fill the cache for a prompt [tokens, hidden]; prompts attend by another kernel than this package's."""
        slots = torch.from_numpy(self.extend(request, len(prompt))).to(prompt.device)
        for layer in range(LAYERS):
            _, k, v = (part.unflatten(-1, (-1, 128)) for part in (prompt @ self.to_qkv[layer]).split(self.sizes, -1))
            self.writers[layer](k, v, slots)

    def remove(self, request: int) -> None:
        self.free_pages += self.requests.pop(request)["pages"]

    def step(self, hidden: dict[int, torch.Tensor], check: bool = False) -> dict[int, torch.Tensor]:
        """Decode one token of each request: its input [hidden] to its output [hidden]."""
        n = min(bucket for bucket in BUCKETS if bucket >= len(hidden))
        table, lengths, slots = np.full((n, MAX_PAGES), -1, np.int32), np.zeros(n, np.int32), np.full(n, -1)
        for row, request in enumerate(hidden):
            slots[row] = self.extend(request, 1)[0]
            pages = self.requests[request]["pages"]
            table[row, : len(pages)], lengths[row] = pages, self.requests[request]["length"]
            self.hidden[row] = hidden[request]
        for bound, values in ((self.page_table, table), (self.seqused_k, lengths), (self.slots, slots)):
            bound[:n] = torch.from_numpy(values)
        self.graphs[n].replay() if n in self.graphs else self.forward(n)
        if check:
            self.check(n, live=len(hidden))
        return {request: self.result[row].clone() for row, request in enumerate(hidden)}

    def check(self, n: int, live: int) -> None:
        """The same step again, eagerly, each layer held against the oracle; the result has the same bits."""
        result = self.result[:n].clone()

        def after_attention(layer: int) -> None:
            bound = {"q": self.q[:n], "q2k_indices": self.q2k[:, :n], **self.views[layer]._asdict(),
                     "page_table": self.page_table[:n], "seqused_k": self.seqused_k[:n]}  # fmt: skip
            exact = decode(**{name: to_numpy(array) for name, array in bound.items()}, **GLOBAL_SCALES)
            out, lse = to_numpy(self.out[:n]), to_numpy(self.lse[:n])
            report = compare(out, lse, *exact)
            assert report, report
            assert not out[live:].any() and (lse[live:] == -np.inf).all()  # rows that pad the bucket
            print(f"{live} requests in a bucket of {n}, layer {layer}: {report}")

        self.forward(n, after_attention)
        assert torch.equal(self.result[:n], result)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Engine(device)
    hidden = lambda *shape: torch.randn(*shape, HIDDEN, dtype=torch.bfloat16, device=device)  # noqa: E731
    for request, length in enumerate((254, 100, 2500)):
        engine.add(request, hidden(length))
    for step in range(4):  # request 0 begins its third page in the third step
        results = engine.step({request: hidden() for request in engine.requests}, check=True)
        if step == 2:
            engine.remove(1)
    print(f"{engine.runners[0, BUCKETS[0]].program}, {'graph replay' if engine.graphs else 'eager'}: done")

// One warp: ldmatrix of a 16 x 16 tile and one mma.sync. a, b: [16][16] 16-bit words; out: [16][8] float.
#include "ldmatrix.cuh"
#include "mma_sync.cuh"
#include "instructions.cuh"

extern "C" __global__ void __launch_bounds__(32) fragments(const u16* a, const u16* b, float* out) {
  __shared__ alignas(128) u16 ta[16 * 16];
  __shared__ alignas(128) u16 tb[16 * 16];
  const u32 lane = threadIdx.x;
  for (u32 i = lane; i < 256; i += 32) {
    if (fault != Fault::hole_in_tile || i != 100) ta[i] = a[i];
    tb[i] = b[i];
  }
  __syncwarp();
  // A is stored transposed, so that the transposing load gives its rows: matrix l / 8 covers rows 8 * (l / 8 % 2) of A.
  const u32 row = lane % 8 + lane / 16 * 8, column = lane / 8 % 2 * 8;
  const u32 shift = fault == Fault::misaligned_row ? 2 * (lane % 8) : fault == Fault::row_past_the_end ? 0x40000 : 0;
  u32 ra[4], rb[4];
  ptx::ldmatrix_x4_trans_b16(ptx::shared_address(&ta[row * 16 + column]) + shift, ra);  // <- misaligned_row row_past_the_end hole_in_tile
  ptx::ldmatrix_x4_trans_b16(ptx::shared_address(&tb[(lane % 16) * 16 + lane / 16 * 8]), rb);
  float c[4] = {0, 0, 0, 0};
  const uint4 fragment = make_uint4(ra[0], ra[1], ra[2], ra[3]);
  if (fault == Fault::mma_by_half_a_warp) {
    if (lane < 16) ptx::mma_sync_m16n8k16_f32_f16(c, fragment, rb[0], rb[1]);  // <- mma_by_half_a_warp
    if (lane < 16) out[lane] = c[0];
    return;
  }
  ptx::mma_sync_m16n8k16_f32_f16(c, fragment, rb[0], rb[1]);
  const u32 g = lane / 4, t = lane % 4;
  out[g * 8 + 2 * t] = c[0];
  out[g * 8 + 2 * t + 1] = c[1];
  out[(g + 8) * 8 + 2 * t] = c[2];
  out[(g + 8) * 8 + 2 * t + 1] = c[3];
}

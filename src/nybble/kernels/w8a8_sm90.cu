// y[m, n] = sum over k of w[n, k] * x[m, k], scaled, on Hopper, sm_90a, compiled by NVRTC: int8 with int32 sums, FP8 E4M3, or
// 16 bits unscaled.
//
// One thread copies weights, one activations (the same one for small tiles and BLOCKS), one the scales of BLOCKS. WARPGROUPS
// multiply, 64 weight rows each: the tensor core's rows, tokens its columns (KIND 3: the other way round). Both operands come
// from shared memory: weights packed in tiles of 64 rows x 128 channels that already have the 128-byte swizzle, activations
// through a tensor map. CLUSTER blocks with neighbouring row tiles share the tokens: each copies its part to all.
//
// FP8 products are added in the tensor core with about 14 bits. So that a long sum does not cost its low bits, that of 16
// steps, or of one where scales change every 128 channels, goes to a float32 one beside it. Channels in order, whatever the
// tile: a token's result does not depend on the batch.
//
// 16-bit weights are not packed: they too come through a map, rows in their order, 64 channels a step. A tile may be of any
// ROWS, in eights: what its last warpgroup lacks it multiplies and does not store. SHARES blocks of a cluster then have a part
// of the channels each, and add up in the order of the parts, every block an equal part of the tokens.
//
// Defined by the host: KIND (0 int8, 1 FP8 with scales per token and row, 2 FP8 with scales per token, row and 128 channels, 3
// the same with one scale for 128 rows, 4 16 bits), TOKENS (a tile's), COLUMNS (of a product: TOKENS, or 64 or 128 weight
// rows), STAGES, WARPGROUPS, RESIDENT (blocks a processor must hold), CLUSTER, SHARES, ROWS (KIND 4: a tile's), REGISTERS (of
// a multiplying thread, taken from the copying ones that then number 128; 0: all alike), STAGED (outputs leave through shared
// memory, 64 tokens at a time: where a warpgroup's weights of the last two steps were), those of sm90.cuh; and `product(Sum
// (&sum)[COLUMNS / 2], u64 rows, u64 columns, int add)`. Or QUANTIZE, see the end.

#ifndef QUANTIZE
constexpr bool TURNED = KIND == 3, BLOCKS = KIND == 2 || KIND == 3, HALVES = KIND == 4;
constexpr int COPIERS = REGISTERS ? 128 : BLOCKS ? 64 : 32, GROUP = CLUSTER * SHARES;  // blocks that start together
constexpr int ROWS64 = TURNED ? COLUMNS / 64 : WARPGROUPS, BM = HALVES ? ROWS : 64 * ROWS64;
// The warps that copy what; one alone would be busy with a step's copies for as long as its products take.
enum Copies : int { WEIGHTS, SCALES, ACTIVATIONS = REGISTERS && !BLOCKS ? 2 : 0 };
constexpr int TILE = 8192;  // bytes of 64 rows x 128 channels
constexpr int W_BYTES = BM * 128, X_BYTES = TOKENS * 128, S_BYTES = BLOCKS ? (BM + TOKENS) * 4 : 0;
constexpr int X_AT = STAGES * W_BYTES, S_AT = X_AT + STAGES * X_BYTES;  // weights first: rows that a tile lacks read past them
constexpr int BARRIERS_AT = S_AT + STAGES * S_BYTES;
// Scales of a tile's tokens are read before its products; many wait in shared memory.
constexpr bool HELD = KIND < 2 && TOKENS > 64;
constexpr int HELD_AT = BARRIERS_AT + 16 * STAGES, HELD_BYTES = (TOKENS + 63) / 64 * 256;
[[maybe_unused]] constexpr int OUTPUTS = BLOCKS ? 1 : 2;  // stages for outputs on their way
constexpr int GROUPS = TOKENS / 8, BATCH = GROUPS < 8 ? GROUPS : 8;  // groups of eight tokens that leave together
constexpr int WAVES = TURNED ? TOKENS / (64 * WARPGROUPS) : 1;  // of 64 tokens
constexpr int SHARE = TOKENS / CLUSTER;  // tokens that one block of a cluster copies
constexpr int SUMS_AT = BARRIERS_AT + 16 * STAGES;                                 // SHARES > 1: a barrier, where HELD would be
constexpr int OWNED = (GROUPS + SHARES - 1) / SHARES, PIECE = WARPGROUPS * 2048;  // of the sums; four of every thread
static_assert(SHARES == 1 || HALVES && !STAGED && (SHARES - 1) * OWNED * PIECE <= BARRIERS_AT, "sums meet where the stages were");
static_assert(64 * ROWS64 * 128 - W_BYTES <= STAGES * X_BYTES, "rows that a tile lacks are read from memory that is there");
static_assert(SHARE % 8 == 0 && (!STAGED || TOKENS % 16 == 0), "whole swizzles of 8 tokens; outputs leave by 16");

// What a map describes, to the same address and barrier of CLUSTER blocks from `first` on.
__device__ __forceinline__ void copy_box_to_all(u32 to, const TensorMap* map, int column, int row, u32 barrier, int first) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier),
      "h"((unsigned short)(((1 << CLUSTER) - 1) << first)), "l"(EVICT_LAST)
      : "memory");
}
__device__ __forceinline__ void send(u32 to, const Sum* four, u32 barrier) {  // to a block of the cluster
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"((float)four[0]), "f"((float)four[1]), "f"((float)four[2]), "f"((float)four[3]), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ float2 load_shared_pair(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}

// Registers of a product are not touched before here: the compiler does not see what `wait_products` waited for.
__device__ __forceinline__ void hold(Sum (&part)[COLUMNS / 2]) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++)
    if (KIND) asm volatile("" : "+f"(*(float*)&part[i])::"memory");
}

struct Arguments {
  const char* w;         // [N / 64, K / 128] packed tiles; of 16 bits a map has them
  const float *w_scale;  // [N padded to 128], BLOCKS: [K / 128, N padded]
  const float *x_scale;  // [tokens], BLOCKS: [K / 128, x_stride]
  void* y;
  int tokens, rows, padded_rows, steps, row_tiles, token_tiles, order, x_stride, first;
  // row_tiles: groups of CLUSTER row tiles, from the `first` tile on
};

struct Place {
  int row_tile, token_tile;
  __device__ __forceinline__ Place(const Arguments& a, int tile) {
    locate(a, tile, row_tile, token_tile);
    row_tile = a.first + row_tile * CLUSTER + blockIdx.x % CLUSTER;
  }
};

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + COPIERS, RESIDENT)
    w8a8(const __grid_constant__ TensorMap tokens_map, const __grid_constant__ TensorMap y_map,
         const __grid_constant__ TensorMap weights_map, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = shared_address(shared), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, rank = blockIdx.x % CLUSTER;
  const int clusters = gridDim.x / GROUP, cluster = blockIdx.x / GROUP, tiles = a.row_tiles * a.token_tiles;
  const bool copies = threadIdx.x == WARPGROUPS * 128;
  const int share = SHARES > 1 ? blockIdx.x % GROUP / CLUSTER : 0, from = a.steps * share / SHARES;
  const int steps = SHARES > 1 ? a.steps * (share + 1) / SHARES - from : a.steps;
  const int units = (tiles - cluster + clusters - 1) / clusters * steps;

  auto copy_weights = [&](int stage, const Place& p, int step) {
    const u64 policy = a.token_tiles > 1 ? EVICT_NORMAL : EVICT_FIRST;
    const u32 barrier = full + 8 * stage;
    expect(barrier, W_BYTES + X_BYTES + S_BYTES);
    if (HALVES) {
      copy_box(base + stage * W_BYTES, &weights_map, (from + step) * 128, p.row_tile * BM, barrier, policy);
      return;
    }
    const int last = (a.rows + 63) / 64 - 1;
#pragma unroll
    for (int i = 0; i < ROWS64; i++) {
      const size_t block = min(p.row_tile * ROWS64 + i, last);
      bulk_copy(base + stage * W_BYTES + i * TILE, a.w + (block * a.steps + step) * TILE, TILE, barrier, policy);
    }
  };
  auto copy_activations = [&](int stage, const Place& p, int step) {
    const u32 to = base + X_AT + stage * X_BYTES, barrier = full + 8 * stage;
    const int token = p.token_tile * TOKENS;
    if (CLUSTER == 1)
      copy_box(to, &tokens_map, (from + step) * 128, token, barrier, EVICT_LAST);
    else
      copy_box_to_all(to + rank * SHARE * 128, &tokens_map, (from + step) * 128, token + rank * SHARE, barrier, share * CLUSTER);
  };
  auto copy_scales = [&](int stage, const Place& p, int step) {
    const u32 to = base + S_AT + stage * S_BYTES, barrier = full + 8 * stage;
    const int row = min(p.row_tile * BM, a.padded_rows - BM);
    bulk_copy(to, a.w_scale + (size_t)step * a.padded_rows + row, BM * 4, barrier, EVICT_NORMAL);
    bulk_copy(to + BM * 4, a.x_scale + (size_t)step * a.x_stride + p.token_tile * TOKENS, TOKENS * 4, barrier, EVICT_LAST);
  };

  int loaded = 0;
  if (copies) {
    fetch_map(&tokens_map);
    if (STAGED) fetch_map(&y_map);
    if (HALVES) fetch_map(&weights_map);
    constexpr int ARRIVALS = WARPGROUPS * (BLOCKS ? 4 : 1) * CLUSTER;
    for (int i = 0; i < STAGES; i++) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, ARRIVALS);
    if (SHARES > 1) init_barrier(base + SUMS_AT, 1);
    fence_barriers();
    if (SHARES > 1) expect(base + SUMS_AT, (SHARES - 1) * (GROUPS / SHARES + (share < GROUPS % SHARES)) * PIECE);
    const Place p(a, cluster);  // weights need not wait for the kernel before this one
    for (; loaded < min(STAGES, steps); loaded++) copy_weights(loaded, p, loaded);
    launch_next();
  }
  __syncthreads();
  if (GROUP > 1) cluster_meet();
  wait_kernel_before();

  if (warpgroup == WARPGROUPS) {
    if (REGISTERS) fewer_registers<WARPGROUPS == 2 ? 40 : 32>();
    const int warp = thread / 32;
    if (thread % 32 == 0 && (warp == WEIGHTS || warp == ACTIVATIONS || BLOCKS && warp == SCALES)) {
      int stage = 0, parity = 1, unit = 0;
      for (int tile = cluster; unit < units; tile += clusters) {
        const Place p(a, tile);
        for (int step = 0; step < steps; step++, unit++) {
          if (unit >= (copies ? loaded : STAGES)) {
            wait(empty + 8 * stage, parity);
            if (warp == WEIGHTS) copy_weights(stage, p, step);
          }
          if (warp == ACTIVATIONS) copy_activations(stage, p, step);
          if (BLOCKS && warp == SCALES) copy_scales(stage, p, step);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
    __syncwarp();
    if (GROUP > 1) cluster_meet();  // nobody copies into, or arrives at, a block that has left
    return;
  }

  if (REGISTERS) more_registers<REGISTERS ? REGISTERS : 232>();
  auto release = [&](int stage) {  // products end for the whole warpgroup, reading scales for a warp alone
    if (BLOCKS) __syncwarp();
    const int lane = BLOCKS ? thread % 32 : thread;
    if (CLUSTER == 1) {
      if (lane == 0) arrive(empty + 8 * stage);
    } else if (lane < CLUSTER)
      arrive_at(empty + 8 * stage, share * CLUSTER + lane);
  };
  const int quad = thread % 4;
  int stage = 0, parity = 0;
  for (int tile = cluster; tile < tiles; tile += clusters) {
    const Place p(a, tile);
    [[maybe_unused]] int before = -1, last_but_one = -1;
    auto issue = [&](Sum(&part)[COLUMNS / 2], int wave, int add) {
      const u32 w = base + stage * W_BYTES, x = base + X_AT + stage * X_BYTES;
      const u64 rows = swizzled_operand(TURNED ? x + (warpgroup * WAVES + wave) * TILE : w + warpgroup * TILE);
      const u64 columns = swizzled_operand(TURNED ? w : x);
      if (KIND && !HALVES) hold(part);
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) product(part, rows + 2 * k, columns + 2 * k, k ? 1 : add);
      products_commit();
    };
    auto advance = [&] {
      before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    };
#if KIND == 3
    Sum sum[WAVES][COLUMNS / 2], part[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < WAVES * COLUMNS / 2; i++) sum[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = 0;
    const int token = warpgroup * WAVES * 64 + thread / 32 * 16 + thread % 32 / 4;  // a thread's first in the tile
    for (int step = 0; step < a.steps; step++) {
      wait(full + 8 * stage, parity);
      const u32 scales = base + S_AT + stage * S_BYTES;
      float by[WAVES][2];
#pragma unroll
      for (int i = 0; i < 2 * WAVES; i++)
        by[i / 2][i % 2] = load_shared_float(scales) * load_shared_float(scales + (BM + token + i / 2 * 64 + i % 2 * 8) * 4);
#pragma unroll
      for (int wave = 0; wave < WAVES; wave++) {
        issue(part, wave, 0);
        wait_products<0>();
        hold(part);
        if (wave + 1 == WAVES) release(stage);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) sum[wave][i] = fmaf(part[i], by[wave][i / 2 % 2], sum[wave][i]);
      }
      advance();
    }
    // Of one token a thread has four neighbouring rows in two groups of eight columns.
#pragma unroll
    for (int i = 0; i < WAVES * COLUMNS / 8; i++) {
      const int wave = i / (COLUMNS / 8), j = i / 2 % (COLUMNS / 16), h = i % 2;
      const int t = p.token_tile * TOKENS + token + wave * 64 + h * 8, row = p.row_tile * BM + j * 16 + quad * 4;
      const Sum *even = &sum[wave][8 * j + 2 * h], *odd = even + 4;
      const float v[4] = {even[0], odd[0], even[1], odd[1]};
      if (t >= a.tokens || row >= a.rows) continue;
      const size_t at = (size_t)t * a.rows + row;
      if (a.rows % 4 == 0) {
        if (OUT == 2)
          ((float4*)a.y)[at / 4] = make_float4(v[0], v[1], v[2], v[3]);
        else
          ((uint2*)a.y)[at / 4] = {two_halves(v[0], v[1]), two_halves(v[2], v[3])};
      } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
          if (row + r < a.rows) store_one(a.y, at + r, v[r]);
      }
    }
#else
    // A thread's rows: this and the next; of 16 bits, when neighbours have exchanged, also those 8 below, of every second token.
    const int odd = HALVES ? thread / 4 % 2 : 0, pair = thread % 32 / 4 * (HALVES ? 1 : 2) - odd;
    const int row_of_thread = p.row_tile * BM + warpgroup * 64 + thread / 32 * 16 + pair;
    const int last_row = HALVES ? min(a.rows, (p.row_tile + 1) * BM) : a.rows;
    const int first = p.token_tile * TOKENS + quad * 2;
    float scale[2] = {1, 1}, held[HELD ? (TOKENS + 127) / 128 : 2 * BATCH];
    if (KIND < 2) {
#pragma unroll
      for (int i = 0; i < 2; i++) scale[i] = __ldg(a.w_scale + min(row_of_thread + i, a.padded_rows - 1));
#pragma unroll
      for (int i = 0; i < sizeof(held) / 4; i++) {
        const int token = HELD ? p.token_tile * TOKENS + thread + i * 128 : first + i / 2 * 8 + i % 2;
        held[i] = token < a.tokens ? load_float(a.x_scale + token * a.x_stride) : 1;
      }
    }
    Sum sum[COLUMNS / 2];
#if KIND != 2
#if KIND == 1
    Sum part[COLUMNS / 2];
#else
    Sum(&part)[COLUMNS / 2] = sum;  // int32 and float32 hold all of it
#endif
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; j++) sum[j] = 0;
    constexpr int EVERY = KIND == 1 ? 16 : 1 << 28;
    // Every second 64 rows are half a turn ahead, so that one warpgroup adds while the other one's products run.
    for (int step = 0, end = (p.row_tile * WARPGROUPS + warpgroup) % 2 ? EVERY / 2 : EVERY; step < steps; end += EVERY) {
#pragma unroll 1
      for (const int begin = step; step < min(end, steps); step++) {
        wait(full + 8 * stage, parity);
        issue(part, 0, step - begin);
        wait_products<1>();
        if (STAGED && step + 1 == steps)
          last_but_one = before;
        else if (before >= 0)
          release(before);
        advance();
      }
      wait_products<0>();
      if (!STAGED || step + 1 < steps) release(before), before = -1;
      hold(part);
#pragma unroll
      for (int j = 0; KIND == 1 && j < COLUMNS / 2; j++) sum[j] += part[j];
    }
#else
    auto promote = [&](Sum(&part)[COLUMNS / 2], int at) {
      const u32 scales = base + S_AT + at * S_BYTES;
      hold(part);
      const float2 by = load_shared_pair(scales + (warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < TOKENS / 8; i++) {
        float* four = &sum[4 * i];
        const float2 x = load_shared_pair(scales + (BM + 8 * i + 2 * quad) * 4);
        four[0] = fmaf(part[4 * i], by.x * x.x, four[0]), four[1] = fmaf(part[4 * i + 1], by.x * x.y, four[1]);
        four[2] = fmaf(part[4 * i + 2], by.y * x.x, four[2]), four[3] = fmaf(part[4 * i + 3], by.y * x.y, four[3]);
      }
    };
    // A step's sums are added while the next one's products run. First zeros are added, and nothing may be peeled off: the
    // compiler then loses track and serializes the products (C7514).
    Sum one[COLUMNS / 2], two[COLUMNS / 2];
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; j++) sum[j] = two[j] = 0;
    auto round = [&](Sum(&now)[COLUMNS / 2], Sum(&other)[COLUMNS / 2]) {
      wait(full + 8 * stage, parity);
      issue(now, 0, 0);
      wait_products<1>();
      promote(other, before < 0 ? stage : before);
      if (before >= 0) release(before);
      advance();
    };
    int step = 0;
    for (; step + 1 < a.steps; step += 2) round(one, two), round(two, one);
    if (step < a.steps) {
      round(one, two);
      wait_products<0>();
      promote(one, before);
    } else {
      wait_products<0>();
      promote(two, before);
    }
    if (!STAGED) release(before);
#endif
#if SHARES > 1
    cluster_meet();  // all have multiplied: sums may be where stages were
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const int owner = group % SHARES, slot = (share - (share > owner)) * OWNED + group / SHARES;
      const u32 block = owner * CLUSTER + rank;
      if (owner != share)
        send(in_cluster(base + slot * PIECE + threadIdx.x * 16, block), &sum[group * 4], in_cluster(base + SUMS_AT, block));
    }
    wait(base + SUMS_AT, 0);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      if (group % SHARES != share) continue;
      float* four = &sum[group * 4];
      float mine[4], total[4];
#pragma unroll
      for (int i = 0; i < 4; i++) mine[i] = four[i];
#pragma unroll
      for (int s = 0; s < SHARES; s++) {
        const int slot = (s - (s > share)) * OWNED + group / SHARES;
        const uint4 other = s == share ? uint4{} : load_shared(base + slot * PIECE + threadIdx.x * 16);
        const u32 bits[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float part = s == share ? mine[i] : __uint_as_float(bits[i]);
          total[i] = s ? total[i] + part : part;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) four[i] = total[i];
    }
#endif
    const u32 scales = base + HELD_AT + warpgroup * HELD_BYTES;
    if (HELD) {
      if (!STAGED) sync_threads(1 + warpgroup, 128);
#pragma unroll
      for (int i = 0; i < sizeof(held) / 4; i++)
        if (thread + i * 128 < TOKENS)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + (thread + i * 128) * 4), "f"(held[i]) : "memory");
      sync_threads(1 + warpgroup, 128);
    }
#pragma unroll
    for (int block = 0; block < GROUPS; block += BATCH) {
      float by[2 * BATCH];
#pragma unroll
      for (int i = 0; i < 2 * BATCH; i++)
        by[i] = HELD ? load_shared_float(scales + ((block + i / 2) * 8 + quad * 2 + i % 2) * 4) : KIND < 2 ? held[i] : 1;
      auto values = [&](int i) {  // of one token, two neighbouring rows
        const int group = block + i / 2;
        const Sum* four = &sum[group * 4];
        if (HALVES) {
          const float a = four[i % 2 * 2], b = four[i % 2 * 2 + 1], got = __shfl_xor_sync(~0u, odd ? a : b, 4);
          return odd ? float2{got, b} : float2{a, got};
        }
        return float2{(float)four[i % 2] * scale[0] * by[i], (float)four[2 + i % 2] * scale[1] * by[i]};
      };
#if STAGED
      const u32 buffer = base + (block / 8 % OUTPUTS ? last_but_one : before) * W_BYTES + warpgroup * TILE;
      if (block >= 8 * OUTPUTS || !HELD) {  // what was in this buffer has left it
        if (thread == 0) wait_stores_read<OUTPUTS - 1>();
        sync_threads(1 + warpgroup, 128);
      }
#pragma unroll
      for (int i = 0; i < 2 * min(BATCH, GROUPS - block); i++) {
        const int token = quad * 2 + i / 2 * 8 + (HALVES ? odd : i % 2), at = thread / 32 * 16 + pair + (HALVES ? i % 2 * 8 : 0);
        const float2 v = values(i);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(buffer + token * 128 + ((at / 8 ^ token % 8) << 4) + at % 8 * 2),
                     "r"(two_halves(v.x, v.y))
                     : "memory");
      }
      fence_for_copies();
      sync_threads(1 + warpgroup, 128);
      if (thread == 0) {
        const int column = (p.row_tile * BM + warpgroup * 64) * 2;
        for (int i = 0; i < min(BATCH, GROUPS - block) * 8; i += 16)
          store_box(&y_map, buffer + i * 128, column, p.token_tile * TOKENS + block * 8 + i);
        commit_stores();
      }
#else
#pragma unroll
      for (int i = 0; i < 2 * BATCH; i++) {
        if (block + i / 2 >= GROUPS || SHARES > 1 && (block + i / 2) % SHARES != share) continue;
        const int token = first + (block + i / 2) * 8 + (HALVES ? odd : i % 2), row = row_of_thread + (HALVES ? i % 2 * 8 : 0);
        const float2 v = values(i);
        if (row >= last_row || token >= a.tokens) continue;
        const size_t at = (size_t)token * a.rows + row;
        if (a.rows % 2 == 0) {
          if (OUT == 2)
            ((float2*)a.y)[at / 2] = v;
          else
            ((u32*)a.y)[at / 2] = two_halves(v.x, v.y);
        } else {
          store_one(a.y, at, v.x);
          if (row + 1 < last_row) store_one(a.y, at + 1, v.y);
        }
      }
#endif
    }
#if STAGED
    if (thread == 0) wait_stores_read<0>();
    __syncwarp();
    if (OUTPUTS == 2) release(last_but_one);
    release(before);
#endif
#endif
  }
  if (STAGED && thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  if (CLUSTER > 1 && SHARES == 1) cluster_meet();
}
#else
// Activations to FP8 E4M3: code = x / scale in float32, clamped to the finite range, to nearest even; one block a token.
// QUANTIZE: 1 a scale per token, 2 per token and 128 channels, 3 the one given. OUT: of the inputs. Scales: max(absmax, 1e-10)
// / 448, [tokens] or [K / 128, stride].
constexpr int THREADS = 256;

__device__ __forceinline__ void load_eight(float (&v)[8], const void* x, size_t at) {
  if (OUT == 2) {
    const float4 a = ((const float4*)x)[at / 4], b = ((const float4*)x)[at / 4 + 1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    widen(v, ((const uint4*)x)[at / 8]);
  }
}

struct Arguments {
  const void* x;
  unsigned char* codes;
  float* scale;
  int k, stride;
};

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ Arguments a) {
  __shared__ float most[THREADS / 32];
  launch_next();
  wait_kernel_before();
  const size_t row = (size_t)blockIdx.x * a.k;
  float v[8], scale = 0;
  if (QUANTIZE == 1) {
    float absmax = 1e-10f;
    for (int k = threadIdx.x * 8; k < a.k; k += THREADS * 8) {
      load_eight(v, a.x, row + k);
#pragma unroll
      for (int i = 0; i < 8; i++) absmax = fmaxf(absmax, fabsf(v[i]));
    }
#pragma unroll
    for (int lane = 16; lane; lane /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, lane));
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = absmax;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) absmax = fmaxf(absmax, most[i]);
    scale = __fdiv_rn(absmax, 448.0f);
    if (threadIdx.x == 0) a.scale[blockIdx.x] = scale;
  }
  if (QUANTIZE == 3) scale = a.scale[0];
  for (int k0 = 0; k0 < a.k; k0 += THREADS * 8) {
    const int k = k0 + threadIdx.x * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 0;
    if (k < a.k) load_eight(v, a.x, row + k);
    if (QUANTIZE == 2) {
      float absmax = 1e-10f;
#pragma unroll
      for (int i = 0; i < 8; i++) absmax = fmaxf(absmax, fabsf(v[i]));
#pragma unroll
      for (int lane = 8; lane; lane /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, lane));
      scale = __fdiv_rn(absmax, 448.0f);
      if (threadIdx.x % 16 == 0 && k < a.k) a.scale[(size_t)(k / 128) * a.stride + blockIdx.x] = scale;
    }
    if (k >= a.k) continue;
    u32 both[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unsigned short two;
      const float low = __fdiv_rn(v[2 * i], scale), high = __fdiv_rn(v[2 * i + 1], scale);
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
      both[i] = two;
    }
    *(uint2*)(a.codes + row + k) = {both[0] | both[1] << 16, both[2] | both[3] << 16};
  }
}
#endif

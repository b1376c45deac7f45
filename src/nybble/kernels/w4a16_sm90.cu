// y[m, n] = row[n] * sum over k of w[n, k] * x[m, k] on Hopper: int4 weights, 16-bit activations, fp32 sums. `sm90.cuh` goes first.
//
// One warp copies, one or two warpgroups multiply. A packed tile of 128 rows x 128 channels, codes in the order of the tensor
// core's register operand and its scales behind them, comes with one bulk copy; activations are the shared-memory operand.
//
// A nibble in the low bits of a 16-bit float that are otherwise zero is that float's smallest step times q, a subnormal and
// exact. One masked word is two of them, and one fma with a scale that has the step's inverse in its exponent makes
// q * s - 8 s with a single rounding. Scales are kept in the range that allows it by a power of two per row, taken back in fp32.
//
// The sum over k runs in SHARES that depend on the weight's shape alone, each in the order of channels, added in the order of
// shares: neither the batch nor a tile's width changes a bit. For few tokens a cluster has a block per share and adds through
// distributed shared memory; for many, one block does them one after another and leaves the total in L2 meanwhile.
//
// Defined by the host: TOKENS (a tile's), STAGES, ROW_TILES (64-row tiles of a warpgroup: 1, 2), WARPGROUPS, RESIDENT (blocks a
// processor must hold), SHARES, CLUSTER_K (SHARES or 1), OUT (0 bf16, 1 fp16: also of activations), GROUP (channels of a scale; 0:
// none), ZERO (1: a whole zero each, 2: and an addend), REGISTERS (of a multiplying thread, taken from the copying ones that then
// number 128; 0: all alike), CHUNK (16-channel products in a group), STAGGER (the second warpgroup starts later, so that one
// multiplies while the other stores); and `product(float (&sum)[TOKENS / 2], const u32 (&a)[4], u64 x)`.

constexpr int COPIERS = REGISTERS ? 128 : 32;
constexpr int BM = 64 * ROW_TILES * WARPGROUPS, EIGHTS = TOKENS / 8;
constexpr int PARTS = GROUP ? 1 + ZERO : 0, SCALES = GROUP ? 128 / GROUP : 0;  // of a row, in a step
constexpr int CODES = 8192, PACKED = CODES + PARTS * SCALES * 256;
constexpr int W_BYTES = BM / 128 * PACKED, X_BYTES = TOKENS * 256;
constexpr int W_AT = STAGES * X_BYTES, BARRIERS_AT = W_AT + STAGES * W_BYTES;
constexpr int OWNED = (EIGHTS + CLUSTER_K - 1) / CLUSTER_K;  // groups of eight tokens that one share of a cluster finishes
constexpr int PIECE = WARPGROUPS * 128 * 16;                 // one group of one 64-row tile of every warpgroup
constexpr int SUM_AT = (BARRIERS_AT + 16 * STAGES + 16 * WARPGROUPS + 127) / 128 * 128;
constexpr int CHUNKS = 8 / CHUNK;
static_assert(!STAGGER || STAGES > 2, "the first warpgroup reads a third step before the second one frees one");
// Pairs of 16-bit floats. A code at bit 0 is q * STEP, at bit 4 q * 16 STEP, where STEP is 2^-133 or 2^-24.
constexpr u32 INVERSE = OUT ? 0x74007400 : 0x7F007F00, INVERSE_16 = OUT ? 0x64006400 : 0x7D007D00;  // of them, times 2^-10, 2^-6
constexpr u32 SIXTEENTH = OUT ? 0x2C002C00 : 0x3D803D80, MINUS_8_STEPS = 0x80088008, MINUS_8 = OUT ? 0xA000A000 : 0xBE00BE00;

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 v;
  if (OUT == 0)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { return fma2(a, b, 0x80008000); }

struct Row {  // what makes weights of codes: q * low + add, 16 q * high + add; with zeros (q + add) * low + rest
  u32 low, high, add, rest;
};
__device__ __forceinline__ Row row_of(const u32 (&parts)[PARTS + 1], u32 select) {
  auto both = [&](int part) { return __byte_perm(parts[part], 0, select); };
  if (!GROUP) return {INVERSE, INVERSE_16, MINUS_8, 0};
  const u32 scale = both(0);
  if (!ZERO) return {scale, mul2(scale, SIXTEENTH), mul2(scale, MINUS_8_STEPS), 0};
  return {scale, 0, both(PARTS > 1 ? 1 : 0), ZERO == 2 ? both(PARTS > 2 ? 2 : 0) : 0x80008000};
}
__device__ __forceinline__ void unpack(u32 (&out)[4], u32 w, const Row (&row)[2]) {
  const u32 next = w >> 8;
  const u32 q[4] = {w & 0x000F000F, next & 0x000F000F, w & 0x00F000F0, next & 0x00F000F0};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Row& r = row[i % 2];
    if (ZERO)
      out[i] = fma2(fma2(q[i], i < 2 ? INVERSE : INVERSE_16, r.add), r.low, r.rest);
    else
      out[i] = fma2(q[i], i < 2 ? r.low : r.high, r.add);
  }
}
typedef u32 Operands[ROW_TILES][CHUNK][4];
__device__ __forceinline__ void keep(Operands& a) {  // the tensor core may read them until here
#pragma unroll
  for (int i = 0; i < ROW_TILES * CHUNK * 4; i++) asm volatile("" : "+r"(a[i / (CHUNK * 4)][i / 4 % CHUNK][i % 4])::"memory");
}
__device__ __forceinline__ void send(u32 to, const float* four, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
               : "memory");
}

struct Arguments {
  const char* w;       // [N / 128, K / 128, PACKED]
  const float* scale;  // [N padded], of the fp32 sum
  float4* totals;      // of the shares so far: [clusters, WARPGROUPS, TOKENS / 8 * ROW_TILES, 128]
  void* y;
  int tokens, rows, width, steps, row_tiles, token_tiles, order;  // outputs are rows of [tokens, width]
};
struct Place {
  int tile, step, row_tile, token_tile;
  __device__ __forceinline__ void locate(const Arguments& a) { ::locate(a, tile, row_tile, token_tile); }
};

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + COPIERS, RESIDENT)
    w4a16(const __grid_constant__ TensorMap tokens_map, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = shared_address(shared), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
  const u32 sum_full = empty + 8 * STAGES, sum_empty = sum_full + 8 * WARPGROUPS;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int rank = blockIdx.x % CLUSTER_K, cluster = blockIdx.x / CLUSTER_K, clusters = gridDim.x / CLUSTER_K;
  const int tiles = a.row_tiles * a.token_tiles, first = rank * a.steps / CLUSTER_K, last = (rank + 1) * a.steps / CLUSTER_K;
  const int units = (tiles - cluster + clusters - 1) / clusters * (last - first);
  const bool copies = threadIdx.x == WARPGROUPS * 128;

  Place ahead{cluster, first};
  ahead.locate(a);
  auto next = [&](Place& p) {
    if (++p.step == last) p.step = first, p.tile += clusters, p.locate(a);
  };
  auto copy_weights = [&](int stage, const Place& p) {
    expect(full + 8 * stage, W_BYTES + X_BYTES);
#pragma unroll
    for (int i = 0; i < BM / 128; i++)
      bulk_copy(base + W_AT + stage * W_BYTES + i * PACKED, a.w + ((size_t)(p.row_tile * (BM / 128) + i) * a.steps + p.step) * PACKED,
                PACKED, full + 8 * stage, a.token_tiles > 1 ? EVICT_NORMAL : EVICT_FIRST);
  };
  auto copy_activations = [&](int stage, const Place& p) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      copy_box(base + stage * X_BYTES + half * (X_BYTES / 2), &tokens_map, p.step * 256 + half * 128, p.token_tile * TOKENS,
               full + 8 * stage, EVICT_LAST);
  };

  int loaded = 0;
  Place begin = ahead;
  if (copies) {
    for (int i = 0; i < STAGES; i++) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, WARPGROUPS);
    for (int i = 0; i < WARPGROUPS; i++)
      init_barrier(sum_full + 8 * i, 1), init_barrier(sum_empty + 8 * i, max(1, min(EIGHTS, CLUSTER_K) - (rank < EIGHTS)));
    fence_barriers();
    for (; loaded < min(STAGES, units); loaded++, next(ahead)) copy_weights(loaded, ahead);
    launch_next();
  }
  __syncthreads();
  if (CLUSTER_K > 1) cluster_meet();
  wait_kernel_before();

  if (warpgroup == WARPGROUPS) {
    if (REGISTERS) fewer_registers<40>();
    if (copies) {
      for (int i = 0; i < loaded; i++, next(begin)) copy_activations(i, begin);
      for (int stage = 0, parity = 0, i = loaded; i < units; i++, next(ahead)) {
        wait(empty + 8 * stage, parity);
        copy_weights(stage, ahead);
        copy_activations(stage, ahead);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (CLUSTER_K > 1) cluster_meet();  // no block leaves while another may still write to it
    return;
  }

  if (REGISTERS) more_registers<REGISTERS ? REGISTERS : 24>();
  const int odd = ROW_TILES == 1 ? warpgroup & 1 : 0, block = ROW_TILES == 1 ? warpgroup / 2 : warpgroup;
  // A thread's rows: four neighbours of 128, or two of them.
  const int lane_row = thread / 32 * 32 + thread % 32 / 4 * 4 + 2 * odd;
  const int receivers = min(EIGHTS, CLUSTER_K) - (rank < EIGHTS);  // of this share's sums
  float4* total = a.totals + ((size_t)cluster * WARPGROUPS + warpgroup) * (EIGHTS * ROW_TILES * 128) + thread;
  float sum[ROW_TILES][TOKENS / 2];
  int stage = 0, parity = 0, finished = 0, before_start = STAGGER ? min(2, units) : 0;
  if (STAGGER && WARPGROUPS == 2 && warpgroup == 1) sync_threads(7, 256);

  for (begin.tile = cluster; begin.tile < tiles; begin.tile += clusters, finished ^= 1) {
    begin.locate(a);
    const int row = begin.row_tile * BM + block * 128 + lane_row;
    float scale[2 * ROW_TILES];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) scale[i] = __ldg(a.scale + row + i);
    // Half a step's packed weights and scales are read, and a chunk's operands made, while the products before run.
    Operands one, two = {};
    uint4 packed[ROW_TILES][2];
    u32 parts[SCALES + 1][ROW_TILES][PARTS + 1];
    Row rows[ROW_TILES][2];
    auto fetch = [&](int half, int stage) {
      const u32 tile = base + W_AT + stage * W_BYTES + block * PACKED;
#pragma unroll
      for (int i = 0; i < ROW_TILES; i++)
        packed[i][half] = load_shared(tile + (half * 2 + (ROW_TILES == 1 ? odd : i)) * 2048 + thread * 16);
#pragma unroll
      for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int g = 0; g < SCALES; g++) {
          if (g * 2 / SCALES != half) continue;
          const u32 at = tile + CODES + (p * SCALES + g) * 256 + lane_row * 2;
          if (ROW_TILES == 1)
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(parts[g][0][p]) : "r"(at));
          else
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(parts[g][0][p]), "=r"(parts[g][ROW_TILES - 1][p]) : "r"(at));
        }
    };
    auto operands = [&](Operands& out, int chunk) {
#pragma unroll
      for (int j = 0; j < CHUNK; j++) {
        const int channel = (chunk * CHUNK + j) * 16;
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
          if (channel % (GROUP ? GROUP : 128) == 0) {
            const int g = GROUP ? channel / GROUP : 0;
            rows[i][0] = row_of(parts[g][i], 0x1010), rows[i][1] = row_of(parts[g][i], 0x3232);
          }
          const uint4& half = packed[i][channel / 64];
          const u32 words[4] = {half.x, half.y, half.z, half.w};
          unpack(out[i][j], words[channel / 16 % 4], rows[i]);
        }
      }
    };
    auto multiply = [&](Operands& now, int chunk) {
      operands(now, chunk);
      keep(now);
      products_begin();
#pragma unroll
      for (int j = 0; j < CHUNK; j++) {
        const int channel = (chunk * CHUNK + j) * 16;
        const u64 x = swizzled_operand(base + stage * X_BYTES + channel / 64 * (X_BYTES / 2) + channel % 64 * 2);
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) product(sum[i], now[i][j], x);
      }
      products_commit();
    };
    auto release = [&](int stage) {
      if (thread == 0) arrive(empty + 8 * stage);
    };
    for (int share = CLUSTER_K > 1 ? rank : 0;; share++) {
      const int steps = (share + 1) * a.steps / SHARES - share * a.steps / SHARES;
      int before = -1;
#pragma unroll
      for (int i = 0; i < ROW_TILES * TOKENS / 2; i++) sum[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0;
      wait(full + 8 * stage, parity);
      fetch(0, stage);
      for (int step = 1;; step++) {
        fetch(1, stage);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
          if (chunk == CHUNKS / 2 && step < steps) {
            const bool around = stage + 1 == STAGES;
            wait(full + 8 * (around ? 0 : stage + 1), parity ^ around);
            fetch(0, around ? 0 : stage + 1);
          }
          multiply(chunk % 2 ? two : one, chunk);
          if (chunk + 1 == CHUNKS) break;
          wait_products<1>();
          keep(chunk % 2 ? one : two);
          if (chunk == 0 && before >= 0) release(before);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (STAGGER && WARPGROUPS == 2 && warpgroup == 0 && before_start > 0 && --before_start == 0)
          asm volatile("bar.arrive 7, 256;" ::: "memory");
        if (step == steps) break;
        wait_products<1>();
        keep(one);
      }
      wait_products<0>();
      keep(one), keep(two);
      release(before);
#pragma unroll
      for (int i = 0; i < ROW_TILES * TOKENS / 2; i++) asm volatile("" : "+f"(sum[i / (TOKENS / 2)][i % (TOKENS / 2)])::"memory");
      if (SHARES == 1 || CLUSTER_K > 1) break;
      if (share > 0)
#pragma unroll
        for (int i = 0; i < EIGHTS * ROW_TILES; i++) {
          const float4 more = __ldcg(total + i * 128);
          float* four = &sum[i / EIGHTS][i % EIGHTS * 4];
          four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
        }
      if (share + 1 == SHARES) break;
#pragma unroll
      for (int i = 0; i < EIGHTS * ROW_TILES; i++) {
        const float* four = &sum[i / EIGHTS][i % EIGHTS * 4];
        __stcg(total + i * 128, make_float4(four[0], four[1], four[2], four[3]));
      }
    }

    if (CLUSTER_K > 1) {  // each share finishes every CLUSTER_K-th group of eight tokens
      const u32 here = base + SUM_AT + threadIdx.x * 16;
      const int owned = (EIGHTS - rank + CLUSTER_K - 1) / CLUSTER_K;
      if (thread == 0 && owned > 0) expect(sum_full + 8 * warpgroup, owned * (CLUSTER_K - 1) * ROW_TILES * 2048);
      if (receivers > 0) wait(sum_empty + 8 * warpgroup, finished ^ 1);
#pragma unroll
      for (int owner = 0; owner < CLUSTER_K; owner++) {
        if (owner == rank) continue;
        const int slot = (rank - owner + CLUSTER_K) % CLUSTER_K - 1;
        const u32 there = in_cluster(here + slot * OWNED * ROW_TILES * PIECE, owner), barrier = in_cluster(sum_full + 8 * warpgroup, owner);
#pragma unroll
        for (int group = owner; group < EIGHTS; group += CLUSTER_K)
#pragma unroll
          for (int i = 0; i < ROW_TILES; i++) send(there + (group / CLUSTER_K * ROW_TILES + i) * PIECE, &sum[i][group * 4], barrier);
      }
      if (owned > 0) wait(sum_full + 8 * warpgroup, finished);
#pragma unroll
      for (int group = 0; group < EIGHTS; group++) {
        if (group % CLUSTER_K != rank) continue;
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
          float* own = &sum[i][group * 4];
          float total[4] = {};
#pragma unroll
          for (int share = 0; share < CLUSTER_K; share++) {
            const int slot = (share - rank + CLUSTER_K) % CLUSTER_K - 1;
            float more[4] = {own[0], own[1], own[2], own[3]};
            if (share != rank) {
              uint4 v = load_shared(here + ((slot * OWNED + group / CLUSTER_K) * ROW_TILES + i) * PIECE);
              more[0] = __uint_as_float(v.x), more[1] = __uint_as_float(v.y);
              more[2] = __uint_as_float(v.z), more[3] = __uint_as_float(v.w);
            }
#pragma unroll
            for (int c = 0; c < 4; c++) total[c] = share ? total[c] + more[c] : more[c];
          }
#pragma unroll
          for (int c = 0; c < 4; c++) own[c] = total[c];
        }
      }
      sync_threads(1 + warpgroup, 128);
      if (owned > 0 && begin.tile + clusters < tiles && thread < CLUSTER_K && thread != rank)
        arrive_at(sum_empty + 8 * warpgroup, thread);
    }

    const int token = begin.token_tile * TOKENS + thread % 4 * 2;
#pragma unroll
    for (int group = 0; group < EIGHTS; group++) {
      if (CLUSTER_K > 1 && group % CLUSTER_K != rank) continue;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int t = token + group * 8 + c;
        if (t >= a.tokens || row >= a.rows) continue;
        float v[2 * ROW_TILES];
        const size_t at = (size_t)t * a.width + row;
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++) v[i] = sum[i / 2][group * 4 + i % 2 * 2 + c] * scale[i];
        if (a.width % 4 == 0) {
          if (ROW_TILES == 2)
            ((uint2*)a.y)[at / 4] = {two_halves(v[0], v[1]), two_halves(v[2 * ROW_TILES - 2], v[2 * ROW_TILES - 1])};
          else
            ((u32*)a.y)[at / 2] = two_halves(v[0], v[1]);
        } else {
#pragma unroll
          for (int i = 0; i < 2 * ROW_TILES; i++)
            if (row + i < a.rows) store_one(a.y, at + i, v[i]);
        }
      }
    }
    __syncwarp();
  }
  if (CLUSTER_K > 1) cluster_meet();
}

// Attention of generated tokens on Hopper over a paged cache of int8 or int4, one query token a row, from the projection to the
// int8 rows that the next linear takes: rotary embedding, the cache's new token and, with QUANTIZE, the codes of the output.
// `sm90.cuh` goes first. Every sum is taken in the order of `attention_triton._decode` and `_combine` (splits, tiles,
// lanes), and what is rounded there is rounded here: the bits are the same.
//
// A cluster of CLUSTER blocks has a (row, KV head), its warps the row's splits in turn; each copies its own tiles, 4096 bytes of K
// and of V, in the order of memory with the 128-byte swizzle. Partial sums of all splits meet in shared memory. The block that
// finishes a row last quantizes it.
//
// Defined by the host: INT4, HEADS (of KV), GROUP (query heads of each, at most 8), BLOCK_SIZE, WARPS, STAGES, CLUSTER, RESIDENT,
// QUANTIZE, and OUT (0 bf16, 1 fp16: queries and outputs). Heads have 128 channels.

constexpr int DIM = 128, PLANES = INT4 ? 4 : 2, UNITS = DIM / PLANES, SETS = INT4 ? 2 : 1, TILE = INT4 ? 64 : 32;
constexpr int THREADS = WARPS * 32, PARTS = WARPS * CLUSTER, SPLIT = 64, LEVELS = 4, CODES = INT4 ? 64 : 128;
constexpr int KEYS = TILE / 16, STEPS = UNITS / 16, KEY_BYTES = 16 * CODES;  // tensor-core tiles of keys, of 16-bit units
constexpr int COLUMNS = GROUP == 1 ? 1 : 2;  // of a thread's two queries, those that can be real
constexpr int TILE_BYTES = 4096, PARAM_BYTES = SETS * TILE * 4, Q_HEADS = HEADS * GROUP;
constexpr int PARAMS_AT = WARPS * STAGES * 2 * TILE_BYTES, BARRIERS_AT = PARAMS_AT + WARPS * STAGES * 2 * PARAM_BYTES;
constexpr int Q_AT = BARRIERS_AT + WARPS * STAGES * 16, STATS_AT = Q_AT + GROUP * DIM * 2;
constexpr int FRESH_AT = (STATS_AT + GROUP * (1 + 2 * SETS) * 4 + 15) / 16 * 16;  // the new token: codes of K, of V, parameters
constexpr int FLAG_AT = FRESH_AT + 2 * CODES + 16, TABLE_AT = FLAG_AT + 16;      // then blocks, partial sums, their tops, weights
constexpr float P_FACTOR = INT4 ? 4.f : 64.f, FLOOR = -1.0e30f;

struct Arguments {
  const unsigned short* qkv;  // [rows, (Q_HEADS + 2 HEADS) DIM]
  const int *table, *context, *position;
  const long long* slot;
  const float* cos_sin;  // [positions, DIM]
  char *k, *v;
  u32 *k_params, *v_params;
  u32* out;  // [rows, Q_HEADS DIM / 2], pairs
  uint2* codes;
  float* scale;
  int* arrivals;  // zero between launches
  float q_scale, v_scale;
  int table_width, blocks, splits;
};

__device__ __forceinline__ int split_start(int split) {
  int start = split;
#pragma unroll
  for (int i = 1; i <= LEVELS; i++) start = max(start, (split - 4 * i) * (1 << i));
  return SPLIT * start;
}
__device__ __forceinline__ int split_count(int context) {
  const int units = (context + SPLIT - 1) / SPLIT;
  int count = units;
#pragma unroll
  for (int i = 1; i <= LEVELS; i++) count = min(count, (units + (4 * i << i) + (1 << i) - 1) >> i);
  return count;
}
__device__ __forceinline__ float power(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ __forceinline__ float half_value(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short half_of(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float value(unsigned short x) { return OUT ? half_value(x) : __uint_as_float((u32)x << 16); }
__device__ __forceinline__ void round_pair(float& low, float& high) {
  const u32 both = two_halves(low, high);
  low = value(both & 0xFFFF), high = value(both >> 16);
}
template <int FROM>
__device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int bit = 16; bit >= FROM; bit /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}
// Eight lanes one after the other, then groups of eight in halves.
__device__ __forceinline__ float eights_sum(float x) {
  float sum = __shfl_sync(~0u, x, 0, 8);
#pragma unroll
  for (int i = 1; i < 8; i++) sum = __fadd_rn(sum, __shfl_sync(~0u, x, i, 8));
  return lane_sum<8>(sum);
}
template <int FROM>
__device__ __forceinline__ float lane_most(float x) {
#pragma unroll
  for (int bit = 16; bit >= FROM; bit /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}
template <bool ACROSS>
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  if (ACROSS)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ u32 across(u32 x) {  // an 8 x 8 matrix of a warp, turned over
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Codes of the PLANE-th channel of two 16-bit units as fp16: 1024 + code (odd planes of int4: 1024 + 16 code), or EXACT.
template <int PLANE, bool EXACT>
__device__ __forceinline__ u32 plane(u32 raw) {
  constexpr u32 BASE = 0x64006400;
  constexpr u32 MASK = !INT4 ? 0x00FF00FF : PLANE % 2 ? 0x00F000F0 : 0x000F000F;
  u32 x;
  if (!INT4 && PLANE)
    x = __byte_perm(raw, BASE, 0x7371);
  else  // one instruction, as the two operators are not
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(x) : "r"(PLANE / 2 ? raw >> 8 : raw), "n"(MASK), "n"(BASE));
  if (EXACT && INT4 && PLANE % 2)
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(0x2C002C00), "r"(0xD400D400));
  else if (EXACT)
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(BASE));
  return x;
}
template <int PLANE, bool EXACT>
__device__ __forceinline__ void planes(u32 (&a)[4], const u32 (&raw)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = plane<PLANE, EXACT>(raw[i]);
}
// The bytes of 16-byte piece `piece` of a token in a tile.
__device__ __forceinline__ u32 place(int token, int piece) {
  const int line = INT4 ? token / 2 : token;
  return line * 128 + (((INT4 ? token % 2 * 4 + piece : piece) ^ (line & 7)) << 4);
}
// A lane's four channels of a head: int8 2 l, 2 l + 1 and 64 on, int4 one of each quarter.
__device__ __forceinline__ int channel_of(int i, int lane) {
  return INT4 ? 32 * i + lane : i / 2 * 64 + 2 * lane + i % 2;
}

// `formats.numerics` of a head's channels: codes to `codes`, (scale, minimum) of each set to `params`.
__device__ __forceinline__ void quantize(const float (&y)[4], u32 (&params)[SETS], int lane, unsigned short (&units)[INT4 ? 1 : 2]) {
  constexpr float LEVEL = INT4 ? 15.f : 255.f, ROUND = 12582912.f;
  u32 code[4];
#pragma unroll
  for (int s = 0; s < SETS; s++) {
    float least = fminf(y[2 * s], y[2 * s + 1]), most = fmaxf(y[2 * s], y[2 * s + 1]);
    if (!INT4) least = fminf(least, fminf(y[2], y[3])), most = fmaxf(most, fmaxf(y[2], y[3]));
    least = -lane_most<1>(-least), most = lane_most<1>(most);
    const unsigned short step = half_of(__fdiv_rn(__fsub_rn(most, least), LEVEL));
    unsigned short minimum = half_of(least);
    const float wide = half_value(step), low = half_value(minimum), inverse = wide > 0 ? __fdiv_rn(1.f, wide) : 0.f;
    float error[2];
#pragma unroll
    for (int i = 2 * s; i < (INT4 ? 2 * s + 2 : 4); i++) {
      const float at = fminf(fmaxf(__fmul_rn(__fsub_rn(y[i], low), inverse), 0.f), LEVEL);
      code[i] = __float_as_uint(__fadd_rn(at, ROUND)) - __float_as_uint(ROUND);
      if (INT4) error[i % 2] = __fmaf_rn(-wide, (float)(int)code[i], y[i]);
    }
    if (INT4) {
      float sum = __fadd_rn(error[0], error[1]);
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
#pragma unroll
      for (int bit = 16; bit > 1; bit /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, bit));
      minimum = half_of(sum / 64.f);
    }
    params[s] = step | (u32)minimum << 16;
  }
  if (INT4) {
    units[0] = code[0] | code[1] << 4 | code[2] << 8 | code[3] << 12;
  } else {
    units[0] = code[0] | code[1] << 8, units[(INT4 ? 1 : 2) - 1] = code[2] | code[3] << 8;
  }
}

struct Walk {  // over the tiles of a warp's splits
  int split, first, end;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    decode(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  const int head = blockIdx.x / CLUSTER % HEADS, row = blockIdx.x / CLUSTER / HEADS;
  const u32 base = shared_address(shared), ring = base + warp * STAGES * 2 * TILE_BYTES;
  const u32 params = base + PARAMS_AT + warp * STAGES * 2 * PARAM_BYTES, barriers = base + BARRIERS_AT + warp * STAGES * 16;
  int* blocks = (int*)(shared + TABLE_AT);
  const int pieces_at = TABLE_AT + (a.blocks * 4 + 15) / 16 * 16, tops_at = pieces_at + a.splits * GROUP * DIM * 4;
  if (CLUSTER > 1) cluster_arrive();
  launch_next();

  // Before the wait: what is older than the kernel before this one.
  const int context = a.context[row], count = split_count(context);
  for (int i = threadIdx.x; i < a.blocks && i * BLOCK_SIZE < context; i += THREADS)
    blocks[i] = a.table[(size_t)row * a.table_width + i];
  if (lane == 0) {
    for (int i = 0; i < 2 * STAGES; i++) init_barrier(barriers + 8 * i, 1);
    fence_barriers();
  }
  float cosine[2], sine[2];
  const long long slot = a.slot[row];
  const float* angles = a.cos_sin + (size_t)a.position[row] * DIM;
#pragma unroll
  for (int i = 0; i < 2; i++) cosine[i] = angles[channel_of(i, lane)], sine[i] = angles[DIM / 2 + channel_of(i, lane)];
  __syncthreads();
  auto begin = [&](Walk& w, int split) {
    w.split = split, w.first = split_start(split), w.end = min(context, split_start(split + 1));
  };
  auto next = [&](Walk& w) {
    if ((w.first += TILE) >= w.end) begin(w, w.split + PARTS);
  };
  auto copy = [&](const TensorMap* map, const u32* from, int which, int stage, const Walk& w) {
    if (lane || w.split >= count) return;
    const int page = blocks[w.first / BLOCK_SIZE] * HEADS + head, inside = w.first % BLOCK_SIZE;
    const u32 barrier = barriers + 8 * (2 * stage + which);
    expect(barrier, TILE_BYTES + PARAM_BYTES);
    copy_box(ring + (2 * stage + which) * TILE_BYTES, map, 0, (page * BLOCK_SIZE + inside) / (INT4 ? 2 : 1), barrier, EVICT_FIRST);
#pragma unroll
    for (int s = 0; s < SETS; s++)
      bulk_copy(params + (2 * stage + which) * PARAM_BYTES + s * TILE * 4,
                from + (size_t)page * (BLOCK_SIZE * SETS) + s * BLOCK_SIZE + inside, TILE * 4, barrier, EVICT_FIRST);
  };
  Walk here, ahead;
  begin(here, warp * CLUSTER + rank), ahead = here;
#pragma unroll
  for (int i = 0; i < STAGES; i++) copy(&k_map, a.k_params, 0, i, ahead), copy(&v_map, a.v_params, 1, i, ahead), next(ahead);
  wait_kernel_before();

  // Queries to fp16, divided by a power of two; the new token's K and V to codes.
  float* stats = (float*)(shared + STATS_AT);
  for (int i = warp; i < GROUP + 2; i += WARPS) {
    const bool query = i < GROUP;
    const int at = query ? head * GROUP + i : Q_HEADS + (i - GROUP) * HEADS + head;
    const unsigned short* from = a.qkv + ((size_t)row * (Q_HEADS + 2 * HEADS) + at) * DIM;
    float y[4];
    if (INT4) {
#pragma unroll
      for (int j = 0; j < 4; j++) y[j] = value(from[channel_of(j, lane)]);
    } else {
      const u32 low = ((const u32*)from)[lane], high = ((const u32*)from)[32 + lane];
      y[0] = value(low & 0xFFFF), y[1] = value(low >> 16), y[2] = value(high & 0xFFFF), y[3] = value(high >> 16);
    }
    if (i <= GROUP) {
      float z[4];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        z[j] = __fmaf_rn(y[j], cosine[j], -__fmul_rn(y[j + 2], sine[j]));
        z[j + 2] = __fmaf_rn(y[j + 2], cosine[j], __fmul_rn(y[j], sine[j]));
      }
      round_pair(z[0], z[1]), round_pair(z[2], z[3]);
#pragma unroll
      for (int j = 0; j < 4; j++) y[j] = z[j];
    }
    if (query) {
      const float largest =
          fmaxf(lane_most<1>(fmaxf(fmaxf(fabsf(y[0]), fabsf(y[1])), fmaxf(fabsf(y[2]), fabsf(y[3])))), 1e-30f);
      const u32 exponent = __float_as_uint(largest) & 0x7F800000;
      const float inverse = __uint_as_float(0x7F000000 - exponent);
      unsigned short* to = (unsigned short*)(shared + Q_AT) + i * DIM;  // [PLANES, UNITS]
      float sum[SETS], offset[SETS];
      if (INT4) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
          unsigned short x = half_of(__fmul_rn(y[p], inverse));
          const float one = eights_sum(half_value(x));
          if (p % 2) x = half_of(half_value(x) * 0.0625f);
          const float same = (p % 2 ? eights_sum(half_value(x)) : one) * 1024.f;
          sum[p / 2 % SETS] = p % 2 ? __fadd_rn(sum[p / 2 % SETS], one) : one;
          offset[p / 2 % SETS] = p % 2 ? __fadd_rn(offset[p / 2 % SETS], same) : same;
          to[p * UNITS + lane] = x;
        }
      } else {
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const unsigned short low = half_of(__fmul_rn(y[p], inverse)), high = half_of(__fmul_rn(y[p + 2], inverse));
          const float one = lane_sum<1>(__fadd_rn(half_value(low), half_value(high)));
          sum[0] = p ? __fadd_rn(sum[0], one) : one;
          offset[0] = p ? __fadd_rn(offset[0], one * 1024.f) : one * 1024.f;
          to[p * UNITS + lane] = low, to[p * UNITS + 32 + lane] = high;
        }
      }
      if (lane == 0) {
        float* stat = stats + i * (1 + 2 * SETS);
        stat[0] = __fmul_rn(__uint_as_float(exponent), a.q_scale);
#pragma unroll
        for (int s = 0; s < SETS; s++) stat[1 + s] = sum[s], stat[1 + SETS + s] = 0.f - offset[s];
      }
    } else {
      u32 param[SETS];
      unsigned short units[INT4 ? 1 : 2];
      quantize(y, param, lane, units);
      const bool is_v = i > GROUP;
      char* fresh = shared + FRESH_AT;
      const long long token = (slot / BLOCK_SIZE * HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE;
      unsigned short* to = (unsigned short*)((is_v ? a.v : a.k) + token * CODES);
#pragma unroll
      for (int j = 0; j < (INT4 ? 1 : 2); j++) {
        ((unsigned short*)(fresh + is_v * CODES))[j * 32 + lane] = units[j];
        if (slot >= 0 && rank == 0) to[j * 32 + lane] = units[j];
      }
      if (lane == 0)
#pragma unroll
        for (int s = 0; s < SETS; s++) {
          ((u32*)(fresh + 2 * CODES))[is_v * SETS + s] = param[s];
          if (slot >= 0 && rank == 0)
            (is_v ? a.v_params : a.k_params)[SETS * token - (SETS - 1) * (slot % BLOCK_SIZE) + s * BLOCK_SIZE] = param[s];
        }
    }
  }
  __syncthreads();

  u32 q[PLANES][STEPS][2];
  float factor[2], q_sum[SETS][2], offset[SETS][2];
#pragma unroll
  for (int p = 0; p < PLANES; p++)
#pragma unroll
    for (int t = 0; t < STEPS; t++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        q[p][t][i] = lane / 4 < GROUP ? *(const u32*)(shared + Q_AT + ((lane / 4 * PLANES + p) * UNITS + t * 16 + i * 8 + lane % 4 * 2) * 2) : 0;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int member = lane % 4 * 2 + e;
    const float* stat = stats + member * (1 + 2 * SETS);
    factor[e] = member < GROUP ? stat[0] : 0.f;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      q_sum[s][e] = member < GROUP ? stat[1 + s] : 0.f, offset[s][e] = member < GROUP ? stat[1 + SETS + s] : 0.f;
    }
  }
  if (CLUSTER > 1) cluster_wait();  // all blocks have begun
  // Of 8 x 8 matrices; 32 bytes further is a flipped bit, for tiles lie at multiples of 1024.
  const u32 k_lane = place(lane / 8 % 2 * 8 + lane % 8, lane / 16), v_lane = place(lane / 16 * 8 + lane % 8, lane / 8 % 2);

  float m[2] = {FLOOR, FLOOR}, weight[2] = {}, bias[SETS][2] = {}, acc[PLANES][STEPS][4] = {};
  for (int n = 0; here.split < count; n++) {
    const int stage = n % STAGES, parity = n / STAGES & 1, fresh_at = context - 1 - here.first;
    const u32 k_tile = ring + 2 * stage * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
    const u32 k_param = params + 2 * stage * PARAM_BYTES, v_param = k_param + PARAM_BYTES;
    auto patch = [&](u32 tile, u32 param, int is_v) {  // the new token, which was not there yet, and zeros behind it
      if (fresh_at >= TILE) return;
#pragma unroll
      for (int i = 0; i < PARAM_BYTES / 128; i++)
        if (i * 32 % TILE + lane > fresh_at)
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(param + (i * 32 + lane) * 4), "r"(0) : "memory");
      if (lane < CODES / 16) {
        const uint4 piece = load_shared(base + FRESH_AT + is_v * CODES + lane * 16);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(tile + place(fresh_at, lane)), "r"(piece.x), "r"(piece.y),
                     "r"(piece.z), "r"(piece.w)
                     : "memory");
      }
      if (lane < SETS)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(param + (lane * TILE + fresh_at) * 4),
                     "r"(((u32*)(shared + FRESH_AT + 2 * CODES))[is_v * SETS + lane])
                     : "memory");
      __syncwarp();
    };
    auto scale_min = [&](u32 param, int s, int key, float& scale, float& minimum) {
      u32 word;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(param + (s * TILE + key) * 4) : "memory");
      scale = half_value(word & 0xFFFF), minimum = half_value(word >> 16);
    };

    wait(barriers + 16 * stage, parity);
    patch(k_tile, k_param, 0);
    float score[KEYS][4], largest[2] = {-__uint_as_float(0x7F800000), -__uint_as_float(0x7F800000)};
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      u32 raw[STEPS][4];
#pragma unroll
      for (int t = 0; t < STEPS; t++)
        load_matrices<false>(raw[t], ((k_tile + k_lane) ^ t << 5) + j * KEY_BYTES);
      const int key = j * 16 + lane / 4;
#pragma unroll
      for (int s = 0; s < SETS; s++) {
        float part[4] = {offset[s][0], offset[s][1], offset[s][0], offset[s][1]};
        u32 x[4];
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
          if (s) planes<2 % PLANES, false>(x, raw[t]);
          else planes<0, false>(x, raw[t]);
          product(part, x, q[s * 2][t]);
        }
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
          if (s) planes<3 % PLANES, false>(x, raw[t]);
          else planes<1, false>(x, raw[t]);
          product(part, x, q[s * 2 + 1][t]);
        }
        float scale[2], minimum[2];
#pragma unroll
        for (int i = 0; i < 2; i++) scale_min(k_param, s, key + 8 * i, scale[i], minimum[i]);
#pragma unroll
        for (int i = 0; i < 4; i += 3 - COLUMNS)
          score[j][i] = __fmaf_rn(part[i], scale[i / 2], __fmaf_rn(minimum[i / 2], q_sum[s][i % 2], s ? score[j][i] : 0.f));
      }
    }
    if (fresh_at < TILE - 1)
#pragma unroll
      for (int i = 0; i < 4 * KEYS; i++)
        if (i / 2 * 8 + lane / 4 > fresh_at) score[i / 4][i % 4] = -__uint_as_float(0x7F800000);
#pragma unroll
    for (int i = 0; i < 4 * KEYS; i += 3 - COLUMNS) largest[i % 2] = fmaxf(largest[i % 2], score[i / 4][i % 4]);
    __syncwarp();
    copy(&k_map, a.k_params, 0, stage, ahead);

    float fade[2], sum[2];
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) {
      const float most = fmaxf(m[e], __fmul_rn(lane_most<4>(largest[e]), factor[e]));
      fade[e] = power(__fsub_rn(m[e], most)), m[e] = most;
#pragma unroll
      for (int j = 0; j < KEYS; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float& p = score[j][2 * i + e];
          p = power(__fmaf_rn(p, factor[e], -most));
          sum[e] = j + i ? __fadd_rn(sum[e], p) : p;
        }
      weight[e] = __fmaf_rn(weight[e], fade[e], sum[e]);
    }

    wait(barriers + 16 * stage + 8, parity);
    patch(v_tile, v_param, 1);
    u32 portion[SETS][KEYS][2];
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      float low[2];
#pragma unroll
      for (int j = 0; j < KEYS; j++) {
        float by[2], minimum[2];
#pragma unroll
        for (int i = 0; i < 2; i++) scale_min(v_param, s, j * 16 + lane / 4 + 8 * i, by[i], minimum[i]), by[i] *= P_FACTOR;
#pragma unroll
        for (int e = 0; e < COLUMNS; e++) {
          const float first = score[j][e], second = score[j][2 + e];
          if (j == 0)
            low[e] = __fmaf_rn(first, minimum[0], __fmul_rn(second, minimum[1]));
          else
            low[e] = __fmaf_rn(second, minimum[1], __fmaf_rn(first, minimum[0], low[e]));
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
          portion[s][j][i] = across(half_pair(__fmul_rn(score[j][2 * i], by[i]), COLUMNS == 1 ? 0.f : __fmul_rn(score[j][2 * i + 1], by[i])));
      }
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) bias[s][e] = __fmaf_rn(bias[s][e], fade[e], low[e]);
    }
#pragma unroll
    for (int p = 0; p < PLANES; p++)
#pragma unroll
      for (int u = 0; u < STEPS; u++)
#pragma unroll
        for (int i = 0; i < 4; i += 3 - COLUMNS) acc[p][u][i] = __fmul_rn(acc[p][u][i], fade[i % 2]);
#pragma unroll
    for (int j = 0; j < KEYS; j++)
#pragma unroll
      for (int u = 0; u < STEPS; u++) {
        u32 raw[4], x[4];
        load_matrices<true>(raw, ((v_tile + v_lane) ^ u << 5) + j * KEY_BYTES);
        planes<0, true>(x, raw), product(acc[0][u], x, portion[0][j]);
        planes<1, true>(x, raw), product(acc[1][u], x, portion[0][j]);
        if (INT4) {
          planes<2 % PLANES, true>(x, raw), product(acc[2 % PLANES][u], x, portion[SETS - 1][j]);
          planes<3 % PLANES, true>(x, raw), product(acc[3 % PLANES][u], x, portion[SETS - 1][j]);
        }
      }
    __syncwarp();
    copy(&v_map, a.v_params, 1, stage, ahead);
    next(ahead);

    if (here.first + TILE >= here.end) {  // the split's sums, over an integer power of two
      const u32 to = base + pieces_at + here.split * GROUP * DIM * 4, top_to = base + tops_at + here.split * GROUP * 8;
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) {
        const int member = lane % 4 * 2 + e;
        const float top = ceilf(m[e]), scale = power(__fsub_rn(m[e], top)), all = __fmul_rn(lane_sum<4>(weight[e]), scale);
        const float by = scale * (1.f / P_FACTOR);
        float low[SETS];
#pragma unroll
        for (int s = 0; s < SETS; s++) low[s] = lane_sum<4>(bias[s][e]), bias[s][e] = 0;
        if (member < GROUP) {
          const u32 there = CLUSTER > 1 ? in_cluster(to, 0) : to, top_there = CLUSTER > 1 ? in_cluster(top_to, 0) : top_to;
#pragma unroll
          for (int p = 0; p < PLANES; p++)
#pragma unroll
            for (int u = 0; u < STEPS; u++)
#pragma unroll
              for (int i = 0; i < 2; i++) {
                const int unit = u * 16 + i * 8 + lane / 4, channel = INT4 ? p * UNITS + unit : 2 * unit + p;
                const float piece = __fmul_rn(__fmaf_rn(low[p / 2 % SETS], P_FACTOR, acc[p][u][2 * i + e]), by);
                asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there + (member * DIM + channel) * 4), "f"(piece) : "memory");
              }
          if (lane < 4)
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(top_there + member * 8), "f"(top), "f"(all) : "memory");
        }
        m[e] = FLOOR, weight[e] = 0;
      }
#pragma unroll
      for (int p = 0; p < PLANES; p++)
#pragma unroll
        for (int u = 0; u < STEPS; u++)
#pragma unroll
          for (int i = 0; i < 4; i++) acc[p][u][i] = 0;
    }
    next(here);
  }

  if (CLUSTER > 1) {
    cluster_sync();
    if (rank) return;
  } else
    __syncthreads();
  const float2* tops = (const float2*)(shared + tops_at);
  for (int i = threadIdx.x; i < GROUP * DIM / 2; i += THREADS) {
    const int member = i / (DIM / 2);
    float common = FLOOR, total = 0;
    float2 out = {0, 0};
    for (int s = 0; s < count; s++) common = fmaxf(common, tops[s * GROUP + member].x);
    for (int s = 0; s < count; s++) {
      const float2 top = tops[s * GROUP + member], piece = ((const float2*)(shared + pieces_at))[s * GROUP * (DIM / 2) + i];
      const float share = power(__fsub_rn(top.x, common));
      total = __fmaf_rn(share, top.y, total), out.x = __fmaf_rn(share, piece.x, out.x), out.y = __fmaf_rn(share, piece.y, out.y);
    }
    float final;
    asm("div.full.f32 %0, %1, %2;" : "=f"(final) : "f"(a.v_scale), "f"(total > 0 ? total : 1.f));
    a.out[((size_t)row * HEADS + head) * (GROUP * DIM / 2) + i] = two_halves(__fmul_rn(out.x, final), __fmul_rn(out.y, final));
  }
#if QUANTIZE
  constexpr int OCTETS = Q_HEADS * DIM / 8, VECTORS = (OCTETS + THREADS - 1) / THREADS;
  u32 *flag = (u32*)(shared + FLAG_AT), *largest = (u32*)shared;
  __syncthreads();
  if (threadIdx.x == 0) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(a.arrivals + row) : "memory");
    *flag = before == HEADS - 1;
    if (*flag) a.arrivals[row] = 0;
  }
  __syncthreads();
  if (!*flag) return;
  uint4 x[VECTORS];
  float most = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    if ((i + 1) * THREADS <= OCTETS || threadIdx.x + i * THREADS < OCTETS)
      x[i] = __ldcg((const uint4*)a.out + (size_t)row * OCTETS + threadIdx.x + i * THREADS);
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    if ((i + 1) * THREADS <= OCTETS || threadIdx.x + i * THREADS < OCTETS) {
      float y[8];
      widen(y, x[i]);
#pragma unroll
      for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(y[j]));
    }
  most = warp_largest(most);
  if (lane == 0) largest[warp] = __float_as_uint(most);
  __syncthreads();
  most = fmaxf(warp_largest(lane < WARPS ? __uint_as_float(largest[lane]) : 0.f), 1e-10f);
  const float inverse = __fdiv_rn(127.f, most);
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    if ((i + 1) * THREADS <= OCTETS || threadIdx.x + i * THREADS < OCTETS) {
      float y[8];
      widen(y, x[i]);
      a.codes[(size_t)row * OCTETS + threadIdx.x + i * THREADS] = {codes_of(y, inverse), codes_of(y + 4, inverse)};
    }
  if (threadIdx.x == 0) a.scale[row] = __fdiv_rn(most, 127.f);
#endif
}

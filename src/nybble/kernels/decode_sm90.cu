// Attention of generated tokens on Hopper over a paged cache of int8 or int4, one query token a row: with FUSED from the projection
// on (rotary embedding, the cache's new token), with QUANTIZE to the int8 rows that the next linear takes.
// `sm90.cuh` goes first. Every sum is taken in the order of `attention_triton._decode` and `_combine` (splits, tiles,
// lanes), and what is rounded there is rounded here: the bits are the same.
//
// A cluster of CLUSTER blocks has a (row, KV head), its warps the row's splits in turn; each copies its own tiles, 4096 bytes of K
// and of V, in the order of memory with the 128-byte swizzle. Partial sums of all splits meet in shared memory. The block that
// finishes a row last quantizes it.
//
// Defined by the host: INT4, HEADS (of KV), GROUP (query heads of each, at most 8), BLOCK_SIZE, WARPS, RING (tiles of
// K and V in turn that a warp has in flight), CLUSTER, RESIDENT,
// FUSED, QUANTIZE, and OUT (0 bf16, 1 fp16: queries and outputs). Heads have 128 channels.

constexpr int DIM = 128, PLANES = INT4 ? 4 : 2, UNITS = DIM / PLANES, SETS = INT4 ? 2 : 1, TILE = INT4 ? 64 : 32;
constexpr int THREADS = WARPS * 32, PARTS = WARPS * CLUSTER, SPLIT = 64, LEVELS = 4, CODES = INT4 ? 64 : 128;
constexpr int KEYS = TILE / 16, STEPS = UNITS / 16, KEY_BYTES = 16 * CODES;  // tensor-core tiles of keys, of 16-bit units
// A product's eight columns are the GROUP queries, ALL with those that fill up a power of two, again and again: SHARERS lanes of four
// hold the same two, and each works on every SHARERS-th eight keys. EVERY sums of a lane are of keys that are 32 apart.
constexpr int ALL = GROUP > 4 ? 8 : GROUP > 2 ? 4 : GROUP, COLUMNS = ALL == 1 ? 1 : 2, SHARERS = ALL > 2 ? 8 / ALL : 4;
constexpr int EIGHTS = TILE / 8 / SHARERS, EVERY = 4 / SHARERS, PORTION = TILE * 2 + 16;  // bytes of a query's weights of a tile
constexpr float SCORE_UNIT = INT4 ? 1.f / (1 << 20) : 1.f / (1 << 24);
constexpr int TILE_BYTES = 4096, PARAM_BYTES = SETS * TILE * 4;
constexpr int Q_HEADS = HEADS * GROUP, ROW_HEADS = FUSED ? Q_HEADS + 2 * HEADS : Q_HEADS;
constexpr int PARAMS_AT = WARPS * RING * TILE_BYTES, BARRIERS_AT = PARAMS_AT + WARPS * RING * PARAM_BYTES;
constexpr int PORTIONS_AT = (BARRIERS_AT + WARPS * RING * 8 + 15) / 16 * 16, Q_AT = PORTIONS_AT + WARPS * SETS * ALL * PORTION;
constexpr int STATS_AT = Q_AT + GROUP * DIM * 2;
constexpr int FRESH_AT = (STATS_AT + GROUP * (1 + SETS) * 4 + 15) / 16 * 16;  // the new token: codes of K, of V, parameters
constexpr int FLAG_AT = FRESH_AT + 2 * CODES + 16, TABLE_AT = FLAG_AT + 16;   // then blocks, partial sums, their tops, weights
constexpr float P_FACTOR = INT4 ? 4.f : 64.f, FLOOR = -1.0e30f;

struct Arguments {
  const unsigned short* qkv;  // [rows, ROW_HEADS DIM]
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
  int rows, table_width, blocks, splits;
  int ahead;  // with FUSED, pages of heads that move to the second-level cache while the kernel ahead runs
  int sees_own;  // of this step's keys a row sees its own only: older tiles may be copied before the kernel ahead has ended
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
__device__ __forceinline__ float lowest() { return __uint_as_float(0xFF800000); }  // minus infinity
__device__ __forceinline__ float power(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
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
__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Codes of the PLANE-th channel of two 16-bit units as fp16 without an exponent: code / 2^24 (odd planes of int4: / 2^20).
template <int PLANE>
__device__ __forceinline__ void plane(u32 (&a)[4], const u32 (&raw)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    a[i] = INT4 ? (PLANE / 2 ? raw[i] >> 8 : raw[i]) & (PLANE % 2 ? 0x00F000F0 : 0x000F000F)
                : PLANE ? __byte_perm(raw[i], 0, 0x4341) : raw[i] & 0x00FF00FF;
}
// A lane's EVERY sums of keys modulo 32 -> the sum of all, in every lane.
__device__ __forceinline__ float unfold(const float (&x)[EVERY], int lane) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float one = SHARERS == 1 ? x[i] : __shfl_sync(~0u, x[i / SHARERS], i % SHARERS * EVERY + lane % EVERY, 4);
    sum = i ? __fadd_rn(sum, one) : one;
  }
  return lane_sum<4>(sum);
}
__device__ __forceinline__ void store_first(u32 to, float x) {  // to the first block's memory
  if (CLUSTER > 1)
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
  else
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
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
  const u32 base = shared_address(shared), ring = base + warp * RING * TILE_BYTES;
  const u32 params = base + PARAMS_AT + warp * RING * PARAM_BYTES, barriers = base + BARRIERS_AT + warp * RING * 8;
  int* blocks = (int*)(shared + TABLE_AT);
  const int pieces_at = TABLE_AT + (a.blocks * 4 + 15) / 16 * 16, tops_at = pieces_at + a.splits * GROUP * DIM * 4;
  if (CLUSTER > 1) cluster_arrive();
  launch_next();

  // Before the wait: what is older than the kernel before this one.
  const int context = a.context[row], count = split_count(context);
  for (int i = threadIdx.x; i < a.blocks; i += THREADS) blocks[i] = a.table[(size_t)row * a.table_width + i];
  if (lane == 0) {
    for (int i = 0; i < RING; i++) init_barrier(barriers + 8 * i, 1);
    fence_barriers();
  }
  float cosine[2], sine[2];
  const long long slot = FUSED ? a.slot[row] : -1;
  if (FUSED) {
    const float* angles = a.cos_sin + (size_t)a.position[row] * DIM;
#pragma unroll
    for (int i = 0; i < 2; i++) cosine[i] = angles[channel_of(i, lane)], sine[i] = angles[DIM / 2 + channel_of(i, lane)];
  }
  const bool early = FUSED || a.sees_own;
  if (!early) wait_kernel_before();  // it wrote the newest tokens
  __syncthreads();
  auto begin = [&](Walk& w, int split) {
    w.split = split, w.first = split_start(split), w.end = min(context, split_start(split + 1));
  };
  auto next = [&](Walk& w) {
    if ((w.first += TILE) >= w.end) begin(w, w.split + PARTS);
  };
  auto copy = [&](int is_v, int slot, const Walk& w) {
    if (lane || w.split >= count) return;
    const TensorMap* map = is_v ? &v_map : &k_map;
    const u32* from = is_v ? a.v_params : a.k_params;
    const int page = blocks[w.first / BLOCK_SIZE] * HEADS + head, inside = w.first % BLOCK_SIZE;
    const u32 barrier = barriers + 8 * slot;
    expect(barrier, TILE_BYTES + PARAM_BYTES);
    copy_box(ring + slot * TILE_BYTES, map, 0, (page * BLOCK_SIZE + inside) / (INT4 ? 2 : 1), barrier, EVICT_FIRST);
    constexpr int RUNS = BLOCK_SIZE == TILE ? 1 : SETS;  // of parameters, side by side
#pragma unroll
    for (int i = 0; i < RUNS; i++)
      bulk_copy(params + slot * PARAM_BYTES + i * TILE * 4,
                from + (size_t)page * (BLOCK_SIZE * SETS) + i * BLOCK_SIZE + inside, PARAM_BYTES / RUNS, barrier, EVICT_FIRST);
  };
  Walk here, ahead;
  begin(here, warp * CLUSTER + rank);
  auto fill = [&](bool newest, bool older) {  // the ring, as far as a tile holds the newest token or not
    ahead = here;
#pragma unroll
    for (int i = 0; i < RING; i++) {
      if (ahead.first + TILE >= context ? newest : older) copy(i % 2, i, ahead);
      if (i % 2) next(ahead);
    }
  };
  fill(FUSED || !early, true);
  if (const int at = blockIdx.x * THREADS + threadIdx.x; FUSED && at < a.ahead)
    prefetch_page<HEADS, BLOCK_SIZE, CODES, SETS * 4>(at, a.context, a.rows, a.table, a.table_width, a.k, a.v, a.k_params,
                                                      a.v_params);
  if (early) wait_kernel_before();
  if (!FUSED && early) fill(true, false);

  // Queries to fp16, divided by a power of two; the new token's K and V to codes.
  float* stats = (float*)(shared + STATS_AT);
  constexpr int ITEMS = GROUP + (FUSED ? 2 : 0);
  u32 pairs[2] = {}, soon[2] = {};
  auto fetch = [&](int i) {
    const int at = i < GROUP ? head * GROUP + i : Q_HEADS + (i - GROUP) * HEADS + head;
    const unsigned short* from = a.qkv + ((size_t)row * ROW_HEADS + at) * DIM;
#pragma unroll
    for (int j = 0; j < 2 && i < ITEMS; j++)
      soon[j] = INT4 ? from[channel_of(2 * j, lane)] | (u32)from[channel_of(2 * j + 1, lane)] << 16
                     : *(const u32*)(from + channel_of(2 * j, lane));
  };
  fetch(warp);
#pragma unroll 1
  for (int i = warp; i < ITEMS; i += WARPS) {
    const bool query = i < GROUP;
    pairs[0] = soon[0], pairs[1] = soon[1], fetch(i + WARPS);
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) y[j] = value(pairs[j / 2] >> j % 2 * 16 & 0xFFFF);
    if (FUSED && i <= GROUP) {
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
      float sum[SETS];
      if (INT4) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
          const unsigned short x = half_of(__fmul_rn(y[p], inverse));
          const float one = eights_sum(half_value(x));
          sum[p / 2 % SETS] = p % 2 ? __fadd_rn(sum[p / 2 % SETS], one) : one;
          to[p * UNITS + lane] = p % 2 ? x : half_of(half_value(x) * 16.f);  // codes of odd planes are 16 times as large
        }
      } else {
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const unsigned short low = half_of(__fmul_rn(y[p], inverse)), high = half_of(__fmul_rn(y[p + 2], inverse));
          const float one = lane_sum<1>(__fadd_rn(half_value(low), half_value(high)));
          sum[0] = p ? __fadd_rn(sum[0], one) : one;
          to[p * UNITS + lane] = low, to[p * UNITS + 32 + lane] = high;
        }
      }
      if (lane == 0) {
        float* stat = stats + i * (1 + SETS);
        stat[0] = __fmul_rn(__uint_as_float(exponent), a.q_scale / SCORE_UNIT);
#pragma unroll
        for (int s = 0; s < SETS; s++) stat[1 + s] = sum[s] * SCORE_UNIT;
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
  float factor[2], q_sum[SETS][2];
  const int column = lane / 4 % ALL, sharer = lane % 4 / EVERY;
#pragma unroll
  for (int p = 0; p < PLANES; p++)
#pragma unroll
    for (int t = 0; t < STEPS; t++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        q[p][t][i] = column < GROUP ? *(const u32*)(shared + Q_AT + ((column * PLANES + p) * UNITS + t * 16 + i * 8 + lane % 4 * 2) * 2) : 0;
#pragma unroll
  for (int e = 0; e < COLUMNS; e++) {
    const int member = min(lane % EVERY * 2 + e, GROUP - 1);
    const float* stat = stats + member * (1 + SETS);
    factor[e] = stat[0];
#pragma unroll
    for (int s = 0; s < SETS; s++) q_sum[s][e] = stat[1 + s];
  }
  if (CLUSTER > 1) cluster_wait();  // all blocks have begun
  // Of 8 x 8 matrices; 32 bytes further is a flipped bit, for tiles lie at multiples of 1024.
  const u32 k_lane = place(lane / 8 % 2 * 8 + lane % 8, lane / 16), v_lane = place(lane / 16 * 8 + lane % 8, lane / 8 % 2);

  const int first_key = sharer * 8 + lane / 4;  // of a tile, of this lane; the next are 8 SHARERS further
  const u32 portions = base + PORTIONS_AT + warp * SETS * ALL * PORTION;
  const u32 portion_to = portions + lane % EVERY * 2 * PORTION + lane / 8 * (TILE / 2) + sharer * 4 + lane / 4 % 2 * 2;
  const u32 portion_from = portions + column * PORTION + lane % 4 * (TILE / 2);
  float m[2] = {FLOOR, FLOOR}, weight[2][EVERY] = {}, bias[SETS][2][EVERY] = {}, acc[PLANES][STEPS][4] = {};
  for (int n = 0; here.split < count; n++) {
    const int k_slot = 2 * n % RING, v_slot = (2 * n + 1) % RING, fresh_at = context - 1 - here.first;
    const u32 k_tile = ring + k_slot * TILE_BYTES, v_tile = ring + v_slot * TILE_BYTES;
    const u32 k_param = params + k_slot * PARAM_BYTES, v_param = params + v_slot * PARAM_BYTES;
    auto patch = [&](u32 tile, u32 param, int is_v) {  // zeros behind the newest token, and itself if it was not there yet
      if (fresh_at >= TILE) return;
#pragma unroll
      for (int i = 0; i < PARAM_BYTES / 128; i++)
        if (i * 32 % TILE + lane > fresh_at)
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(param + (i * 32 + lane) * 4), "r"(0) : "memory");
      if (FUSED && lane < CODES / 16) {
        const uint4 piece = load_shared(base + FRESH_AT + is_v * CODES + lane * 16);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(tile + place(fresh_at, lane)), "r"(piece.x), "r"(piece.y),
                     "r"(piece.z), "r"(piece.w)
                     : "memory");
      }
      if (FUSED && lane < SETS)
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

    wait(barriers + 8 * k_slot, 2 * n / RING & 1);
    patch(k_tile, k_param, 0);
    float part[SETS][KEYS][4] = {};
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      u32 raw[STEPS][4], x[4];
#pragma unroll
      for (int t = 0; t < STEPS; t++) load_matrices<false>(raw[t], ((k_tile + k_lane) ^ t << 5) + j * KEY_BYTES);
#pragma unroll
      for (int t = 0; t < STEPS; t++) plane<0>(x, raw[t]), product(part[0][j], x, q[0][t]);
#pragma unroll
      for (int t = 0; t < STEPS; t++) plane<1>(x, raw[t]), product(part[0][j], x, q[1][t]);
      if (INT4) {
#pragma unroll
        for (int t = 0; t < STEPS; t++) plane<2>(x, raw[t]), product(part[SETS - 1][j], x, q[2 % PLANES][t]);
#pragma unroll
        for (int t = 0; t < STEPS; t++) plane<3>(x, raw[t]), product(part[SETS - 1][j], x, q[3 % PLANES][t]);
      }
    }
    float score[EIGHTS][2], largest[2] = {lowest(), lowest()};
#pragma unroll
    for (int u = 0; u < EIGHTS; u++)
#pragma unroll
      for (int s = 0; s < SETS; s++) {
        float scale, minimum;
        scale_min(k_param, s, first_key + u * 8 * SHARERS, scale, minimum);
#pragma unroll
        for (int e = 0; e < COLUMNS; e++) {
          float mine = 0;
#pragma unroll
          for (int i = 0; i < SHARERS; i++) {
            const int eight = u * SHARERS + i;
            if (i == 0 || i == sharer) mine = part[s][eight / 2][eight % 2 * 2 + e];
          }
          score[u][e] = __fmaf_rn(mine, scale, __fmaf_rn(minimum, q_sum[s][e], s ? score[u][e] : 0.f));
        }
      }
#pragma unroll
    for (int u = 0; u < EIGHTS; u++)
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) {
        if (first_key + u * 8 * SHARERS > fresh_at) score[u][e] = lowest();
        largest[e] = fmaxf(largest[e], score[u][e]);
      }
    __syncwarp();
    copy(RING % 2, k_slot, ahead);  // what follows in the ring
    if (RING % 2) next(ahead);

    float fade[2];
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) {
      const float most = fmaxf(m[e], __fmul_rn(lane_most<EVERY>(largest[e]), factor[e]));
      fade[e] = m[e] > FLOOR ? power(__fsub_rn(m[e], most)) : 1.f, m[e] = most;  // of nothing: zeros, which may stay
      float sum[EVERY];
#pragma unroll
      for (int u = 0; u < EIGHTS; u++) {
        const float p = score[u][e] = power(__fmaf_rn(score[u][e], factor[e], -most));
        sum[u % EVERY] = u < EVERY ? p : __fadd_rn(sum[u % EVERY], p);
      }
#pragma unroll
      for (int i = 0; i < EVERY; i++) weight[e][i] = __fmaf_rn(weight[e][i], fade[e], sum[i]);
    }

    wait(barriers + 8 * v_slot, (2 * n + 1) / RING & 1);
    patch(v_tile, v_param, 1);
    // Weights to where a product's lanes want them: the queries' rows, in these keys two, of each eight, side by side.
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      float low[2][EVERY];
#pragma unroll
      for (int u = 0; u < EIGHTS; u++) {
        float by, minimum;
        scale_min(v_param, s, first_key + u * 8 * SHARERS, by, minimum);
#pragma unroll
        for (int e = 0; e < COLUMNS; e++) {
          const float p = score[u][e], shift = __fmul_rn(p, minimum);
          low[e][u % EVERY] = u < EVERY ? shift : __fadd_rn(low[e][u % EVERY], shift);
          const u32 to = portion_to + (s * ALL + e) * PORTION + u * SHARERS * 4;
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(half_of(p * (by * P_FACTOR))) : "memory");
        }
      }
#pragma unroll
      for (int e = 0; e < COLUMNS; e++)
#pragma unroll
        for (int i = 0; i < EVERY; i++) bias[s][e][i] = __fmaf_rn(bias[s][e][i], fade[e], low[e][i]);
    }
    __syncwarp();
    if (__any_sync(~0u, fade[0] != 1.f || (COLUMNS == 2 && fade[COLUMNS - 1] != 1.f)))
#pragma unroll
      for (int i = 0; i < PLANES * STEPS * 4; i += 3 - COLUMNS) acc[i / 4 / STEPS][i / 4 % STEPS][i % 4] *= fade[i % 2];
    u32 portion[SETS][KEYS][2];
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
      for (int j = 0; j < KEYS; j += 2) {
        const uint4 four = load_shared(portion_from + s * ALL * PORTION + j * 8);
        portion[s][j][0] = four.x, portion[s][j][1] = four.y, portion[s][j + 1][0] = four.z, portion[s][j + 1][1] = four.w;
      }
#pragma unroll
    for (int j = 0; j < KEYS; j++)
#pragma unroll
      for (int u = 0; u < STEPS; u++) {
        u32 raw[4], x[4];
        load_matrices<true>(raw, ((v_tile + v_lane) ^ u << 5) + j * KEY_BYTES);
        plane<0>(x, raw), product(acc[0][u], x, portion[0][j]);
        plane<1>(x, raw), product(acc[1][u], x, portion[0][j]);
        if (INT4) {
          plane<2>(x, raw), product(acc[2 % PLANES][u], x, portion[SETS - 1][j]);
          plane<3>(x, raw), product(acc[3 % PLANES][u], x, portion[SETS - 1][j]);
        }
      }
    __syncwarp();
    copy(1 - RING % 2, v_slot, ahead);
    if (RING % 2 == 0) next(ahead);

    if (here.first + TILE >= here.end) {  // the split's sums, over an integer power of two
      const u32 to = base + pieces_at + here.split * GROUP * DIM * 4, top_to = base + tops_at + here.split * GROUP * 8;
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) {
        const int member = lane % 4 * 2 + e;
        const float top = ceilf(m[e]), scale = power(__fsub_rn(m[e], top)), all = __fmul_rn(unfold(weight[e], lane), scale);
        const float by = scale * (1.f / P_FACTOR);
        float low[SETS];
#pragma unroll
        for (int s = 0; s < SETS; s++) low[s] = unfold(bias[s][e], lane) * P_FACTOR;
        if (member < GROUP) {
          const u32 there = CLUSTER > 1 ? in_cluster(to, 0) : to, top_there = CLUSTER > 1 ? in_cluster(top_to, 0) : top_to;
#pragma unroll
          for (int p = 0; p < PLANES; p++)
#pragma unroll
            for (int u = 0; u < STEPS; u++)
#pragma unroll
              for (int i = 0; i < 2; i++) {
                const int place = u * 16 + i * 8 + lane / 4, channel = INT4 ? p * UNITS + place : 2 * place + p;
                const float unit = INT4 && p % 2 ? 1 << 20 : 1 << 24;
                const float piece = __fmul_rn(__fmaf_rn(acc[p][u][2 * i + e], unit, low[p / 2 % SETS]), by);
                store_first(there + (member * DIM + channel) * 4, piece);
              }
          if (lane < 4) store_first(top_there + member * 8, top), store_first(top_there + member * 8 + 4, all);
        }
        m[e] = FLOOR;
#pragma unroll
        for (int i = 0; i < EVERY; i++) {
          weight[e][i] = 0;
#pragma unroll
          for (int s = 0; s < SETS; s++) bias[s][e][i] = 0;
        }
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
      for (int j = 0; j < 8; j++) most = larger(most, fabsf(y[j]));
    }
  most = warp_largest(most);
  if (lane == 0) largest[warp] = __float_as_uint(most);
  __syncthreads();
  most = larger(warp_largest(lane < WARPS ? __uint_as_float(largest[lane]) : 0.f), 1e-10f);
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

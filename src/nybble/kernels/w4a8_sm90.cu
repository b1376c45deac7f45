// y[m, n] = x_scale[m] * w_scale[n] * (exact int32 sum over k of w[n, k] * x[m, k]) on Hopper, sm_90a, compiled by NVRTC.
//
// One warp copies, two warpgroups multiply. Weights are packed in the order of the tensor core's register operand: one bulk
// copy brings a tile, a 16-byte shared load and three integer instructions per eight weights make operands of two products.
// Activations are the shared-memory operand, 128-byte swizzle. A cluster is CLUSTER_K shares of the input channels of one
// tile, whose int32 sums are added through distributed shared memory, or with THROUGH_MEMORY, as plain blocks, through global.
//
// Defined by the host: TOKENS (a tile's), STAGES, ROW_TILES (64-row tiles of a warpgroup: 1, 2), WARPGROUPS, RESIDENT (blocks a
// processor must hold), CLUSTER_K, MODE (0 int4, 1 int4 with whole group scales, 2 with float16 ones), OUT (0 bf16, 1 fp16, 2
// fp32), REGISTERS (of a multiplying thread, taken from the copying ones that then number 128; 0: all alike), WARP_LEVEL
// (mma.sync of each warp, for few tokens), STREAM (the tiles that fill no wave are cut in equal shares, partial sums through
// global memory), LAG (steps that the second warpgroup starts late, so that its ends fall into the products of the first), AHEAD
// (stages of weights copied before the kernel ahead has ended: activations queue up behind them), those of sm90.cuh; and
// `product(int (&sum)[TOKENS / 2], const unsigned (&a)[4], u64 x)`.

constexpr int COPIERS = REGISTERS ? 128 : 32, COPY_REGISTERS = RESIDENT == 1 ? 40 : 32;
constexpr int BM = 64 * ROW_TILES * WARPGROUPS, GROUPS = TOKENS / 8;
constexpr int PACKED = 8192;  // bytes of 128 rows x 128 channels
constexpr int W_BYTES = BM / 128 * PACKED, X_BYTES = TOKENS * 128, S_BYTES = MODE * BM;
constexpr int W_AT = STAGES * X_BYTES, S_AT = W_AT + STAGES * W_BYTES, BARRIERS_AT = S_AT + STAGES * S_BYTES;
constexpr int OWNED = (GROUPS + CLUSTER_K - 1) / CLUSTER_K;  // groups of eight tokens that one share of a cluster finishes
constexpr int PIECE = WARPGROUPS * 128 * 16;                 // one group of one 64-row tile of every warpgroup
constexpr int BY_AT = BARRIERS_AT + 16 * STAGES;             // scales of a tile's tokens, of each warpgroup
constexpr int SUM_AT = (BY_AT + WARPGROUPS * TOKENS * 4 + 127) / 128 * 128;
constexpr int SUM_BYTES = THROUGH_MEMORY ? 0 : (CLUSTER_K - 1) * OWNED * ROW_TILES * PIECE;
constexpr bool SUM_APART = SUM_BYTES <= 16384;  // else sums use the stages, once nobody reads them any more
constexpr bool FOLD = WARP_LEVEL && MODE == 1;  // whole scales multiply the sums of a group instead of its weights
static_assert(0 < AHEAD && AHEAD <= STAGES, "");

// Operands of the products of 64 rows with channels 32 h.. and 64 + 32 h... Per channel: 16 * code, two instructions for four
// weights. Groups: nibbles u = code + 8 and a whole scale s <= 16; u * s + 128 - 8 s fits an unsigned byte, so one multiply
// serves four lanes without a carry, and flipping the top bits takes the 128 off again (FOLD: 16 * code). Float16 scales: code *
// scale + 1280 is rounded once, to an even whole number at ties, and its low byte is the int8.
struct Pair {
  u32 low[4], high[4];
};
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {  // pairs of float16
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <u32 MASK, u32 FLIPPED>
__device__ __forceinline__ u32 bits_of(u32 v) {  // (v & MASK) ^ FLIPPED, of which the compiler makes two instructions
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(v), "n"(MASK), "n"(FLIPPED));
  return d;
}
template <bool HIGH>
__device__ __forceinline__ u32 rounded(u32 even, u32 odd, u32 scale) {  // four int8
  // Under the exponent bits of 1024 low nibbles count ones, high ones sixteens: 1 * u - 1032 and u / 16 - 72 are the codes.
  constexpr u32 BY = HIGH ? 0x2C002C00 : 0x3C003C00, LESS = HIGH ? 0xD480D480 : 0xE408E408, TO_BYTE = 0x65006500;
  auto pair = [&](u32 w) {
    return multiply_add(multiply_add(bits_of<HIGH ? 0x00F000F0 : 0x000F000F, 0x64006400>(w), BY, LESS), scale, TO_BYTE);
  };
  u32 four;
  asm("prmt.b32 %0, %1, %2, 0x6240;" : "=r"(four) : "r"(pair(even)), "r"(pair(odd)));
  return four;
}
__device__ __forceinline__ void unpack(Pair& out, const uint4& packed, u32 scales) {
  const u32 w[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (MODE == 0 || FOLD) {
      constexpr u32 TOPS = FOLD ? 0x80808080 : 0;
      out.low[i] = bits_of<0xF0F0F0F0, TOPS>(w[i] << 4), out.high[i] = bits_of<0xF0F0F0F0, TOPS>(w[i]);
    } else if (MODE == 2) {
      const u32 s = __byte_perm(scales, 0, i % 2 ? 0x3232 : 0x1010);
      out.low[i] = rounded<false>(w[i], w[i] >> 8, s), out.high[i] = rounded<true>(w[i], w[i] >> 8, s);
    } else {
      const u32 s = scales >> i % 2 * 8 & 0xFF, offset = 0x80808080u - s * 0x08080808u;
      out.low[i] = ((w[i] & 0x0F0F0F0Fu) * s + offset) ^ 0x80808080u;
      out.high[i] = ((w[i] >> 4 & 0x0F0F0F0Fu) * s + offset) ^ 0x80808080u;
    }
  }
}
// The tensor core may still read an operand: hold its registers until here.
__device__ __forceinline__ void keep(Pair (&p)[ROW_TILES]) {
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(p[i].low[j]), "+r"(p[i].high[j])::"memory");
}
__device__ __forceinline__ void multiply(int (&sum)[ROW_TILES][TOKENS / 2], Pair (&a)[ROW_TILES], u64 low, u64 high) {
  products_begin();
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) product(sum[i], a[i].low, low);
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) product(sum[i], a[i].high, high);
  products_commit();
}
// Eight tokens by four pieces of 16 channels, the B operands of two warp-level products.
__device__ __forceinline__ u32 tokens_offset(int half) {
  const int lane = threadIdx.x % 32, piece = lane / 16 * 4 + half * 2 + lane / 8 % 2, token = lane % 8;
  return token * 128 + ((piece ^ token) << 4);
}
__device__ __forceinline__ uint4 load_tokens(u32 address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
__device__ __forceinline__ void warp_product(int* sum, const u32 (&a)[4], u32 b0, u32 b1, bool first) {  // first: sum is new
  const int c[4] = {first ? 0 : sum[0], first ? 0 : sum[1], first ? 0 : sum[2], first ? 0 : sum[3]};
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ uint4 vector_of(const int* sum) {
  return {(u32)sum[0], (u32)sum[1], (u32)sum[2], (u32)sum[3]};
}
__device__ __forceinline__ void add(int* sum, const uint4& more) {
  sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
}
// Neighbouring rows of one token.
__device__ __forceinline__ void store_neighbours(char* at, const float (&v)[2 * ROW_TILES]) {
  if (OUT == 2) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) ((float2*)at)[i] = {v[2 * i], v[2 * i + 1]};
  } else if (ROW_TILES == 2) {
    *(uint2*)at = {two_halves(v[0], v[1]), two_halves(v[2 * ROW_TILES - 2], v[2 * ROW_TILES - 1])};
  } else
    *(u32*)at = two_halves(v[0], v[1]);
}

// Counters in global memory: what was written before add_release is seen after wait_for.
__device__ __forceinline__ void add_release(int* counter, int by) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}
__device__ __forceinline__ void wait_for(const int* counter, int least) {
  int seen = 0;
  for (int tries = 0; seen < least; tries++) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
#ifdef BOUNDED
    if (tries > 1 << 22) __trap();
#endif
  }
}

struct Arguments {
  const char* w;      // [N / 128, K / 128] packed tiles
  const char* group;  // [K / 128, N] scales of MODE bytes
  const float *w_scale, *x_scale;
  void* y;
  uint4* partials;  // STREAM: [blocks * WARPGROUPS, TOKENS / 8 * ROW_TILES, 128]; THROUGH_MEMORY: [blocks, SUM_BYTES / 16]
  int* arrivals;   // zero between launches
  int tokens, rows, padded_rows, steps, row_tiles, token_tiles, order, whole;
};

// A cluster's walk over (tile, step). STREAM: first every clusters-th of the `whole` tiles, then an equal share of the steps of
// the others.
struct Place {
  int tile, step, row_tile, token_tile;
  __device__ __forceinline__ void locate(const Arguments& a) { ::locate(a, tile, row_tile, token_tile); }
};

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + COPIERS, RESIDENT)
    w4a8(const __grid_constant__ TensorMap tokens_map, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = shared_address(shared), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int rank = blockIdx.x % CLUSTER_K;
  const int clusters = gridDim.x / CLUSTER_K, cluster = blockIdx.x / CLUSTER_K, tiles = a.row_tiles * a.token_tiles;
  const int first = rank * a.steps / CLUSTER_K, last = (rank + 1) * a.steps / CLUSTER_K;
  const bool copies = threadIdx.x == WARPGROUPS * 128;
  const int all = STREAM ? (tiles - a.whole) * a.steps : 0, from = STREAM ? cluster * all / clusters : 0;
  const int units = STREAM ? a.whole / clusters * a.steps + (cluster + 1) * all / clusters - from
                           : (tiles - cluster + clusters - 1) / clusters * (last - first);
  auto follow = [&](Place& p) {  // the next tile
    p.step = first;
    if (STREAM && p.tile >= a.whole)
      p.tile++;
    else if ((p.tile += clusters) >= a.whole && STREAM)
      p.tile = a.whole + from / a.steps, p.step = from % a.steps;
    p.locate(a);
  };
  auto next = [&](Place& p) {
    if (++p.step == last) follow(p);
  };
  Place ahead{cluster - clusters};
  follow(ahead);
  auto copy_weights = [&](int stage, const Place& p) {
    const u64 policy = a.token_tiles > 1 ? EVICT_NORMAL : EVICT_FIRST;  // read again, or once
    u32 barrier = full + 8 * stage;
    int row = min(p.row_tile * BM, a.padded_rows - BM);
    expect(barrier, W_BYTES + X_BYTES + S_BYTES);
#pragma unroll
    for (int i = 0; i < BM / 128; i++)
      bulk_copy(base + W_AT + stage * W_BYTES + i * PACKED, a.w + ((size_t)(row / 128 + i) * a.steps + p.step) * PACKED, PACKED,
                barrier, policy);
    if (MODE)
      bulk_copy(base + S_AT + stage * S_BYTES, a.group + ((size_t)p.step * a.padded_rows + row) * MODE, S_BYTES, barrier, policy);
  };
  auto copy_activations = [&](int stage, const Place& p) {
    copy_box(base + stage * X_BYTES, &tokens_map, p.step * 128, p.token_tile * TOKENS, full + 8 * stage, EVICT_LAST);
  };

  int loaded = 0;
  Place begin = ahead;
  if (copies) {
    for (int i = 0; i < STAGES; i++) {
      init_barrier(full + 8 * i, 1);
      init_barrier(empty + 8 * i, WARPGROUPS * (WARP_LEVEL ? 4 : 1));
    }
    fence_barriers();
    fetch_map(&tokens_map);
    for (; loaded < min(AHEAD, units); loaded++, next(ahead)) copy_weights(loaded, ahead);
    launch_next();
  }
  __syncthreads();
  constexpr bool SUMS_MEET = CLUSTER_K > 1 && !THROUGH_MEMORY;
  if (SUMS_MEET) cluster_here();  // waited for where sums are sent
  wait_kernel_before();  // activations, scales and outputs may belong to the kernel before

  int tile_row = 0, tile_token = 0;
  int sum[ROW_TILES][TOKENS / 2];
  if (warpgroup == WARPGROUPS) {
    if (REGISTERS) fewer_registers<COPY_REGISTERS>();
    if (copies) {
      for (int i = 0; i < loaded; i++, next(begin)) copy_activations(i, begin);
      for (int stage = loaded % STAGES, parity = loaded < STAGES, i = loaded; i < units; i++, next(ahead)) {
        wait(empty + 8 * stage, parity);
        copy_weights(stage, ahead);
        copy_activations(stage, ahead);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (SUMS_MEET) {
      cluster_wait();
      if (!SUM_APART) cluster_sync();
      cluster_sync();
    }
    return;
  }

  if (REGISTERS) more_registers<REGISTERS ? REGISTERS : 24>();
  const int odd = ROW_TILES == 1 ? warpgroup & 1 : 0, block = ROW_TILES == 1 ? warpgroup / 2 : warpgroup;
  const int lane_row = thread / 32 * 32 + thread % 32 / 4 * 4;  // a thread's rows: four neighbours of 128, or two of them
  u32 weights_at = W_AT + block * PACKED + odd * 2048 + thread * 16, scales_at = S_AT + (block * 128 + lane_row + 2 * odd) * MODE;
  u32 tokens_at[2] = {tokens_offset(0), tokens_offset(1)};
  asm volatile("" : "+r"(weights_at), "+r"(scales_at), "+r"(tokens_at[0]), "+r"(tokens_at[1]));  // or every step computes them
  auto release = [&](int stage) {
    if (WARP_LEVEL) __syncwarp();
    if (WARP_LEVEL ? thread % 32 == 0 : thread == 0) arrive(empty + 8 * stage);
  };
  float scale[2 * ROW_TILES];
  const u32 by_at = base + BY_AT + warpgroup * TOKENS * 4;
  auto first_row = [&] { return tile_row * BM + block * 128 + lane_row + 2 * odd; };
  float by_token[(TOKENS + 127) / 128];
  auto ask_scales = [&] {
#pragma unroll
    for (int i = 0; i < (TOKENS + 127) / 128; i++) {
      const int token = tile_token * TOKENS + i * 128 + thread;
      by_token[i] = i * 128 + thread < TOKENS && token < a.tokens ? load_float(a.x_scale + token) : 0;
    }
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++)  // FOLD: of sums of 16 * code
      scale[i] = load_float(a.w_scale + min(first_row() + i, a.padded_rows - 1)) * (FOLD ? 0.0625f : 1);
  };
  auto keep_scales = [&] {
    if (WARP_LEVEL) sync_threads(1 + warpgroup, 128);  // the tile before is done with (products of warpgroups see to it)
#pragma unroll
    for (int i = 0; i < (TOKENS + 127) / 128; i++)
      if (i * 128 + thread < TOKENS)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(by_at + i * 512 + thread * 4), "f"(by_token[i]) : "memory");
    sync_threads(1 + warpgroup, 128);
  };
  auto write = [&](bool plain, int share) {  // every CLUSTER_K-th group of eight tokens; plain: all of them, rows by fours
    constexpr int SIZE = OUT == 2 ? 4 : 2;
    const int row = first_row(), token = tile_token * TOKENS + thread % 4 * 2;
    if (row >= a.rows) return;
    const size_t next_token = (size_t)a.rows * SIZE;
    char* at = (char*)a.y + token * next_token + (size_t)row * SIZE;
#pragma unroll
    for (int group = 0; group < GROUPS; group++, at += 8 * next_token) {
      if (group % CLUSTER_K != share) continue;
      float by[2];
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(by[0]), "=f"(by[1]) : "r"(by_at + (thread % 4 * 2 + group * 8) * 4));
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float v[2 * ROW_TILES];
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++) v[i] = (float)sum[i / 2][group * 4 + i % 2 * 2 + c] * scale[i] * by[c];
        if (!plain && token + group * 8 + c >= a.tokens) continue;
        if (plain || a.rows % 4 == 0) {
          store_neighbours(at + c * next_token, v);
        } else {
#pragma unroll
          for (int i = 0; i < 2 * ROW_TILES; i++)
            if (row + i < a.rows) store_one(at + c * next_token, i, v[i]);
        }
      }
    }
  };
  auto finish = [&](int share) {
    a.rows % 4 == 0 && (tile_token + 1) * TOKENS <= a.tokens ? write(true, share) : write(false, share);
  };

  int stage = 0, parity = 0;
#if LAG
  wait(full, 0);
  asm volatile(
      "{ .reg .u32 from, now; .reg .pred p; mov.u32 from, %%clock;\n"
      "again: mov.u32 now, %%clock; sub.u32 now, now, from; setp.lt.u32 p, now, %0; @p bra.uni again; }" ::"r"(
          warpgroup * LAG * 2 * ROW_TILES * TOKENS)  // cycles of products
      : "memory");
#endif
  for (int left = units; left > 0; follow(begin)) {
    tile_row = begin.row_tile, tile_token = begin.token_tile;
    const int end = min(last, begin.step + left);
    left -= end - begin.step;
    const bool finishes = !STREAM || begin.step == 0;
    if (finishes && ROW_TILES == 1) ask_scales();  // from memory, as far away as the first weights
    if (finishes && ROW_TILES == 2)                // no registers are free
      asm volatile("prefetch.global.L2 [%0];" ::"l"(a.w_scale + min(first_row(), a.padded_rows - 1)));
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
      for (int j = 0; j < TOKENS / 2; j++) sum[i][j] = 0;
    // A step's packed weights are read while the products of the step before run.
    Pair one[ROW_TILES], two[ROW_TILES] = {};
    uint4 packed[ROW_TILES][2];
    u32 scales[2] = {};  // of each row tile's two rows
    auto fetch = [&] {
      wait(full + 8 * stage, parity);
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; i++)
        packed[i / 2][i % 2] = load_shared(base + stage * W_BYTES + weights_at + (i % 2 * 2 + i / 2) * 2048);
      constexpr int BYTES = 2 * MODE * ROW_TILES;  // of a thread's scales
      const u32 from = base + stage * S_BYTES + scales_at;
      if (BYTES == 2) asm volatile("ld.shared.u16 %0, [%1];" : "=r"(scales[0]) : "r"(from));
      if (BYTES == 4) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales[0]) : "r"(from));
      if (BYTES == 8) asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(scales[0]), "=r"(scales[1]) : "r"(from));
    };
    auto operands = [&](Pair(&out)[ROW_TILES], int half) {
#pragma unroll
      for (int i = 0; i < ROW_TILES; i++)
        unpack(out[i], packed[i][half], MODE == 1 ? scales[0] >> 16 * i : scales[i]);
    };
#if WARP_LEVEL
    // Sums side by side: products need not wait for the one before, and the next step's loads run beneath them. FOLD: those of
    // a group are multiplied and added when the next one's weights are unpacked.
    constexpr int PARTS = MODE == 0 && TOKENS <= 16 ? 4 : 1;
    static_assert(ROW_TILES == 1, "");
    int part[PARTS][TOKENS / 2] = {};
    u32 by_group = 0;
    auto fold = [&] {
#pragma unroll
      for (int j = 0; j < TOKENS / 2; j++) {
        int all = part[0][j];
#pragma unroll
        for (int more = 1; more < PARTS; more++) all += part[more][j];
        sum[0][j] += FOLD ? all * (int)(by_group >> j % 4 / 2 * 8 & 0xFF) : all;
      }
    };
    for (int step = begin.step; step < end; step++) {
      uint4 x[2][GROUPS];
      fetch();
#pragma unroll
      for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) x[half][j] = load_tokens(base + stage * X_BYTES + tokens_at[half] + j * 1024);
      operands(one, 0), operands(two, 1);
      if (FOLD) fold(), by_group = scales[0];
      release(stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
#pragma unroll
      for (int product = 0; product < 4; product++)
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
          const uint4& tokens = x[product / 2][j];
          const Pair& rows = (product / 2 ? two : one)[0];
          int* sums = &part[product % PARTS][4 * j];
          if (product % 2)
            warp_product(sums, rows.high, tokens.z, tokens.w, FOLD && product < PARTS);
          else
            warp_product(sums, rows.low, tokens.x, tokens.y, FOLD && product < PARTS);
        }
    }
    fold();
    if (finishes) keep_scales();
#else
    int before = -1;
    auto half_step = [&](Pair(&now)[ROW_TILES], int half) {
      const u64 x = swizzled_operand(base + stage * X_BYTES + half * 32);
      operands(now, half);
      keep(now);
      multiply(sum, now, x, x + 4);
    };
    fetch();
    for (int step = begin.step;; step++) {
      half_step(one, 0);
      wait_products<1>();
      keep(two);
      if (before >= 0) release(before);
      half_step(two, 1);
      before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
      if (step + 1 == end) break;
      fetch();
      wait_products<1>();
      keep(one);
    }
    if (finishes && ROW_TILES == 2) ask_scales();
    if (finishes) keep_scales();
    wait_products<0>();
    keep(one), keep(two);
    release(before);
#endif
    if (CLUSTER_K > 1) break;
#if STREAM
    if (end - begin.step < a.steps) {
      // The cluster that begins a tile comes to it last and adds what the clusters after it left long before.
      const size_t slot = (size_t)blockIdx.x * WARPGROUPS + warpgroup;
      constexpr size_t VECTORS = GROUPS * ROW_TILES * 128;
      int* arrived = a.arrivals + (begin.tile - a.whole) * WARPGROUPS + warpgroup;
      if (begin.step > 0) {
#pragma unroll
        for (int i = 0; i < GROUPS * ROW_TILES; i++)
          __stcg(a.partials + slot * VECTORS + i * 128 + thread, vector_of(&sum[i / GROUPS][i % GROUPS * 4]));
        sync_threads(1 + warpgroup, 128);
        if (thread == 0) add_release(arrived, 1);
        continue;
      }
      const int others = ((begin.tile - a.whole + 1) * a.steps * clusters - 1) / all - cluster;
      if (thread == 0) {
        wait_for(arrived, others);
        *arrived = 0;
      }
      sync_threads(1 + warpgroup, 128);
      for (int other = 1; other <= others; other++)
#pragma unroll
        for (int i = 0; i < GROUPS * ROW_TILES; i++)
          add(&sum[i / GROUPS][i % GROUPS * 4],
              __ldcg(a.partials + (slot + (size_t)other * WARPGROUPS) * VECTORS + i * 128 + thread));
    }
#endif
    finish(0);
  }

  if (CLUSTER_K > 1) {  // one tile a cluster: each share finishes every CLUSTER_K-th group of tokens
    if (SUMS_MEET) cluster_wait();
    if (!SUM_APART) cluster_sync();
    const u32 here = base + (SUM_APART ? SUM_AT : 0) + threadIdx.x * 16;
    auto piece = [&](int owner, int slot, int group, int i) {
      return a.partials + (size_t)(cluster * CLUSTER_K + owner) * (CLUSTER_K - 1) * OWNED * ROW_TILES * (PIECE / 16) +
             ((slot * OWNED + group / CLUSTER_K) * ROW_TILES + i) * (PIECE / 16) + threadIdx.x;
    };
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const int owner = group % CLUSTER_K;
      if (owner == rank) continue;
      const int slot = (rank - owner + CLUSTER_K) % CLUSTER_K - 1;
      const u32 there = THROUGH_MEMORY ? 0 : in_cluster(here + (slot * OWNED + group / CLUSTER_K) * ROW_TILES * PIECE, owner);
#pragma unroll
      for (int i = 0; i < ROW_TILES; i++) {
        const uint4 four = vector_of(&sum[i][group * 4]);
        if (THROUGH_MEMORY)
          __stcg(piece(owner, slot, group, i), four);
        else
          asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(there + i * PIECE), "r"(four.x), "r"(four.y),
                       "r"(four.z), "r"(four.w)
                       : "memory");
      }
    }
    if (THROUGH_MEMORY) {
      sync_threads(1 + warpgroup, 128);
      if (thread == 0) {
        int* arrived = a.arrivals + cluster * WARPGROUPS + warpgroup;
        add_release(arrived, 1);
        wait_for(arrived, CLUSTER_K);
        if (atomicAdd(arrived, 1) == 2 * CLUSTER_K - 1) *arrived = 0;  // the last to have seen all
      }
      sync_threads(1 + warpgroup, 128);
    } else
      cluster_sync();
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      if (group % CLUSTER_K != rank) continue;
#pragma unroll
      for (int slot = 0; slot < CLUSTER_K - 1; slot++)
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
          add(&sum[i][group * 4], THROUGH_MEMORY
                                      ? __ldcg(piece(rank, slot, group, i))
                                      : load_shared(here + ((slot * OWNED + group / CLUSTER_K) * ROW_TILES + i) * PIECE));
    }
    finish(rank);
  }
}

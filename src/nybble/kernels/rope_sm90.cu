// Rotary embedding, queries, and the cache's new K and V (as they are, int8, int4, float8) on Hopper. `sm90.cuh` goes first. What
// is rounded, and in which order errors are summed, is `ops_triton._rope_write_kernel`'s and `decode_sm90.cu`'s: the bits are the same.
//
// LANES threads have a head. Each has sixteen channels, eight of each half so that both of a pair are its own; of int4 four of each
// quarter, as they are stored. A warp has ITEMS turns, each as many heads as it holds, of one kind, Q, K or V; their loads are all in
// flight at once. A block has one token: blocks that stay for several are no faster.
//
// Defined by the host: KIND (0 as it is, 1 int8, 2 int4, 3 e4m3, 4 e5m2), HEADS (of queries), KV_HEADS, DIM (a multiple of 16, at
// most 256), BLOCK_SIZE, WARPS, ITEMS, and OUT (0 bf16, 1 fp16).

constexpr int PIECES = KIND == 2 ? 4 : 2, RUN = 16 / PIECES, SETS = KIND == 2 ? 2 : 1, IN_SET = 16 / SETS;
constexpr int USED = DIM / 16, LANES = USED > 8 ? 16 : USED > 4 ? 8 : USED > 2 ? 4 : 2, AT_ONCE = 32 / LANES;
constexpr int Q_TURNS = (HEADS + AT_ONCE - 1) / AT_ONCE, KV_TURNS = (KV_HEADS + AT_ONCE - 1) / AT_ONCE;
constexpr int TURNS = Q_TURNS + 2 * KV_TURNS, ALL = HEADS + 2 * KV_HEADS;
constexpr int PARTS = (TURNS + WARPS * ITEMS - 1) / (WARPS * ITEMS);  // of a token
constexpr int TOKEN_BYTES = KIND == 0 ? 2 * DIM : KIND == 2 ? DIM / 2 : DIM;
static_assert(DIM % 16 == 0 && USED <= 16, "");

struct Arguments {
  const char* qkv;  // [tokens, (HEADS + 2 KV_HEADS) DIM]
  char *q, *k, *v;
  u32 *k_params, *v_params;
  const int* position;
  const long long* slot;
  const float* cos_sin;  // [positions, DIM]
  const int *table, *context;
  float k_scale, v_scale;
  int table_width, rows;
  int ahead;  // pages of heads that move to the second-level cache while the kernel ahead runs
};

__device__ __forceinline__ uint2 load_two(const char* p) {  // here, not where the values are wanted
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_four(const char* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// A lane's sixteen 16-bit channels of a head, in pieces.
__device__ __forceinline__ void load_head(u32 (&x)[8], const char* head, int lane) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const char* from = head + (i * (DIM / PIECES) + lane * RUN) * 2;
    if (PIECES == 2)
      *(uint4*)(x + 4 * i) = load_four(from);
    else
      *(uint2*)(x + 2 * i) = load_two(from);
  }
}
__device__ __forceinline__ void store_head(char* head, const u32 (&x)[8], int lane) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    char* to = head + (i * (DIM / PIECES) + lane * RUN) * 2;
    if (PIECES == 2)
      *(uint4*)to = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    else
      *(uint2*)to = {x[2 * i], x[2 * i + 1]};
  }
}
__device__ __forceinline__ void widen_head(float (&y)[16], const u32 (&x)[8]) {
  float half[8];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    widen(half, {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
#pragma unroll
    for (int j = 0; j < 8; j++) y[8 * i + j] = half[j];
  }
}
__device__ __forceinline__ u32 most_of(u32 a, u32 b) {  // of pairs; a number, where one is
  u32 most;
  if (OUT == 0)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
__device__ __forceinline__ u32 least_of(u32 a, u32 b) {
  u32 least;
  if (OUT == 0)
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  else
    asm("min.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
}
__device__ __forceinline__ u32 low_halves(float a, float b) {
  return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x5410);
}

// `__fdiv_rn` without its branch for what is not normal: 1 / x of a half's value, and x / by of what is far from the smallest.
__device__ __forceinline__ float inverse_of(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  guess = __fmaf_rn(guess, __fmaf_rn(-x, guess, 1.f), guess);
  return __fmaf_rn(guess, __fmaf_rn(-x, guess, 1.f), guess);
}
__device__ __forceinline__ float quotient(float x, float by, float inverse) {
  const float guess = __fmul_rn(x, inverse), better = __fmaf_rn(-__fmaf_rn(guess, by, -x), inverse, guess);
  return fabsf(guess) < 3e38f ? better : guess;  // else infinite; a zero keeps its sign
}

// `formats.numerics.quantize_min_max` of a head's sets: y, which are x, to codes at `to` and (scale, minimum) at `params`.
__device__ __forceinline__ void write_codes(const u32 (&x)[8], const float (&y)[16], char* to, u32* params, int lane, bool live) {
  // Codes come as the last bits of a number of which LEVEL + 1 is 1: so what is too small or too large is cut off at no cost.
  constexpr float LEVEL = KIND == 2 ? 15.f : 255.f, ONE = LEVEL + 1.f, ROUND = 12582912.f / ONE;
  float code[16];
#pragma unroll
  for (int s = 0; s < SETS; s++) {
    const u32* words = x + s * (IN_SET / 2);
    u32 most = words[0], least = words[0];
#pragma unroll
    for (int i = 1; i < IN_SET / 2; i++) most = most_of(most, words[i]), least = least_of(least, words[i]);
    least ^= 0x80008000;
    u32 both = most_of(__byte_perm(most, least, 0x5410), __byte_perm(most, least, 0x7632));
    if (USED < LANES && lane >= USED) both = OUT ? 0xFC00FC00 : 0xFF80FF80;  // less than all
#pragma unroll
    for (int bit = LANES / 2; bit; bit /= 2) both = most_of(both, __shfl_xor_sync(~0u, both, bit));
    const float largest = value(both & 0xFFFF), smallest = -value(both >> 16);
    const unsigned short step = half_of(quotient(__fsub_rn(largest, smallest), LEVEL, 1.f / LEVEL));
    unsigned short minimum = half_of(smallest);
    const float wide = half_value(step), low = half_value(minimum), by = wide > 0 && wide < 1e30f ? inverse_of(wide) * (1.f / ONE) : 0.f;
    float error[4] = {};
#pragma unroll
    for (int i = s * IN_SET; i < (s + 1) * IN_SET; i++) {
      float at;
      asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(at) : "f"(__fsub_rn(y[i], low)), "f"(by));
      if (KIND == 2) at = fminf(at, LEVEL / ONE);
      code[i] = __fadd_rn(at, ROUND);
      if (KIND == 2) {
        const float one = __fmaf_rn(-wide * ONE, code[i] - ROUND, y[i]);
        error[i % 4] = i % 8 < 4 ? one : __fadd_rn(error[i % 4], one);
      }
    }
    if (KIND == 2) {
      float sum[2] = {__fadd_rn(error[0], error[1]), __fadd_rn(error[2], error[3])};
      if (USED < LANES && lane >= USED) sum[0] = sum[1] = 0;
#pragma unroll
      for (int bit = LANES / 2; bit; bit /= 2)
#pragma unroll
        for (int i = 0; i < 2; i++) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(~0u, sum[i], bit));
      minimum = half_of(quotient(__fadd_rn(sum[0], sum[1]), DIM / 2, 2.f / DIM));
    }
    if (live && lane == 0) params[s * BLOCK_SIZE] = step | (u32)minimum << 16;
  }
  u32 out[4];
  if (KIND == 2) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      out[i] = low_halves(code[2 * i], code[2 * i + 1]) | low_halves(code[2 * i + 4], code[2 * i + 5]) << 4 |
               low_halves(code[2 * i + 8], code[2 * i + 9]) << 8 | low_halves(code[2 * i + 12], code[2 * i + 13]) << 12;
    if (live) *(uint2*)(to + lane * 8) = {out[0], out[1]};
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 low = low_halves(code[4 * i], code[4 * i + 1]), high = low_halves(code[4 * i + 2], code[4 * i + 3]);
      asm("min.u16x2 %0, %0, %1;" : "+r"(low) : "r"(0x00FF00FF));
      asm("min.u16x2 %0, %0, %1;" : "+r"(high) : "r"(0x00FF00FF));
      out[i] = __byte_perm(low, high, 0x6420);
    }
    if (live) *(uint2*)(to + lane * 8) = {out[0], out[1]}, *(uint2*)(to + DIM / 2 + lane * 8) = {out[2], out[3]};
  }
}
struct Head {
  int kind, head, column;  // kind: 0 Q, 1 K, 2 V, 3 none; column: which head of a token's projections
  bool live;
  __device__ __forceinline__ Head(int turn, int inside) {
    kind = turn < Q_TURNS ? 0 : turn < Q_TURNS + KV_TURNS ? 1 : turn < TURNS ? 2 : 3;
    head = (turn - (kind == 0 ? 0 : kind == 1 ? Q_TURNS : Q_TURNS + KV_TURNS)) * AT_ONCE + inside;
    column = (kind == 0 ? 0 : kind == 1 ? HEADS : HEADS + KV_HEADS) + head;
    live = kind < 3 && head < (kind ? KV_HEADS : HEADS);
  }
};

__device__ __forceinline__ u32 two_float8(float low, float high) {
  unsigned short both;
  if (KIND == 3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ void write_float8(const float (&y)[16], char* to, float scale, int lane, bool live) {
  const float inverse = __fdiv_rn(1.f, scale);
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    out[i] = two_float8(quotient(y[4 * i], scale, inverse), quotient(y[4 * i + 1], scale, inverse)) |
             two_float8(quotient(y[4 * i + 2], scale, inverse), quotient(y[4 * i + 3], scale, inverse)) << 16;
  if (live) *(uint2*)(to + lane * 8) = {out[0], out[1]}, *(uint2*)(to + DIM / 2 + lane * 8) = {out[2], out[3]};
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) rope_write(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % LANES, inside = threadIdx.x % 32 / LANES, token = blockIdx.x / PARTS;
  const int first = blockIdx.x % PARTS * (WARPS * ITEMS) + __shfl_sync(~0u, threadIdx.x / 32, 0);
  launch_next();
  const int position = a.position[token], slot = (int)a.slot[token];  // older than the kernel before this one
  float cosine[8], sine[8];
  if (first < Q_TURNS + KV_TURNS && lane < USED) {
    const float* from = a.cos_sin + (size_t)position * DIM;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float* at = from + (PIECES == 2 ? lane * 8 + i : i * (DIM / 16) + lane * 4);
      const float4 c = *(const float4*)at, s = *(const float4*)(at + DIM / 2);
      cosine[i] = c.x, cosine[i + 1] = c.y, cosine[i + 2] = c.z, cosine[i + 3] = c.w;
      sine[i] = s.x, sine[i + 1] = s.y, sine[i + 2] = s.z, sine[i + 3] = s.w;
    }
  }
  if (const int at = blockIdx.x * (WARPS * 32) + threadIdx.x; at < a.ahead)
    prefetch_page<KV_HEADS, BLOCK_SIZE, TOKEN_BYTES, SETS * 4>(at, a.context, a.rows, a.table, a.table_width, a.k, a.v, a.k_params,
                                                               a.v_params);
  wait_kernel_before();

  u32 x[ITEMS][8];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const Head h(first + i * WARPS, inside);
    if (h.live && lane < USED) load_head(x[i], a.qkv + ((size_t)token * ALL + h.column) * (2 * DIM), lane);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const Head h(first + i * WARPS, inside);
    const bool live = h.live && lane < USED;
    if (h.kind == 3 || h.kind && slot < 0) break;  // and so are those that follow
    float y[16];
    if (h.kind < 2 || KIND) widen_head(y, x[i]);
    if (h.kind < 2) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float low = __fmaf_rn(y[j], cosine[j], -__fmul_rn(y[j + 8], sine[j]));
        y[j + 8] = __fmaf_rn(y[j + 8], cosine[j], __fmul_rn(y[j], sine[j]));
        y[j] = low;
      }
#pragma unroll
      for (int j = 0; j < 8; j++) x[i][j] = two_halves(y[2 * j], y[2 * j + 1]);
    }
    if (h.kind == 0) {
      if (live) store_head(a.q + ((size_t)token * HEADS + h.head) * (2 * DIM), x[i], lane);
      continue;
    }
    if (h.kind == 1) widen_head(y, x[i]);
    const size_t place = (size_t)(slot / BLOCK_SIZE * KV_HEADS + h.head) * BLOCK_SIZE + slot % BLOCK_SIZE;
    char* to = (h.kind == 1 ? a.k : a.v) + place * TOKEN_BYTES;
    if (KIND == 0) {
      if (live) store_head(to, x[i], lane);
    } else if (KIND <= 2) {
      u32* params = (h.kind == 1 ? a.k_params : a.v_params) + SETS * place - (SETS - 1) * (slot % BLOCK_SIZE);
      write_codes(x[i], y, to, params, lane, live);
    } else {
      write_float8(y, to, h.kind == 1 ? a.k_scale : a.v_scale, lane, live);
    }
  }
}

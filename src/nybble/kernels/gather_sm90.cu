// A paged cache's tokens to the rows that prompt attention multiplies, on Hopper: what `attention_triton._gather` does, the same bits.
// `sm90.cuh` goes first. A block has TOKENS positions of K or of V of a (row, head). A thread has eight channels of a token (of int4
// four of each quarter), PASSES times, with all loads in flight at once.
//
// Defined by the host: KIND (0 as it is, 1 int8, 2 int4, 3 e4m3, 4 e5m2), HEADS (of the cache), DIM (a multiple of 16), BLOCK_SIZE,
// TILE (positions that are written whole, zeros behind the context's end), TOKENS (of a block, dividing TILE), THREADS; OUT is 1.

constexpr int SETS = KIND == 2 ? 2 : 1, CHANNELS = KIND == 2 ? 16 : 8, LANES = DIM / CHANNELS;
constexpr int TOKEN_BYTES = KIND == 0 ? 2 * DIM : KIND == 2 ? DIM / 2 : DIM, BYTES = TOKEN_BYTES / LANES, ITEMS = TOKENS * LANES;
constexpr int PASSES = (ITEMS + THREADS - 1) / THREADS;
static_assert(DIM % 16 == 0 && TILE % TOKENS == 0, "");

struct Arguments {
  const char *k, *v;
  const u32 *k_params, *v_params;
  const int *table, *context, *query_start;
  char *k_out, *v_out;  // [rows, heads, capacity, DIM]
  int table_width, window, first_row, first_head, capacity, heads;
};

// Two values as fp16, as far as it goes; what is no number becomes the least.
__device__ __forceinline__ u32 pair_of(float first, float second) {
  u32 both = two_halves(first, second);
  asm("max.f16x2 %0, %0, %1;" : "+r"(both) : "r"(0xFBFFFBFF));
  asm("min.f16x2 %0, %0, %1;" : "+r"(both) : "r"(0x7BFF7BFF));
  return both;
}
__device__ __forceinline__ float whole(u32 bits) { return __uint_as_float(bits) - 8388608.f; }

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Arguments a) {
  const int tiles = a.capacity / TOKENS, start = blockIdx.x % tiles * TOKENS, is_v = blockIdx.x / tiles % 2;
  const int head = blockIdx.x / tiles / 2 % a.heads, row = blockIdx.x / tiles / 2 / a.heads, of = a.first_row + row;
  launch_next();
  const int context = a.context[of], seen = context - (a.query_start[of + 1] - a.query_start[of]) + 1 - a.window;
  const bool wanted = start / TILE * TILE < context && start / TILE * TILE + TILE > seen;
  u32 page[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int position = start + (i * THREADS + (int)threadIdx.x) / LANES;
    if (wanted && position < context && i * THREADS + threadIdx.x < ITEMS)
      page[i] = a.table[(size_t)of * a.table_width + position / BLOCK_SIZE] * HEADS + a.first_head + head;
  }
  wait_kernel_before();
  if (!wanted) return;

  const char* from = is_v ? a.v : a.k;
  const u32* params = is_v ? a.v_params : a.k_params;
  uint4 raw[PASSES];
  u32 scales[PASSES][SETS];
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int item = i * THREADS + threadIdx.x, position = start + item / LANES, inside = position % BLOCK_SIZE;
    raw[i] = {};
#pragma unroll
    for (int s = 0; s < SETS; s++) scales[i][s] = 0;
    if (position < context && item < ITEMS) {
      const char* at = from + ((size_t)page[i] * BLOCK_SIZE + inside) * TOKEN_BYTES + item % LANES * BYTES;
      if (BYTES == 16)
        raw[i] = *(const uint4*)at;
      else
        *(uint2*)&raw[i] = *(const uint2*)at;
      if (KIND == 1 || KIND == 2)
#pragma unroll
        for (int s = 0; s < SETS; s++) scales[i][s] = params[(size_t)page[i] * (BLOCK_SIZE * SETS) + s * BLOCK_SIZE + inside];
    }
  }
  char* to = (is_v ? a.v_out : a.k_out) + ((size_t)(row * a.heads + head) * a.capacity + start) * (2 * DIM);
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int item = i * THREADS + threadIdx.x;
    if (item >= ITEMS) break;
    char* out = to + item / LANES * (2 * DIM) + item % LANES * (2 * CHANNELS / (KIND == 2 ? 4 : 1));
    const u32 word[2] = {raw[i].x, raw[i].y};
    u32 y[8];
    if (KIND == 0) {
      *(uint4*)out = raw[i];
    } else if (KIND == 2) {
#pragma unroll
      for (int j = 0; j < 4; j++) {  // quarters
        const float scale = half_value(scales[i][j / 2 % SETS]), least = half_value(scales[i][j / 2 % SETS] >> 16);
#pragma unroll
        for (int n = 0; n < 2; n++)
          y[2 * j + n] = pair_of(fmaf(whole(word[n] >> 4 * j & 15 | 0x4B000000), scale, least),
                                 fmaf(whole(word[n] >> (16 + 4 * j) & 15 | 0x4B000000), scale, least));
        *(uint2*)(out + j * (DIM / 2)) = {y[2 * j], y[2 * j + 1]};
      }
    } else {
      const float scale = half_value(scales[i][0]), least = half_value(scales[i][0] >> 16);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        if (KIND == 1) {
          const u32 low = __byte_perm(word[n / 2], 0x4B000000, n % 2 ? 0x7552 : 0x7550);
          const u32 high = __byte_perm(word[n / 2], 0x4B000000, n % 2 ? 0x7553 : 0x7551);
          y[n] = pair_of(fmaf(whole(low), scale, least), fmaf(whole(high), scale, least));
        } else {
          y[n] = __byte_perm(word[n / 2], 0, n % 2 ? 0x3424 : 0x1404);
          if (KIND == 3) y[n] = y[n] & 0x80008000 | y[n] >> 1 & 0x3F803F80;  // an exponent of four bits to its place: value / 256
        }
      }
      *(uint4*)out = {y[0], y[1], y[2], y[3]};
    }
  }
}

// Rows of 16-bit values to int8 codes and a scale on Hopper: OP 0 as they are; 1 after RMSNorm; 2 after SiLU(gate) * up, and with
// HADAMARD the orthonormal matrix of that size on every so many neighbours. `sm90.cuh` goes first. SHARE is for rows of which
// others have parts: 1 gives the largest magnitude of this part in place of a scale, and no codes; 2 is given that of the row.
//
// A cluster of CLUSTER blocks has a row, a thread VECTORS times eight neighbours of it. Loads are all in flight at once; one
// barrier finds the row's sum and its largest value, in an order that WIDTH and the threads of a cluster fix. The last rows go
// first: of what the kernel before wrote, they are what the L2 cache still has.
//
// Defined by the host: OP, WIDTH (a multiple of 8), THREADS, VECTORS, CLUSTER, RESIDUAL (OP 1: there is one to add), WIDE
// (OP 1: weights are float32, not of the rows' type), HADAMARD (0: none; THREADS are a multiple of an eighth of it), ROOT (its square root's inverse); and those of sm90.cuh.

constexpr int IN_ROW = WIDTH / 8, WARPS = THREADS / 32 * CLUSTER, STRIDE = THREADS * CLUSTER;
static_assert(WARPS <= 32 && THREADS % 32 == 0 && WIDTH % 8 == 0 && VECTORS * STRIDE >= IN_ROW, "");

struct Arguments {
  const uint4 *x, *residual, *weight;
  uint4* h;
  uint2* codes;
  float* scale;
  const float* most;
  float eps;
};

__device__ __forceinline__ uint4 load(const uint4* p) {  // here, not where its values are wanted
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float silu(float x) {
  float share;
  asm("{ mul.f32 %0, %1, 0fBFB8AA3B; ex2.approx.ftz.f32 %0, %0; add.f32 %0, %0, 0f3F800000; rcp.approx.ftz.f32 %0, %0; }"
      : "=f"(share)
      : "f"(x));
  return x * share;
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) v += __shfl_xor_sync(~0u, v, bit);
  return v;
}

#if HADAMARD
constexpr int APART = HADAMARD > 256 ? HADAMARD / 256 : 1;  // warps that share a block
// Sums and differences of values 1, 2, 4 ... apart: in a thread, in a warp, between warps.
__device__ __forceinline__ void hadamard(float (&y)[8], float4* room) {
#pragma unroll
  for (int bit = 1; bit < 8 && bit < HADAMARD; bit *= 2)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!(i & bit)) {
        float sum = y[i] + y[i | bit];
        y[i | bit] = y[i] - y[i | bit], y[i] = sum;
      }
#pragma unroll
  for (int bit = 1; bit < 32 * APART && bit * 8 < HADAMARD; bit *= 2) {
    const float sign = threadIdx.x & bit ? -1.f : 1.f;
    float other[8];
    if (bit < 32) {
#pragma unroll
      for (int i = 0; i < 8; i++) other[i] = __shfl_xor_sync(~0u, y[i], bit);
    } else {
      __syncthreads();
      room[threadIdx.x] = {y[0], y[1], y[2], y[3]}, room[THREADS + threadIdx.x] = {y[4], y[5], y[6], y[7]};
      __syncthreads();
      *(float4*)other = room[threadIdx.x ^ bit], *(float4*)(other + 4) = room[THREADS + (threadIdx.x ^ bit)];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = fmaf(sign, y[i], other[i]);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) rows(const __grid_constant__ Arguments a) {
  __shared__ float2 parts[32];
  const int first = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
  const size_t row = gridDim.x / CLUSTER - 1 - blockIdx.x / CLUSTER, at = row * IN_ROW + first;
  uint4 x[VECTORS], more[VECTORS], weight[VECTORS][1 + WIDE];
#define EACH for (int i = 0; i < VECTORS; i++) if ((i + 1) * STRIDE <= IN_ROW || first + i * STRIDE < IN_ROW)
  if (OP == 1) {
#pragma unroll
    EACH for (int j = 0; j <= WIDE; j++) weight[i][j] = load(a.weight + (first + i * STRIDE) * (1 + WIDE) + j);
  }
  if (CLUSTER > 1) cluster_arrive();
  launch_next();
  wait_kernel_before();
#pragma unroll
  EACH x[i] = load(a.x + (OP == 2 ? at + row * IN_ROW : at) + i * STRIDE);
  if (OP == 2 || RESIDUAL) {
#pragma unroll
    EACH more[i] = load((OP == 2 ? a.x + at + (row + 1) * IN_ROW : a.residual + at) + i * STRIDE);
  }

  float y[VECTORS][8], squares = 0, most = 0;
#if HADAMARD
  __shared__ float4 room[APART > 1 ? 2 * THREADS : 1];
#endif
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const bool mine = (i + 1) * STRIDE <= IN_ROW || first + i * STRIDE < IN_ROW;
    if (!mine && !HADAMARD) break;
    float other[8];
    widen(y[i], x[i]);
    if (OP == 2) {
      widen(other, more[i]);
#pragma unroll
      for (int j = 0; j < 8; j++) y[i][j] = silu(y[i][j]) * other[j];
#if HADAMARD
      hadamard(y[i], room);
#pragma unroll
      for (int j = 0; j < 8; j++) y[i][j] *= ROOT;
#endif
    }
    if (OP == 1) {
      if (RESIDUAL) {
        widen(other, more[i]);
        uint4 h = {two_halves(y[i][0] + other[0], y[i][1] + other[1]), two_halves(y[i][2] + other[2], y[i][3] + other[3]),
                   two_halves(y[i][4] + other[4], y[i][5] + other[5]), two_halves(y[i][6] + other[6], y[i][7] + other[7])};
        a.h[at + i * STRIDE] = h;
        widen(y[i], h);
      }
      if (WIDE)
        *(uint4*)other = weight[i][0], *(uint4*)(other + 4) = weight[i][WIDE];
      else
        widen(other, weight[i][0]);
#pragma unroll
      for (int j = 0; j < 8; j++) squares = fmaf(y[i][j], y[i][j], squares), y[i][j] *= other[j];
    }
    if (mine)
#pragma unroll
      for (int j = 0; j < 8; j++) most = larger(most, fabsf(y[i][j]));
  }

  most = warp_largest(most);
  if (OP == 1) squares = warp_sum(squares);
  const int lane = threadIdx.x % 32;
  if (CLUSTER > 1) {
    cluster_wait();  // all of it has begun
    if (lane < CLUSTER)
      asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(in_cluster(shared_address(parts + first / 32), lane)),
                   "f"(squares), "f"(most)
                   : "memory");
    cluster_sync();
  } else {
    if (lane == 0) parts[first / 32] = {squares, most};
    __syncthreads();
  }
  const float2 part = lane < WARPS ? parts[lane] : float2{0, 0};
  most = warp_largest(part.y);
  float by = 1;
  if (OP == 1) {  // 1 / rms is positive: the largest product is the largest result
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(by) : "f"(warp_sum(part.x) / WIDTH + a.eps));
    most *= by;
  }
  if (SHARE == 1) {
    if (first == 0) a.scale[row] = most;
    return;
  }
  if (SHARE == 2) most = a.most[row];
  most = larger(most, 1e-10f);
  const float inverse = __fdiv_rn(127.f, most);
#pragma unroll
  EACH {
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (OP == 1) y[i][j] *= by;
    a.codes[at + i * STRIDE] = {codes_of(y[i], inverse), codes_of(y[i] + 4, inverse)};
  }
  if (first == 0) a.scale[row] = __fdiv_rn(most, 127.f);
}

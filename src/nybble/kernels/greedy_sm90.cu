// The largest logit's token of each row on Hopper, in one launch. `sm90.cuh` goes first.
//
// A cluster of CLUSTER blocks has a row. Each warp's best is stored into the first block's shared memory, where a barrier counts
// the bytes, as a key of 50 bits: a logit's bits, made to sort, over the token counted from behind, so of equals the first wins.
//
// Defined by the host: WIDTH (logits of a row), CLUSTER (2, 4, 8).

constexpr int THREADS = 1024, WARPS = THREADS / 32, LANES = THREADS * CLUSTER, VECTORS = (WIDTH + 4 * LANES - 1) / (4 * LANES);
constexpr int TOKEN_BITS = 18;
constexpr u32 LAST_TOKEN = (1u << TOKEN_BITS) - 1;
static_assert(WIDTH <= 1 << TOKEN_BITS, "");

struct Arguments {
  const float* logits;
  const long long* slots;
  long long *pool, *out;
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000); }

extern "C" __global__ void __launch_bounds__(THREADS) greedy(const __grid_constant__ Arguments a) {
  __shared__ __align__(8) u64 barrier, room[CLUSTER * WARPS];
  const u32 rank = blockIdx.x % CLUSTER, thread = threadIdx.x, first = 4 * (rank * THREADS + thread);
  const int row = blockIdx.x / CLUSTER;
  const float* logits = a.logits + (long long)row * WIDTH;
  if (thread == 0) {
    init_barrier(shared_address(&barrier), 1);
    fence_barriers();
    expect(shared_address(&barrier), sizeof room);
  }
  __syncthreads();
  cluster_here();
  launch_next();
  wait_kernel_before();
  float4 x[VECTORS];  // all loads are in flight at once
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const u32 token = first + 4 * v * LANES;
    if (token >= WIDTH)
      x[v] = {-infinity(), -infinity(), -infinity(), -infinity()};
    else if (WIDTH % 4 == 0)
      asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[v].x), "=f"(x[v].y), "=f"(x[v].z), "=f"(x[v].w)
                   : "l"(logits + token)
                   : "memory");
    else
#pragma unroll
      for (int j = 0; j < 4; j++) ((float*)(x + v))[j] = token + j < WIDTH ? load_float(logits + token + j) : -infinity();
  }
  float most = -infinity();
  u32 winner = LAST_TOKEN;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const float here = larger(larger(x[v].x, x[v].y), larger(x[v].z, x[v].w));
    if (here > most) winner = first + 4 * v * LANES + (x[v].x == here ? 0 : x[v].y == here ? 1 : x[v].z == here ? 2 : 3);
    most = larger(most, here);  // a NaN stays
  }
  const u32 bits = __float_as_uint(most + 0.f), sorts = bits ^ ((int)bits < 0 ? ~0u : 1u << 31);  // -0 is 0
  u32 of_warp, token;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(of_warp) : "r"(sorts));
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(token) : "r"(sorts == of_warp ? winner : LAST_TOKEN));
  cluster_wait();  // all blocks have started
  if (thread % 32 == 0)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(
                     in_cluster(shared_address(room + rank * WARPS + thread / 32), 0)),
                 "l"((u64)of_warp << TOKEN_BITS | (LAST_TOKEN - token)), "r"(in_cluster(shared_address(&barrier), 0))
                 : "memory");
  if (rank != 0 || thread >= 32) return;
  wait(shared_address(&barrier), 0);
  u64 best = 0;
#pragma unroll
  for (int i = thread; i < CLUSTER * WARPS; i += 32) best = max(best, room[i]);
#pragma unroll
  for (int apart = 16; apart; apart /= 2) best = max(best, __shfl_xor_sync(~0u, best, apart));
  if (thread) return;
  const u32 largest = best >> TOKEN_BITS;  // not a number sorts above infinity
  const bool finite = fabsf(__uint_as_float(largest ^ ((int)largest < 0 ? 1u << 31 : ~0u))) < infinity();
  a.out[row] = a.pool[a.slots[row]] = finite ? (long long)(LAST_TOKEN - ((u32)best & LAST_TOKEN)) : -1;
}

// Which token each row draws, on Hopper: temperature, top-k, top-p, min-p and Gumbel noise in one launch. `sm90.cuh` goes first.
//
// A cluster of CLUSTER blocks has a row and keeps it. What the blocks agree on (the largest logit, the border of top-k and top-p,
// the winner) goes through each other's shared memory; all of it is integers or maxima, so no order matters. Tokens are compared
// as keys of 50 bits: a logit's bits, made to sort, over the token counted from behind: no two are equal.
//
// Defined by the host: WIDTH (logits of a row), CLUSTER (2, 4, 8).

constexpr int THREADS = 512, LANES = THREADS * CLUSTER, ITEMS = (WIDTH + LANES - 1) / LANES;
constexpr int WARPS = THREADS / 32, TOKEN_BITS = 18, BINS = 4 * THREADS, LISTED = 1024;
constexpr u32 LAST_TOKEN = (1u << TOKEN_BITS) - 1;
constexpr float PER_NAT = 64;  // bins of a unit of logits, or of logits over temperature
static_assert(WIDTH <= 1 << TOKEN_BITS, "");

struct Arguments {
  const float *logits, *temperature, *top_p, *min_p;
  const long long *top_k, *keys;
  long long* out;
};

__shared__ u64 rooms[4][CLUSTER * WARPS];
__shared__ u32 leading;  // the best of the block so far, made to sort
__shared__ __align__(16) u32 counts[BINS], lows[BINS], highs[BINS];
__shared__ u64 warp_sums[WARPS], found[3], list[LISTED], border;
__shared__ u32 weights[LISTED], listed;
extern __shared__ float kept[];  // the block's part of the row
#define X(i) kept[(i) * THREADS + threadIdx.x]
#define EACH_ITEM _Pragma("unroll 4") for (int i = 0; i < ITEMS; i++)
#define TOKEN(i) ((i) * LANES + rank * THREADS + threadIdx.x)

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000); }
__device__ __forceinline__ u32 sortable(float x) {
  u32 bits = __float_as_uint(x + 0.f);  // -0 is 0
  return bits ^ ((int)bits < 0 ? ~0u : 1u << 31);
}
__device__ __forceinline__ float sorted_value(u32 bits) { return __uint_as_float(bits ^ ((int)bits < 0 ? 1u << 31 : ~0u)); }
__device__ __forceinline__ u64 key_of(u32 sorts, u32 token) { return (u64)sorts << TOKEN_BITS | (LAST_TOKEN - token); }
__device__ __forceinline__ u32 warp_most(u32 v) {
  u32 most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(v));
  return most;
}

// Every warp's value to every block.
__device__ __forceinline__ void tell(u64 value, u64* room, u32 rank) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < CLUSTER)
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(in_cluster(shared_address(room + rank * WARPS + warp), lane)), "l"(value)
                 : "memory");
  cluster_sync();
}
template <bool SUM>
__device__ __forceinline__ u64 told(const u64* room) {
  u64 all = 0;
#pragma unroll
  for (int i = threadIdx.x % 32; i < CLUSTER * WARPS; i += 32) all = SUM ? all + room[i] : max(all, room[i]);
#pragma unroll
  for (int apart = 16; apart; apart /= 2) {
    const u64 other = __shfl_xor_sync(~0u, all, apart);
    all = SUM ? all + other : max(all, other);
  }
  return all;
}

__device__ __forceinline__ u32 mixed(u32 x) {  // the finalizer of MurmurHash3 (public domain)
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}

struct Row {
  float largest, temperature;
  u32 rank;
};
__device__ __forceinline__ u32 mass(float x, const Row& row) {  // of probability: the largest logit's is 2^30
  return __float2uint_rz(expf(__fdiv_rn(x - row.largest, row.temperature)) * 0x1p30f);
}
template <bool MASS>
__device__ __forceinline__ int bin_of(float x, const Row& row) {  // falls as x grows
  const float below = row.largest - x;
  return (int)fminf((MASS ? __fdiv_rn(below, row.temperature) : below) * PER_NAT, BINS - 1.f);
}
// The lowest key that is kept when keys from the largest down are kept until they weigh enough: `share` keys, or MASS that part
// of the mass, out of those from `lowest` up. The bin in which this happens is found first, then the key in a list of the
// bin's, or where they are too many bit by bit.
template <bool MASS>
__device__ u64 border_of(u64 lowest, double share, const Row& row, int& turn) {
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rank = row.rank;
  for (int i = thread; i < BINS; i += THREADS) counts[i] = lows[i] = highs[i] = 0;
  if (thread == 0) listed = 0;
  __syncthreads();
  EACH_ITEM {
    const float x = X(i);
    const u32 weight = MASS ? mass(x, row) : 1;
    if (TOKEN(i) < WIDTH && weight && key_of(sortable(x), TOKEN(i)) >= lowest) {
      const int bin = bin_of<MASS>(x, row);
      atomicAdd(counts + bin, 1);
      if (MASS) atomicAdd(lows + bin, weight & 0x7FFF), atomicAdd(highs + bin, weight >> 15);
    }
  }
  cluster_sync();
  u32 number[4] = {0, 0, 0, 0};
  u64 sums[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) {
    const u32 other = (rank + i) % CLUSTER;
    u32 v[4];
    auto read = [&](u32* from) {
      asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                   : "r"(in_cluster(shared_address(from + 4 * thread), other)));
    };
    read(counts);
#pragma unroll
    for (int j = 0; j < 4; j++) number[j] += v[j];
    if (!MASS) continue;
    read(lows);
#pragma unroll
    for (int j = 0; j < 4; j++) sums[j] += v[j];
    read(highs);
#pragma unroll
    for (int j = 0; j < 4; j++) sums[j] += (u64)v[j] << 15;
  }
  u64 all = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (!MASS) sums[j] = number[j];
    all += sums[j];
  }
  u64 upto = all, total = 0;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const u64 before = __shfl_up_sync(~0u, upto, apart);
    if (lane >= apart) upto += before;
  }
  if (lane == 31) warp_sums[warp] = upto;
  __syncthreads();
  for (u32 i = 0; i < WARPS; i++) {
    if (i < warp) upto += warp_sums[i];
    total += warp_sums[i];
  }
  const u64 wanted = MASS ? max((u64)ceil(share * (double)total), 1ull) : min((u64)share, total);
  u64 before = upto - all;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (before < wanted && before + sums[j] >= wanted) found[0] = 4 * thread + j, found[1] = before, found[2] = number[j];
    before += sums[j];
  }
  __syncthreads();
  const int bin = (int)found[0];
  const u64 above = found[1];
  const u32 many = (u32)found[2];
  if (many > LISTED) {  // hundreds of equal logits
    u64 prefix = 0;
    for (int bit = 31 + TOKEN_BITS; bit >= 0; bit--, turn ^= 1) {
      const u64 tried = prefix | 1ull << bit;
      u64 weight = 0;
      EACH_ITEM {
        const u64 key = key_of(sortable(X(i)), TOKEN(i));
        if (TOKEN(i) < WIDTH && key >= tried && key >= lowest) weight += MASS ? mass(X(i), row) : 1;
      }
#pragma unroll
      for (int apart = 16; apart; apart /= 2) weight += __shfl_xor_sync(~0u, weight, apart);
      tell(weight, rooms[2 + turn], rank);
      if (told<true>(rooms[2 + turn]) >= wanted) prefix = tried;
    }
    cluster_sync();  // the bins may be used again
    return prefix;
  }
  EACH_ITEM {
    const float x = X(i);
    const u64 key = key_of(sortable(x), TOKEN(i));
    if (TOKEN(i) < WIDTH && bin_of<MASS>(x, row) == bin && key >= lowest) {
      const u32 weight = MASS ? mass(x, row) : 1;
      u32 place;
      if (weight) {
        asm volatile("atom.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(place) : "r"(in_cluster(shared_address(&listed), 0)) : "memory");
        asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(in_cluster(shared_address(list + place), 0)), "l"(key) : "memory");
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(in_cluster(shared_address(weights + place), 0)), "r"(weight)
                     : "memory");
      }
    }
  }
  cluster_sync();
  if (rank == 0)
    for (u32 i = thread; i < many; i += THREADS) {
      const u64 key = list[i];
      u64 before = above;
      for (u32 other = 0; other < many; other++)
        if (list[other] > key) before += weights[other];
      if (before < wanted && before + weights[i] >= wanted)
#pragma unroll
        for (u32 to = 0; to < CLUSTER; to++)
          asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(in_cluster(shared_address(&border), to)), "l"(key) : "memory");
    }
  cluster_sync();
  return border;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) draw(const __grid_constant__ Arguments a) {
  const u32 rank = blockIdx.x % CLUSTER, thread = threadIdx.x;
  const int row = blockIdx.x / CLUSTER;
  cluster_arrive();
  if (thread == 0) leading = 0;
  launch_next();
  wait_kernel_before();
  float most = -infinity();
  EACH_ITEM X(i) = TOKEN(i) < WIDTH ? a.logits[(long long)row * WIDTH + TOKEN(i)] : -infinity();
  const float temperature = a.temperature[row];
  EACH_ITEM {
    if (X(i) != X(i)) X(i) = infinity();  // not a number: the row fails as one with an infinite logit
    most = fmaxf(most, X(i));
  }
  cluster_wait();  // all blocks have started
  tell(warp_most(sortable(most)), rooms[0], rank);
  const float largest = sorted_value((u32)told<false>(rooms[0]));
  const bool failed = !(fabsf(largest) < infinity());
  u32 best = 0, winner = LAST_TOKEN;  // of this thread, made to sort
  if (failed || temperature <= 0) {
    EACH_ITEM
      if (X(i) == largest && TOKEN(i) < WIDTH) best = ~0u, winner = min(winner, TOKEN(i));
  } else {
    u64 lowest = 0;
    const Row in{largest, temperature, rank};
    const long long top_k = a.top_k[row];
    int turn = 0;
    if (top_k > 0 && top_k < WIDTH) lowest = border_of<false>(lowest, (double)top_k, in, turn);
    if (a.top_p[row] < 1) lowest = border_of<true>(lowest, (double)a.top_p[row], in, turn);
    const float floor = logf(a.min_p[row]), sharpness = fminf(__fdiv_rn(1.f, temperature), 3e38f);
    const u32 seed = (u32)a.keys[2 * row], stream = (u32)a.keys[2 * row + 1];
    EACH_ITEM {
      const u32 bits = mixed(mixed(TOKEN(i) * 0x9E3779B1u + seed) + stream);
      const float u = fminf(__fadd_rn(__uint2float_rn(bits), 0.5f) * 0x1p-32f, 1 - 0x1p-24f), below = X(i) - largest;
      // Noise is -log(-log(1 - u)), at most -log(u): what cannot win even so is not looked at. 0.01: for rounding.
      const u32 first = *(volatile u32*)&leading;
      const float lead = first ? sorted_value(first) : -infinity();
      if (u <= __expf(below * sharpness - lead + 0.01f) && TOKEN(i) < WIDTH) {
        const float scaled = __fdiv_rn(below, temperature);
        if (!(scaled < floor) && key_of(sortable(X(i)), TOKEN(i)) >= lowest) {
          const u32 sorts = sortable(__fadd_rn(scaled, -logf(-log1pf(-u))));
          if (sorts > best) best = sorts, winner = TOKEN(i);
          if (sorts > first) atomicMax(&leading, sorts);
        }
      }
    }
  }
  const u32 of_warp = warp_most(best);
  u32 token;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(token) : "r"(best == of_warp ? winner : LAST_TOKEN));
  tell(key_of(of_warp, token), rooms[1], rank);
  if (rank == 0 && thread < 32) {
    const u64 drawn = told<false>(rooms[1]);
    if (thread == 0) a.out[row] = failed ? -1 : (long long)(LAST_TOKEN - ((u32)drawn & LAST_TOKEN));
  }
}
